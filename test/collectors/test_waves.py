"""Batches of trajectories that begin together and wait for the last of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from collectors.collecting import Failing, make_env, make_policy

from torchrl_llm.collectors import ChannelCollector, LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.rollouts import ends_trajectory, row_list, sampled_tokens


def _waves(policy, num_envs=3, **options):
    return LLMCollector(
        make_env(num_envs, **options),
        policy=policy,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )


def _facts(batch):
    return [(row["query"], row["turn"].item()) for row in batch.unbind(0)]


@pytest.mark.parametrize("tool", [None, "a result"])
def test_each_batch_is_one_trajectory_of_each_row_whatever_their_lengths(policy, tool):
    # Question i takes 1 + i % 3 turns.
    batches = iter(_waves(policy, 3, tool=tool))
    first, second = next(batches), next(batches)
    assert sorted(_facts(first)) == [
        ("question 0", 0),
        ("question 1", 0),
        ("question 1", 1),
        ("question 2", 0),
        ("question 2", 1),
        ("question 2", 2),
    ]
    assert {query for query, _ in _facts(second)} == {"question 3", "question 4", "question 5"}
    assert "_step" not in first.keys()


def test_a_row_that_has_ended_is_not_answered_again(policy):
    asked = []

    def counted(td):
        out = policy(td)
        asked.append([len(ids) for ids in read_rows(out, ("tokens", "response"))])
        return out

    collector = _waves(counted, 3)
    batch = next(iter(collector))
    answered = [[bool(length) for length in call] for call in asked]
    assert answered == [[True, True, True], [False, True, True], [False, False, True]]
    assert sum(map(sampled_tokens, batch.unbind(0))) == sum(map(sum, asked))


def test_turns_of_a_trajectory_extend_each_other_token_for_token(tokenizer):
    collector = _waves(make_policy(tokenizer), 3, tool="a result")
    rows = [r for r in next(iter(collector)).unbind(0) if r["query"] == "question 2"]
    assert len(rows) == 3
    for before, after in pairwise(rows):
        full, prompt = before["tokens", "full"], after["tokens", "prompt"]
        assert len(prompt) > len(full)
        assert torch.equal(prompt[: len(full)], full)


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_wave_that_was_interrupted_goes_on_bit_for_bit(policy, tmp_path, calls):
    whole = [
        [ids.tolist() for ids in read_rows(batch, ("tokens", "full"))]
        for _, batch in zip(range(2), _seeded(_waves(policy)), strict=False)
    ]
    cut, found = _waves(policy), []
    torch.manual_seed(0)
    cut._rollout.policy = Failing(cut.policy, calls)
    with pytest.raises(ValueError, match="broken"):
        found.extend(iter(cut))
    torch.save({"state": cut.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "cut.pt")

    torch.manual_seed(1)
    resumed = _waves(policy)
    saved = torch.load(tmp_path / "cut.pt", weights_only=False)
    resumed.load_state_dict(saved["state"])
    torch.set_rng_state(saved["rng"])
    batches = iter(resumed)
    while len(found) < 2:
        found.append(next(batches))
    assert [[ids.tolist() for ids in read_rows(b, ("tokens", "full"))] for b in found] == whole


def _seeded(collector):
    torch.manual_seed(0)
    return iter(collector)


@pytest.mark.parametrize("calls", [1, 2])
def test_what_begins_together_is_dropped_together(policy, calls):
    collector = _waves(policy)
    asked = 0

    def drop():
        nonlocal asked
        asked += 1
        if asked == calls:
            collector._rollout.drop()

    collector.after_call = drop
    batch = next(iter(collector))
    # After one call a trajectory has ended, and has gone with the two that had not.
    assert sorted(_facts(batch)) == [
        ("question 3", 0),
        ("question 4", 0),
        ("question 4", 1),
        ("question 5", 0),
        ("question 5", 1),
        ("question 5", 2),
    ]
    assert asked == calls + 3
    assert collector.tokens_in_flight == 0
    assert collector.sampled_tokens > sum(map(sampled_tokens, batch.unbind(0)))
    assert len(_facts(next(iter(collector)))) == 6


def test_a_wave_that_is_given_up_while_the_policy_waits_its_turn_is_not_continued(policy):
    collector = _waves(policy)
    gate, entered = collector._calls, []

    class Late:
        """A gate at which the wave is given up between the look at the flag and the call."""

        def work(self):
            entered.append(len(entered))
            if len(entered) == 3:
                collector._rollout.drop()
            return gate.work()

    collector._rollout.calls = Late()
    batch = next(iter(collector))
    assert {query for query, _ in _facts(batch)} == {"question 3", "question 4", "question 5"}
    assert len(entered) == 6


def test_a_learner_counts_the_trajectories_that_workers_deliver(policy):
    channel = LocalChannel(max_size=4)
    learner = ChannelCollector(channel, batch_rows=4, timeout_s=20)
    workers = [
        CollectorWorker(_waves(policy, 3), channel, name=name, claim_rows=3) for name in "ab"
    ]
    learner.grant(6)
    for worker in workers:
        assert channel.claim(worker.name, 3, timeout_s=0)
        worker._put(worker.collector.rollout())
    rows = row_list(learner.collect())
    # Deliveries are taken whole: three trajectories are too few, six are there.
    assert sum(map(ends_trajectory, rows)) == 6
    assert len(rows) == 12  # of one, two and three turns, twice
    assert all(counts.claimed == 0 for counts in channel.workers().values())

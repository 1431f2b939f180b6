import itertools

import pytest
import torch
from tensordict import TensorDict
from torchrl._utils import logger
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm.data import FinishReason, MaskReason, Source
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs.transforms import KLComputation
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.trainers.batch_source import (
    BatchSource,
    mark_truncated,
    tokens_by_reason,
    trained_rows,
)
from torchrl_llm.trainers.episode_metrics import rollout_metrics


def row(reward, group=0, *, length=3, cut=False):
    """A single-turn row: two prompt tokens and ``length`` sampled ones."""
    source = torch.tensor([0, 1] + [int(Source.SAMPLED)] * length, dtype=torch.int8)
    reason = torch.where(source == Source.SAMPLED, 0, 1).to(torch.int8)
    full = torch.arange(2 + length)
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    return TensorDict(
        {
            "tokens": {
                "prompt": full[:2],
                "response": full[2:],
                "full": full,
                "finish_reason": torch.tensor(int(finish), dtype=torch.int8),
            },
            "trace": {"source": source, "mask_reason": reason},
            "next": {
                "reward": torch.full((1, 1), float(reward)),
                "reward_valid": torch.tensor(reward == reward),
                "done": torch.ones(1, dtype=torch.bool),
            },
            "group_id": torch.tensor(group),
        }
    )


def source(batches, num_rows, *, keep_zero_variance=True, group=2, **kwargs):
    credit = MCAdvantage(grpo_size=group, keep_zero_variance=keep_zero_variance)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rows),
        sampler=SamplerWithoutReplacement(),
        batch_size=num_rows,
        transform=credit,
    )
    batches = [lazy_rows(batch) for batch in batches]
    return buffer, BatchSource(batches, buffer, credit=credit, num_rows=num_rows, **kwargs)


def totals(batch_source):
    """The columns of the last step that are not zero."""
    return {name: number for name, number in batch_source.ledger.totals.items() if number}


def test_a_plain_batch_is_trained_whole():
    buffer, batch_source = source([[row(0), row(1), row(1, 1), row(0, 1)]], 4)
    assert len(batch_source.fill()) == 4
    assert len(buffer) == 4
    assert totals(batch_source) == {"generated": 12, "trained": 12}


def test_groups_without_variance_are_dropped_and_counted():
    batch = [row(1), row(1), row(1, 1), row(0, 1)]
    buffer, batch_source = source([batch], 4, keep_zero_variance=False)
    assert len(batch_source.fill()) == 4  # metrics see all of them
    assert len(buffer) == 2
    assert totals(batch_source) == {"generated": 12, "trained": 6, "filtered": 6}


def test_a_step_that_trains_nothing_says_so_once(monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", said.append)
    trained = [row(0, 2), row(1, 2)]
    batches = [trained, [row(1), row(1)], [row(0, 1), row(0, 1)]]
    _, batch_source = source(batches, 2, keep_zero_variance=False)
    batch_source.fill()
    assert not said
    for _ in batches[1:]:
        batch_source.fill()
    assert len(said) == 1
    assert "no token of this step is trained" in said[0]
    assert "'filtered': 6" in said[0]


def test_resampling_fills_the_batch_and_counts_the_surplus():
    flat = [row(1), row(1), row(1, 1), row(0, 1)]
    mixed = [row(0, 2), row(1, 2), row(0, 3), row(1, 3)]
    buffer, batch_source = source([flat, mixed], 4, keep_zero_variance=False, max_resamples=3)
    assert len(batch_source.fill()) == 8
    assert len(buffer) == 4
    expected = {"generated": 24, "trained": 12, "filtered": 6, "surplus": 6}
    assert totals(batch_source) == expected


def test_resampling_gives_up_with_what_it_has():
    flat = [[row(1, n), row(1, n)] for n in range(3)]
    buffer, batch_source = source(flat, 2, keep_zero_variance=False, max_resamples=2)
    assert len(batch_source.fill()) == 6
    assert len(buffer) == 0
    assert totals(batch_source) == {"generated": 18, "filtered": 18}


def test_masked_responses_stay_in_the_baseline_and_train_nothing():
    batch = [row(0, cut=True), row(1)]
    buffer, batch_source = source([batch], 2, truncated="mask")
    collected = batch_source.fill()
    assert totals(batch_source) == {"generated": 6, "trained": 3, "truncated": 3}
    kept = buffer.storage.get(torch.arange(2))
    # (0 - 0.5) / 0.7071 and (1 - 0.5) / 0.7071: the cut one is in the mean.
    advantages = [a.item() for a in read_rows(kept, "advantage")]
    assert advantages == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert rollout_metrics(collected)["train/truncated"] == 0.5


def test_dropped_responses_leave_the_baseline_but_not_the_metrics():
    batch = [row(0, cut=True), row(1), row(0), row(0)]
    buffer, batch_source = source([batch], 4, group=4, truncated="drop")
    collected = batch_source.fill()
    assert totals(batch_source) == {"generated": 12, "trained": 9, "truncated": 3}
    assert len(buffer) == 3
    assert rollout_metrics(collected)["train/reward"] == 0.25
    assert rollout_metrics(collected)["train/invalid"] == 0.0


def test_invalid_rewards_are_counted_and_are_no_zeros():
    nan = float("nan")
    _, batch_source = source([[row(nan), row(1), row(0), row(0)]], 4, group=4)
    collected = batch_source.fill()
    assert totals(batch_source) == {"generated": 12, "trained": 9, "invalid": 3}
    metrics = rollout_metrics(collected)
    assert metrics["train/reward"] == pytest.approx(1 / 3)
    assert metrics["train/invalid"] == 0.25


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_the_reward_of_a_step_has_the_penalty_of_the_buffer_in_it(truncated):
    rows = [row(1, cut=True), row(0), row(1), row(0)]
    for made in rows:
        made["log_probs"] = {"full": torch.zeros(5)}
        made["ref_log_probs"] = {"full": torch.tensor([0.0, 0.0, -0.5, -0.5, 0.0])}
    buffer, batch_source = source([rows], 4, group=4, truncated=truncated)
    buffer.append_transform(KLComputation(coeff=0.1))
    # A divergence of one nat each: 0.5 - 0.1, whatever becomes of the row that was cut.
    assert rollout_metrics(batch_source.fill())["train/reward"] == pytest.approx(0.4)


def test_a_group_that_is_not_full_waits_and_is_carried():
    _, batch_source = source([[row(0), row(1), row(1, 1)], [row(0, 1)]], 4)
    batch_source.fill()
    assert totals(batch_source) == {"generated": 9, "trained": 6, "pending": 3}
    batch_source.fill()
    assert totals(batch_source) == {"generated": 3, "trained": 6}


def test_a_buffer_that_loses_rows_does_not_close_the_ledger(monkeypatch):
    buffer, batch_source = source([[row(0), row(1)]], 2)
    real = buffer.extend
    monkeypatch.setattr(buffer, "extend", lambda rows: (real(rows), buffer.empty())[0])
    with pytest.raises(DataError, match="ledger does not close"):
        batch_source.fill()


def test_a_storage_of_another_size_is_refused():
    credit = MCAdvantage(grpo_size=2)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=credit)
    with pytest.raises(ConfigError, match="its max_size is 8"):
        BatchSource([], buffer, credit=credit, num_rows=4)


def test_a_collector_that_has_ended_is_a_clear_error():
    _, batch_source = source([], 2)
    with pytest.raises(ConfigError, match="total_dialog_turns=-1"):
        batch_source.fill()


def test_marking_changes_only_the_sampled_tokens_of_cut_rows():
    rows = [row(0, cut=True), row(1)]
    mark_truncated(rows[0], drop=False)
    rows = lazy_rows(rows)
    reasons = [r.tolist() for r in read_rows(rows, ("trace", "mask_reason"))]
    assert reasons == [[1, 1, 2, 2, 2], [1, 1, 0, 0, 0]]
    assert tokens_by_reason(rows) == {MaskReason.TRAINED: 3, MaskReason.TRUNCATED: 3}


def test_rows_without_a_token_to_train_on_are_left_out_of_the_forward():
    rows = [row(0, cut=True), row(1), row(0, cut=True)]
    stack = lazy_rows(rows)
    assert trained_rows(stack) is stack
    for each in rows[::2]:
        mark_truncated(each, drop=False)
    assert [r.item() for r in read_rows(trained_rows(lazy_rows(rows)), ("next", "reward"))] == [1.0]
    assert trained_rows(lazy_rows(rows[::2])) is None


def test_rewards_are_summed_over_the_turns_of_an_episode():
    first, last = row(0.5), row(1.0)
    first["next", "done"] = torch.zeros(1, dtype=torch.bool)
    metrics = rollout_metrics(lazy_rows([first, last, row(0)]))
    assert metrics["train/reward"] == 0.75  # (0.5 + 1.0 + 0) over two episodes


def test_the_state_carries_what_waits():
    batches = [[row(0), row(1), row(1, 1)], [row(0, 1)]]
    buffer, batch_source = source(batches, 4)
    batch_source.fill()
    other_buffer, other = source(itertools.islice(batches, 1, None), 4)
    other_buffer.load_state_dict(buffer.state_dict())
    other.load_state_dict(batch_source.state_dict())
    other.fill()
    assert totals(other) == {"generated": 3, "trained": 6}


def test_failures_of_rewards_elsewhere_are_shown_here(warned, monkeypatch):
    monkeypatch.setattr("torchrl_llm.data.failures._said", set())
    batch = [row(1.0), row(float("nan")), row(float("nan"), 1), row(0.5, 1)]
    told = {"type": "KeyError", "message": "'x'", "place": "/a/reward.py:7, in score"}
    for one, error in zip(batch, ({}, told, told, {}), strict=True):
        texts = {name: error.get(name, "") for name in ("type", "message", "place")}
        one.set(("next", "error"), TensorDict(texts))
    _, rows = source([batch] * 2, 4)
    rows.fill()
    rows.fill()
    shown = [line for line in warned if "KeyError" in line]
    assert len(shown) == 1
    assert shown[0].startswith("reward failed 2 times in a batch of 4 rows. ")
    assert f"\nKeyError: 'x' at {told['place']}\n" in shown[0]

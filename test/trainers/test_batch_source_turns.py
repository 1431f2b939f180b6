"""Trajectories of several turns on their way to the loss: joined, forked, counted, never twice."""

import pytest
import torch
from collectors.collecting import make_env, make_policy
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.transforms.context_strategy import SlidingWindow
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.trainers import BatchSource, rollout_metrics

_TURNS = 3


def _source(policy, *, repeats=2, num_envs=6, window=None, rows_per_trajectory=1):
    env = make_env(num_envs, _TURNS, tool="42", repeats=repeats, group_repeats=True)
    if window is not None:
        env = env.append_transform(SlidingWindow(window))
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    credit = MCAdvantage(grpo_size=repeats)
    capacity = num_envs * rows_per_trajectory
    buffer = ReplayBuffer(
        storage=LazyStackStorage(capacity), sampler=SamplerWithoutReplacement(), batch_size=capacity
    )
    buffer.append_transform(credit)
    buffer.append_transform(JoinTurns())
    source = BatchSource(
        collector,
        buffer,
        credit=credit,
        num_rows=num_envs,
        rows_per_trajectory=rows_per_trajectory,
    )
    return buffer, source


def _sampled(rows):
    """The sampled turns of the rows, each with the trajectory that it belongs to."""
    found = []
    for row in row_list(rows):
        source, turn = row["trace", "source"], row["trace", "turn"]
        mine = source == Source.SAMPLED
        for number in turn[mine].unique().tolist():
            ids = row["tokens", "full"][mine & (turn == number)].tolist()
            found.append((int(row["traj_id"]), ids))
    return sorted(found)


@pytest.mark.parametrize(("window", "rows_per_trajectory"), [(None, 1), (1, _TURNS)])
def test_each_sampled_token_is_trained_exactly_once(tokenizer, window, rows_per_trajectory):
    buffer, source = _source(
        make_policy(tokenizer), window=window, rows_per_trajectory=rows_per_trajectory
    )
    for _ in range(2):
        collected = source.fill()
        trained = _sampled(buffer.storage.get(torch.arange(len(buffer))))
        turns = [(int(r["traj_id"]), r["tokens", "response"].tolist()) for r in row_list(collected)]
        assert len(turns) == 6 * _TURNS
        assert trained == sorted(turns)
        totals = source.ledger.totals
        assert totals["generated"] == totals["trained"] > 0
        assert not totals["surplus"]


def test_a_trajectory_is_one_row_unless_its_history_is_rewritten(tokenizer):
    buffer, source = _source(make_policy(tokenizer))
    source.fill()
    assert len(buffer) == 6
    buffer, source = _source(make_policy(tokenizer), window=1, rows_per_trajectory=_TURNS)
    source.fill()
    # With one turn in the window, the second turn continues the first and the third does not.
    assert 6 < len(buffer) <= 6 * _TURNS


def test_tool_tokens_are_part_of_the_row_and_never_trained(tokenizer):
    buffer, source = _source(make_policy(tokenizer))
    source.fill()
    for row in row_list(buffer.storage.get(torch.arange(len(buffer)))):
        tool = row["trace", "source"] == Source.TOOL
        assert tokenizer.decode(row["tokens", "full"][tool]).count("42") == _TURNS - 1
        assert not row["masks", "all_assistant_mask"][tool].any()
        assert (row["log_probs", "full"][tool] == 0).all()


def test_metrics_count_trajectories_and_not_turns(tokenizer):
    _, source = _source(make_policy(tokenizer))
    rows = source.fill()
    metrics = rollout_metrics(rows)
    assert len(read_rows(rows, ("next", "reward"))) == 6 * _TURNS
    assert metrics["train/reward"] == _TURNS  # one a turn
    assert metrics["train/reward_std"] == 0


def test_room_for_forks_is_asked_for():
    buffer = ReplayBuffer(storage=LazyStackStorage(6), sampler=SamplerWithoutReplacement())
    credit = MCAdvantage(grpo_size=2)
    with pytest.raises(ConfigError, match="must hold the 18 rows"):
        BatchSource([], buffer, credit=credit, num_rows=6, rows_per_trajectory=_TURNS)

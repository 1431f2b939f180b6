"""Credit without comparison, by hand."""

from __future__ import annotations

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write
from tensordict import TensorDict

from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.errors import DataError
from torchrl_llm.objectives.credit import (
    ConstantCredit,
    EpisodicReturn,
    MonteCarloReturn,
    PerStepReward,
)


def _turns(*rewards, traj=0, **last):
    rows = [row(r, traj=traj, done=False, turn=k) for k, r in enumerate(rewards[:-1])]
    return [*rows, row(rewards[-1], traj=traj, turn=len(rewards) - 1, **last)]


def _joinable():
    """Two turns, the second's prompt going on where the first ended."""
    rows, ids = _turns(1.0, 2.0), torch.arange(9)
    for made, (prompt, full) in zip(rows, ((2, 4), (5, 8)), strict=True):
        parts = {"prompt": ids[:prompt], "response": ids[prompt:full], "full": ids[:full]}
        for name, value in parts.items():
            made["tokens", name] = value
    return rows


def test_returns_by_hand_are_discounted_once_a_turn():
    # 4; 2 + 4/2; 1 + 4/2
    assert advantages(write(MonteCarloReturn(0.5), _turns(1.0, 2.0, 4.0))) == [3.0, 4.0, 4.0]
    assert advantages(write(MonteCarloReturn(), _turns(1.0, 2.0, 4.0))) == [7.0, 6.0, 4.0]


def test_calls_of_the_model_within_one_turn_are_not_discounted():
    """A turn of three calls: the reference discounts the first by gamma cubed."""
    rows = [row(0.0, traj=0, done=False, turn=0) for _ in range(3)] + [row(8.0, traj=0, turn=1)]
    assert advantages(write(MonteCarloReturn(0.5), rows)) == [4.0, 4.0, 4.0, 8.0]


def test_a_turn_that_thought_with_tools_is_one_with_the_next():
    rows = _turns(0.0, 1.0)
    rows[0]["next", "tools"] = TensorDict(auxiliary=torch.tensor([True]))
    rows[1]["next", "tools"] = TensorDict(auxiliary=torch.tensor([False]))
    assert advantages(write(MonteCarloReturn(0.5), rows)) == [1.0, 1.0]
    rows[0]["next", "tools", "auxiliary"] = torch.tensor([False])  # an action
    assert advantages(write(MonteCarloReturn(0.5), rows)) == [0.5, 1.0]


def test_rows_without_a_turn_number_are_turns():
    rows = [row(0.0, traj=0, done=False), row(8.0, traj=0)]
    assert advantages(write(MonteCarloReturn(0.5), rows)) == [4.0, 8.0]


def test_each_token_gets_what_comes_after_it():
    rows = [row([1.0, 2.0, 3.0], traj=0, done=False), row([0.0, 8.0], traj=0, tokens=2)]
    first, second = advantages(write(MonteCarloReturn(0.5), rows))
    # within a turn nothing is discounted; between them 8 becomes 4
    assert first == [0, 0, 10.0, 9.0, 7.0]
    assert second == [0, 0, 8.0, 8.0]


def test_trajectories_that_are_woven_into_each_other_are_kept_apart():
    a, b = _turns(1.0, 2.0, traj=0), _turns(10.0, 20.0, traj=1)
    got = advantages(write(MonteCarloReturn(), [a[0], b[0], b[1], a[1]]))
    assert sorted(got) == [2.0, 3.0, 20.0, 30.0]


def test_a_cut_episode_is_kept_dropped_or_goes_on_with_its_value():
    rows = _turns(0.0, 1.0, truncated=True)
    rows[-1]["next", "state_value"] = torch.tensor([[4.0]])
    assert advantages(write(MonteCarloReturn(0.5), rows)) == [0.5, 1.0]
    dropping = MonteCarloReturn(0.5, truncated="drop")
    assert advantages(write(dropping, rows)) == []
    assert dropping.get_stats()["filtered_tokens"] == 6
    # 1 + 4/2 = 3; 0 + 3/2
    assert advantages(write(MonteCarloReturn(0.5, truncated="bootstrap"), rows)) == [1.5, 3.0]


def test_an_episode_that_ended_has_no_value_behind_it():
    for truncated in ("bootstrap", "drop"):
        rows = _turns(0.0, 1.0, truncated=False)
        assert advantages(write(MonteCarloReturn(0.5, truncated=truncated), rows)) == [0.5, 1.0]


def test_terminated_and_truncated_at_once_is_terminated():
    rows = _turns(1.0, truncated=True)
    rows[-1]["next", "terminated"] = torch.tensor([True])
    assert advantages(write(MonteCarloReturn(truncated="drop"), rows)) == [1.0]


@pytest.mark.parametrize("value", [None, torch.tensor([NAN]), torch.zeros(2)])
def test_a_value_that_is_no_number_is_an_error_that_names_its_key(value):
    rows = _turns(1.0, truncated=True)
    if value is not None:
        rows[-1]["next", "critic"] = value
    with pytest.raises(DataError, match=r"critic.*keep or drop"):
        write(MonteCarloReturn(truncated="bootstrap", value_key=("next", "critic")), rows)


def test_joined_turns_have_no_returns_of_their_own():
    for credit in (MonteCarloReturn(0.5), MonteCarloReturn(), PerStepReward()):
        buffer = ReplayBuffer(transform=credit)
        buffer.append_transform(JoinTurns())  # runs first
        with pytest.raises(DataError, match="append JoinTurns"):
            buffer.extend(_joinable())


def test_turns_joined_afterwards_keep_their_advantages():
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.append_transform(MonteCarloReturn(0.5))
    buffer.extend(_joinable())
    # 2 and 1 + 2/2 are equal, so one number; per step they differ and lie at their tokens
    assert advantages(buffer) == [2.0]
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.append_transform(PerStepReward())
    buffer.extend(_joinable())
    assert advantages(buffer) == [[0, 0, 1, 1, 0, 2, 2, 2]]
    assert buffer[0]["advantage"].dtype == torch.float32


def test_joined_turns_stay_in_double_precision():
    rows = _joinable()
    for made, reward in zip(rows, (0.1, [0.2, 0.3, 0.4]), strict=True):
        made["next", "reward"] = torch.tensor(reward, dtype=torch.float64).reshape(-1, 1)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.append_transform(PerStepReward())
    buffer.extend(rows)
    assert advantages(buffer) == [[0, 0, 0.1, 0.1, 0, 0.2, 0.3, 0.4]]
    assert buffer[0]["next", "reward"].flatten().tolist() == [0, 0.1, 0, 0.2, 0.3, 0.4]


def test_per_step_reward_by_turn_and_by_token():
    rows = [row(1.0, traj=0, done=False), row([0.0, 3.0], traj=0, tokens=2)]
    assert advantages(write(PerStepReward(), rows)) == [1.0, [0, 0, 0.0, 3.0]]


@pytest.mark.parametrize(
    ("how", "value"), [("sum", 7.0), ("max", 4.0), ("last", 4.0), ("mean", 7 / 3)]
)
def test_the_episodes_return_for_every_row(how, value):
    got = advantages(write(EpisodicReturn(trajectory_return=how), _turns(1.0, 2.0, 4.0)))
    assert got == pytest.approx([value] * 3)


def test_a_constant_for_every_row():
    assert advantages(write(ConstantCredit(), _turns(1.0, 2.0))) == [1.0, 1.0]
    assert advantages(write(ConstantCredit(0.25), [row(9.0)])) == [0.25]


def test_a_constant_keeps_the_dtype_of_the_reward():
    # 0.1 in float64 to its last digit, and not the float32 next to it.
    assert advantages(write(ConstantCredit(0.1), [row(9.0, dtype=torch.float64)])) == [0.1]
    narrow = advantages(write(ConstantCredit(0.1), [row(9.0)]))
    assert narrow == [torch.tensor(0.1).item()] != [0.1]


def test_invalid_trajectories_are_not_written():
    for credit in (ConstantCredit(), EpisodicReturn(), PerStepReward(), MonteCarloReturn()):
        assert len(write(credit, [*_turns(1.0, NAN), row(1.0, traj=5)])) == 1
        assert credit.get_stats()["invalid_tokens"] == 6


def test_rules_without_groups_take_no_group_size():
    for rule in (ConstantCredit, EpisodicReturn, PerStepReward, MonteCarloReturn):
        with pytest.raises(TypeError, match="group_size"):
            rule(group_size=2)


def test_as_many_rewards_as_tokens_or_one():
    with pytest.raises(DataError, match="5 rewards"):
        write(PerStepReward(), [row([1.0] * 5, tokens=2).exclude(("tokens", "full"))])

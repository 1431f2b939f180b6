"""Reward, deviation and success of a step against episodes counted by hand or in a loop."""

import math
import random

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.trainers.curriculum import successes
from torchrl_llm.trainers.episode_metrics import rollout_metrics
from torchrl_llm.trainers.reward_watch import RewardWatch

NAN = float("nan")


def turn(reward, success=False, *, traj=None, done=True, valid=True, agent=None, **after):
    """A row as a collector delivers it."""
    row = TensorDict(
        tokens={
            "response": torch.zeros(2, dtype=torch.int64),
            "finish_reason": torch.tensor(0, dtype=torch.int8),
        },
        next={
            "reward": torch.tensor([[float(reward)]]),
            "reward_valid": torch.tensor(valid),
            "success": torch.tensor([[success]]),
            "done": torch.tensor([done]),
            **after,
        },
    )
    if traj is not None:
        row.set("traj_id", torch.tensor(traj))
    return row if agent is None else row.set("agent", NonTensorData(agent))


def numbers(rows, *names):
    metrics = rollout_metrics(lazy_rows(rows))
    return [metrics[f"train/{name}"] for name in names or ("reward", "reward_std", "success")]


def test_an_episode_of_three_right_turns_is_one_success():
    rows = [turn(1, True, traj=0, done=done) for done in (False, False, True)]
    assert numbers(rows) == [3.0, 0.0, 1.0]  # success was 3.0


def test_success_is_that_of_the_last_turn():
    found_and_lost = [turn(1, True, traj=0, done=False), turn(0, False, traj=0)]
    lost_and_found = [turn(0, False, traj=1, done=False), turn(1, True, traj=1)]
    assert numbers(found_and_lost) == [1.0, 0.0, 0.0]
    # Turns of two episodes come in turn.
    mixed = [*found_and_lost[:1], *lost_and_found[:1], *found_and_lost[1:], *lost_and_found[1:]]
    assert numbers(mixed) == [1.0, 0.0, 0.5]


def test_valid_turns_of_an_invalid_episode_are_in_no_column():
    rows = [
        # 4 + 5 = 9
        turn(4, traj=0, done=False),
        turn(5, traj=0),
        # 20, but its last turn has no reward
        turn(20, True, traj=1, done=False),
        turn(NAN, True, traj=1, valid=False),
        # 10, but its first turn has none
        turn(NAN, traj=2, done=False, valid=False),
        turn(10, True, traj=2),
        # 1 + 2 + 8 = 11
        turn(1, traj=3, done=False),
        turn(2, traj=3, done=False),
        turn(8, True, traj=3),
    ]
    assert numbers(rows) == [10.0, 1.0, 0.5]  # mean of 9 and 11; it was 50 / 3, 1.0 and 4 / 3
    assert numbers(rows, "invalid", "turns") == [pytest.approx(2 / 9), 9 / 4]


def test_a_step_without_a_valid_episode_has_no_success():
    metrics = rollout_metrics(lazy_rows([turn(NAN, True, traj=0, valid=False)]))
    assert math.isnan(metrics["train/reward"])
    assert math.isnan(metrics["train/reward_std"])
    assert "train/success" not in metrics


def test_parts_of_the_reward_are_over_the_same_episodes():
    def part(value, valid=True):
        return TensorDict(
            task=TensorDict(value=torch.tensor([[float(value)]]), valid=torch.tensor(valid))
        )

    rows = [
        turn(1, traj=0, done=False, rewards=part(1)),
        turn(2, traj=0, rewards=part(2)),
        turn(8, traj=1, done=False, rewards=part(8)),
        turn(NAN, traj=1, valid=False, rewards=part(NAN, valid=False)),
        # Another part failed, so this one is not in the reward either.
        turn(NAN, traj=2, valid=False, rewards=part(16)),
        turn(7, traj=3, rewards=part(7)),
    ]
    assert numbers(rows, "reward", "reward_task") == [5.0, 5.0]  # (3 + 7) / 2
    assert numbers(rows, "invalid_task") == [pytest.approx(1 / 6)]


def test_players_of_one_trajectory_are_episodes_of_their_own():
    rows = [turn(1, True, traj=0, agent="x"), turn(-1, False, traj=0, agent="o")]
    assert numbers(rows) == [0.0, 1.0, 0.5]  # the deviation was that of their sum, 0


def test_the_turns_of_a_child_that_rides_along_are_its_parents():
    rows = [
        turn(0, False, traj=0, done=False, agent="x/child"),
        turn(2, True, traj=0, agent="x"),
        turn(4, False, traj=1, agent="x"),
    ]
    assert numbers(rows) == [3.0, 1.0, 0.5]


def test_rows_without_a_name_are_whole_episodes_one_after_the_other():
    rows = [turn(1, True, done=False), turn(2), turn(5, True)]
    assert numbers(rows) == [4.0, 1.0, 0.5]


@pytest.mark.parametrize("seed", range(5))
def test_columns_agree_with_a_loop_over_episodes(seed):
    draw = random.Random(seed)
    episodes = [
        [
            (draw.choice([-1.5, 0.0, 0.25, 2.0]), draw.random() < 0.5, draw.random() < 0.9)
            for _ in range(draw.randint(1, 4))
        ]
        for _ in range(12)
    ]
    rows, waiting = [], [list(enumerate(turns)) for turns in episodes]
    while any(waiting):  # turns of all episodes come in any order, those of one in theirs
        traj = draw.choice([at for at, left in enumerate(waiting) if left])
        number, (reward, success, valid) = waiting[traj].pop(0)
        done = number == len(episodes[traj]) - 1
        rows.append(turn(reward if valid else NAN, success, traj=traj, done=done, valid=valid))
    kept = [turns for turns in episodes if all(valid for *_, valid in turns)]
    returns = [sum(reward for reward, *_ in turns) for turns in kept]
    mean = sum(returns) / len(returns)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / len(returns))
    success = sum(turns[-1][1] for turns in kept) / len(kept)
    assert numbers(rows) == pytest.approx([mean, deviation, success])


@pytest.mark.parametrize("size", [3e38, -3e38])
def test_large_rewards_are_rewards(size):
    rows = [turn(size, traj=0, done=False), turn(size, traj=0), turn(0, traj=1)]
    size = torch.tensor(size).item()  # as float32 has it
    # Sums of 6e38 and 0: their mean and deviation are both 3e38.
    assert numbers(rows)[:2] == pytest.approx([size, abs(size)])
    watch = RewardWatch()
    assert watch.see(lazy_rows(rows)) is None
    assert not watch.is_all_invalid


def test_a_penalty_is_in_the_reward_and_in_no_judgement_of_the_task():
    before = [torch.tensor([[value]]) for value in (0.25, 0.75)]
    penalised = [
        turn(0.2, traj=0, reward_before_kl=before[0], done=False),
        turn(0.7, traj=0, reward_before_kl=before[1]),
        turn(0.5, traj=1, reward_before_kl=torch.tensor([[1.0]])),
    ]
    rows = lazy_rows([row.set("row_id", torch.tensor(7)) for row in penalised])
    assert rollout_metrics(rows)["train/reward"] == pytest.approx(0.7)  # (0.9 + 0.5) / 2
    assert successes(rows.exclude(("next", "success"))) == {7: [1.0, 1.0]}
    said = RewardWatch(no_signal_steps=1).see(rows)
    assert said is not None
    assert "the same reward (1)" in said

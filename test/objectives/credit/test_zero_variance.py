"""Groups with nothing to compare: equal within float32, whatever a KL penalty adds to them."""

from __future__ import annotations

import pytest
import torch
from objectives.credit.credit_rows import advantages, row, write

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.transforms import KLComputation
from torchrl_llm.objectives.credit import (
    BatchNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
)
from torchrl_llm.trainers import rollout_metrics

# One step of float32 below 1, what two kernels may differ by.
STEP = 2.0**-24
DIVIDING = {
    "mc": MCAdvantage,
    "mc_population": lambda size, **options: MCAdvantage(size, normalize="population", **options),
    "mc_turns": lambda size, **options: MCAdvantage(size, trajectory_return=None, **options),
    "hybrid": HybridNormalizedReturn,
    "batch": lambda size, **options: BatchNormalizedReturn(size, baseline="group", **options),
}
JUDGING = {name: made for name, made in DIVIDING.items() if name != "mc_turns"}
JUDGING["leave_one_out"] = LeaveOneOutAdvantage


def scored(reward, kl, **options):
    """A row whose response has a divergence of ``kl`` nats from the reference."""
    made = row(reward, **options)
    made["log_probs"] = {"full": torch.tensor([0.0, 0.0, -0.5, -0.5, -0.5])}
    made["ref_log_probs"] = {"full": torch.tensor([0.0, 0.0, -0.5 - kl, -0.5, -0.5])}
    return made


def penalised(credit, rows, coeff=0.1):
    buffer = ReplayBuffer(transform=credit)
    buffer.append_transform(KLComputation(coeff=coeff))
    buffer.extend(lazy_rows(rows))
    return buffer


def noisy(reward, group=0):
    return [scored(reward, kl, group=group) for kl in (0.0, STEP, -STEP, 2 * STEP)]


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.3])
@pytest.mark.parametrize("name", DIVIDING)
def test_rounding_of_a_penalty_is_no_advantage(name, reward):
    buffer = penalised(DIVIDING[name](4), noisy(reward))
    assert advantages(buffer) == [0.0] * 4  # up to 0.009 for a reward of 0 before
    if not reward:  # the noise is in the rewards
        assert len({r["next", "reward"].item() for r in buffer[:].unbind(0)}) > 1


@pytest.mark.parametrize("name", JUDGING)
def test_groups_without_variance_of_the_task_are_filtered(name):
    credit = JUDGING[name](4, keep_zero_variance=False)
    told = [scored(r, 0.5 * n, group=2) for n, r in enumerate((0.0, 0.0, 1.0, 1.0))]
    drifted = [scored(1.0, 0.5 * n, group=1) for n in range(4)]
    buffer = penalised(credit, [*noisy(0.0), *drifted, *told])
    assert {int(r["group_id"]) for r in buffer[:].unbind(0)} == {2}
    assert credit.get_stats()["filtered_groups"] == 2
    metrics = rollout_metrics(lazy_rows(_collected([*noisy(0.0), *drifted, *told])))
    assert metrics["train/zero_variance"] == pytest.approx(2 / 3)


def _collected(rows):
    for at, made in enumerate(KLComputation(coeff=0.1)(lazy_rows(rows)).unbind(0)):
        made["traj_id"] = torch.tensor(at)
        made["tokens", "finish_reason"] = torch.tensor(0)
        yield made


@pytest.mark.parametrize("name", DIVIDING)
def test_a_drift_alone_is_not_blown_up_to_the_size_of_a_reward(name):
    # Divided by their own deviation, penalties of 0 to 1e-5 nats would be advantages of 1.
    drifted = [scored(1.0, 1e-4 * n) for n in range(4)]
    assert advantages(penalised(DIVIDING[name](4), drifted)) == [0.0] * 4


def test_a_drift_counts_as_it_is_where_nothing_is_divided():
    drifted = [scored(1.0, 0.5 * n) for n in range(4)]  # penalties 0, 0.05, 0.1, 0.15
    wanted = [0.075, 0.025, -0.025, -0.075]
    assert advantages(penalised(MCAdvantage(4, normalize="none"), drifted)) == pytest.approx(
        wanted, abs=1e-6
    )
    found = advantages(penalised(LeaveOneOutAdvantage(4), drifted))
    assert found == pytest.approx([value * 4 / 3 for value in wanted], abs=1e-6)


def test_where_the_task_tells_answers_apart_the_penalty_is_part_of_the_return():
    # Returns 0, 1 - 0.1 and 0.8 - 0.3: mean 7 / 15.
    rows = [scored(0.0, 0.0), scored(1.0, 1.0), scored(0.8, 3.0)]
    returns = torch.tensor([0.0, 0.9, 0.5], dtype=torch.float64)
    wanted = (returns - 7 / 15) / returns.std()
    assert advantages(penalised(MCAdvantage(3), rows)) == pytest.approx(wanted.tolist(), rel=1e-5)


def test_bounds_look_at_the_tasks_return():
    credit = MCAdvantage(2, keep_return_bounds=(0.0, 1.0))
    rows = [scored(1.0, 0.5, group=0), scored(1.0, 1.0, group=0)]  # solved: a mean of 0.925 before
    rows += [scored(0.0, -0.5, group=1), scored(0.0, 0.0, group=1)]
    rows += [scored(0.0, 0.5, group=2), scored(1.0, 0.5, group=2)]
    assert {int(r["group_id"]) for r in penalised(credit, rows)[:].unbind(0)} == {2}


@pytest.mark.parametrize("name", JUDGING)
def test_sums_that_differ_by_rounding_are_equal(name):
    # 0.1 + 0.2 and 0.3 are 7e-9 apart in float32; so are 0.1 + 0.2 - 0.3 and 0.
    credit = JUDGING[name]
    three = [row(0.1, traj=0, done=False), row(0.2, traj=0), row(0.3, traj=1)]
    found = advantages(write(credit(2), three))
    assert found == [0.0] * 3
    none = [row(r, traj=0, done=r == -0.3) for r in (0.1, 0.2, -0.3)] + [row(0.0, traj=1)]
    assert advantages(write(credit(2), none)) == pytest.approx([0.0] * 4, abs=1e-8)
    filtering = credit(2, keep_zero_variance=False)
    assert advantages(write(filtering, three)) == []
    assert advantages(write(credit(2, keep_zero_variance=False), none)) == []


def test_small_rewards_that_differ_are_compared():
    # 1e-9 and 3e-9 are far apart in float32, whatever is added to the deviation.
    credit = MCAdvantage(2, normalize="population", eps=0.0)
    assert advantages(write(credit, [row(1e-9), row(3e-9)])) == pytest.approx([-1.0, 1.0])
    close = [row(1.0), row(1.0 + 1e-5)]
    assert advantages(write(MCAdvantage(2), close)) == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_joined_turns_keep_the_tasks_reward():
    credit = MCAdvantage(2, keep_zero_variance=False)
    buffer = ReplayBuffer(transform=credit)
    buffer.append_transform(JoinTurns())  # before the estimator
    buffer.append_transform(KLComputation(coeff=0.1))
    turns = [scored(0.5, STEP, traj=0, done=False), scored(0.5, 0.0, traj=0)]
    buffer.extend(lazy_rows([*turns, scored(1.0, 0.0, traj=1)]))
    assert len(buffer) == 0
    assert credit.get_stats()["filtered_groups"] == 1

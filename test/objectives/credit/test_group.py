"""Group advantages, worked by hand."""

from __future__ import annotations

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write

from torchrl_llm.data.nodes import cell
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives.credit import CreditAssigner, LeaveOneOutAdvantage, MCAdvantage


def test_four_rewards_by_hand():
    buffer = write(MCAdvantage(4), [row(r) for r in (1.0, 2.0, 3.0, 6.0)])
    # mean 3; differences -2 -1 0 3, squares 14 together, sample deviation sqrt(14 / 3)
    deviation = (14 / 3) ** 0.5
    expected = [-2 / deviation, -1 / deviation, 0.0, 3 / deviation]
    assert advantages(buffer) == pytest.approx(expected, abs=1e-6)
    assert buffer[0]["advantage"].shape == (1, 1)
    assert buffer[0]["advantage"].dtype == torch.float32


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [("sample", 0.5 / (1 / 3) ** 0.5), ("population", 1.0), ("none", 0.5)],
)
def test_the_three_deviations(normalize, expected):
    # rewards 0 0 1 1: mean 1/2, squares 1 together
    buffer = write(MCAdvantage(4, normalize=normalize), [row(r) for r in (0.0, 0.0, 1.0, 1.0)])
    assert advantages(buffer) == pytest.approx([-expected, -expected, expected, expected])


def test_equal_rewards_give_zeros():
    assert advantages(write(MCAdvantage(3), [row(0.7)] * 3)) == [0.0, 0.0, 0.0]


def test_groups_are_told_apart_and_wait_for_each_other():
    credit = MCAdvantage(2)
    buffer = write(credit, [row(0.0, group=1), row(5.0, group=2)], [row(1.0, group=1)])
    assert advantages(buffer) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    stats = credit.get_stats()
    assert (stats["queued_groups"], stats["queued_trajectories"], stats["queued_tokens"]) == (
        1,
        1,
        3,
    )


def test_a_group_of_one_has_nobody_to_be_better_than():
    with pytest.raises(ConfigError, match="grpo_size must be at least 2, got 1: a single"):
        MCAdvantage(1)


def test_an_invalid_member_fills_its_place_and_enters_no_statistic():
    credit = MCAdvantage(3)
    buffer = write(credit, [row(1.0), row(NAN, tokens=5), row(3.0)])
    # of 1 and 3 alone: mean 2, deviation sqrt 2
    assert advantages(buffer) == pytest.approx([-1 / 2**0.5, 1 / 2**0.5])
    stats = credit.get_stats()
    assert stats["invalid_trajectories"] == 1
    assert stats["invalid_tokens"] == 5
    assert stats["queued_groups"] == 0


@pytest.mark.parametrize("flag", [False, True])
def test_the_validity_flag_counts_as_much_as_the_number(flag):
    buffer = write(MCAdvantage(3), [row(1.0), row(3.0), row(50.0, valid=flag)])
    assert len(buffer) == 2 + flag


def test_a_group_with_fewer_than_two_valid_members_is_dropped_and_counted():
    credit = MCAdvantage(3)
    assert len(write(credit, [row(1.0), row(NAN), row(float("inf"))])) == 0
    stats = credit.get_stats()
    assert (stats["invalid_groups"], stats["written_groups"], stats["invalid_tokens"]) == (1, 0, 9)


def test_a_fork_counts_once_and_shares_the_advantage():
    rows = [
        row(0.5, traj=0, done=False),
        row(0.5, traj=0),  # return 1 in two rows
        row(0.0, traj=1),
    ]
    buffer = write(MCAdvantage(2), rows)
    half = 0.5**0.5
    assert advantages(buffer) == pytest.approx([half, half, -half])


def test_turns_are_counted_once_whether_joined_before_or_after():
    def rows():
        return [
            row(0.0, traj=0, done=False, tokens=1),
            row(1.0, traj=0),
            row(0.0, traj=1, done=False, tokens=1),
            row(0.0, traj=1),
        ]

    before = ReplayBuffer(transform=MCAdvantage(2))
    before.append_transform(JoinTurns())  # the last appended runs first
    after = ReplayBuffer(transform=JoinTurns())
    after.append_transform(MCAdvantage(2))
    for buffer in (before, after):
        buffer.extend(lazy_rows(rows()))
        assert {round(a, 4) for a in advantages(buffer)} == {0.7071, -0.7071}


@pytest.mark.parametrize(
    ("reduction", "returns"),
    [("sum", (3.0, 2.0)), ("max", (2.0, 2.0)), ("mean", (1.5, 1.0)), ("last", (2.0, 2.0))],
)
def test_the_return_of_a_trajectory(reduction, returns):
    rows = [
        row(1.0, traj=0, done=False),
        row(2.0, traj=0),
        row(0.0, traj=1, done=False),
        row(2.0, traj=1),
    ]
    credit = MCAdvantage(2, trajectory_return=reduction, normalize="none")
    mean = sum(returns) / 2
    expected = [returns[0] - mean] * 2 + [returns[1] - mean] * 2
    assert advantages(write(credit, rows)) == pytest.approx(expected)


def test_without_a_return_each_turn_is_normalised_by_itself():
    rows = [row(1.0, traj=0, done=False), row(2.0, traj=0), row(3.0, traj=1)]
    # all three rewards together: mean 2, sample deviation 1
    credit = MCAdvantage(2, trajectory_return=None)
    assert advantages(write(credit, rows)) == pytest.approx([-1.0, 0.0, 1.0])


def test_defect_07_per_token_rewards_align_with_the_response():
    """Two prompt tokens and three of the response; TorchRL's advantages fall on padding."""
    credit = MCAdvantage(2, trajectory_return=None, normalize="none")
    buffer = write(credit, [row([0.0, 0.0, 6.0]), row([0.0])])
    # four numbers, mean 1.5
    assert buffer[0]["advantage"].flatten().tolist() == [0, 0, -1.5, -1.5, 4.5]
    assert buffer[1]["advantage"].tolist() == [[-1.5]]


def test_per_token_rewards_add_up_to_a_return():
    credit = MCAdvantage(2, normalize="none")
    assert advantages(write(credit, [row([1.0, 2.0, 3.0]), row(0.0)])) == [3.0, -3.0]


def test_groups_outside_the_bounds_are_filtered_and_counted():
    credit = MCAdvantage(2, keep_return_bounds=(0.0, 1.0))
    rows = [row(1.0, group=0)] * 2 + [row(0.0, group=1)] * 2
    rows += [row(0.0, group=2), row(1.0, group=2)]
    buffer = write(credit, rows)
    assert len(buffer) == 2
    stats = credit.get_stats()
    assert (stats["filtered_groups"], stats["filtered_tokens"]) == (2, 12)
    assert (stats["completed_groups"], stats["written_groups"]) == (3, 1)


def test_bounds_and_invalid_members_split_the_tokens_of_a_group():
    credit = MCAdvantage(3, keep_return_bounds=(0.0, 1.0))
    write(credit, [row(1.0, tokens=2), row(1.0, tokens=3), row(NAN, tokens=5)])
    stats = credit.get_stats()
    assert (stats["filtered_tokens"], stats["invalid_tokens"]) == (5, 5)


def test_agents_of_one_group_are_groups_of_their_own():
    rows = [
        row(r, traj=t, agent=a)
        for t, (x, o) in enumerate([(0.0, 10.0), (1.0, 30.0)])
        for a, r in (("x", x), ("o", o))
    ]
    buffer = write(MCAdvantage(2, normalize="none"), rows)
    by_agent = {
        agent: [r["advantage"].item() for r in buffer[:].unbind(0) if r["agent"] == agent]
        for agent in "xo"
    }
    assert by_agent == {"x": [-0.5, 0.5], "o": [-10.0, 10.0]}


def test_an_explicit_key_is_honoured_and_must_be_there():
    rows = [row(0.0, group=1, query=None), row(1.0, group=2)]
    for one in rows:
        one["topic"] = cell({"name": ["a", "b"]})
    assert len(write(MCAdvantage(2, prompt_key="topic"), rows)) == 2
    with pytest.raises(DataError, match="topic"):
        write(MCAdvantage(2, prompt_key="topic"), [row(0.0)])


def test_without_group_id_the_query_groups_with_one_warning(warned):
    rows = [row(0.0, query="a"), row(1.0, query="b")], [row(1.0, query="a")]
    assert len(write(MCAdvantage(2), *rows)) == 2
    assert sum("group_id" in text for text in warned) == 1


def test_rows_that_nothing_groups_are_an_error():
    with pytest.raises(DataError, match="DataLoadingPrimer"):
        write(MCAdvantage(2), [row(0.0).exclude("group_id")])


def test_rows_without_reward_are_an_error():
    with pytest.raises(DataError, match="reward transform"):
        write(MCAdvantage(2), [row(0.0).exclude(("next", "reward"))])


@pytest.mark.parametrize(
    "options", [{"keep_return_bounds": (0.0, 1.0)}, {"keep_zero_variance": False}]
)
def test_what_judges_a_group_needs_its_returns(options):
    with pytest.raises(ConfigError, match="give trajectory_return"):
        MCAdvantage(2, trajectory_return=None, **options)


def test_an_unknown_argument_is_an_error():
    with pytest.raises(TypeError):
        MCAdvantage(2, grpo_sise=3)


def test_defect_28_groups_that_never_fill_are_given_up_and_counted():
    """TorchRL holds 200 groups of one for ever, and merges equal prompts of two epochs."""
    credit = MCAdvantage(2)
    buffer = write(credit, [row(1.0, group=g) for g in range(200)])
    assert credit.get_stats()["queued_groups"] == 200
    assert credit.clear_queues() == 200  # the epoch ends
    stats = credit.get_stats()
    assert stats["queued_groups"] == stats["queued_tokens"] == 0
    assert (stats["unfilled_groups"], stats["unfilled_tokens"]) == (200, 600)
    # the next epoch's prompt with the same number of its own does not meet the old one
    buffer.extend(lazy_rows([row(0.0, group=0)]))
    assert len(buffer) == 0


def test_defect_28_the_queues_are_bounded_without_any_help():
    credit = MCAdvantage(2, max_queued_groups=10)
    write(credit, [row(1.0, group=g) for g in range(25)])
    stats = credit.get_stats()
    assert (stats["queued_groups"], stats["unfilled_groups"]) == (10, 15)


def test_open_trajectories_are_given_up_with_the_queues():
    credit = MCAdvantage(2)
    write(credit, [row(1.0, traj=4, done=False)])
    assert credit.get_stats()["open_trajectories"] == 1
    credit.clear_queues()
    stats = credit.get_stats()
    assert (stats["open_trajectories"], stats["unfilled_trajectories"]) == (0, 1)


def test_the_ledger_of_tokens_closes():
    credit = MCAdvantage(2, keep_return_bounds=(0.0, 1.0))
    rows = [
        row(0.0, group=0, tokens=1), row(1.0, group=0, tokens=2),  # written
        row(1.0, group=1, tokens=4), row(1.0, group=1, tokens=8),  # filtered
        row(NAN, group=2, tokens=16), row(1.0, group=2, tokens=32),  # invalid
        row(1.0, group=3, tokens=64),  # waits
    ]  # fmt: skip
    buffer = write(credit, rows)
    written = sum(r["tokens", "response"].numel() for r in buffer[:].unbind(0))
    stats = credit.get_stats()
    assert (written, stats["filtered_tokens"], stats["invalid_tokens"]) == (3, 12, 48)
    assert stats["queued_tokens"] == 64


def test_counts_start_over_and_queues_stay():
    credit = MCAdvantage(2)
    buffer = write(credit, [row(0.0)])
    credit.reset_stats()
    assert credit.get_stats()["completed_trajectories"] == 0
    buffer.extend(lazy_rows([row(1.0)]))
    assert len(buffer) == 2


def test_state_resumes_in_the_middle_of_a_group():
    credit, other = MCAdvantage(2), MCAdvantage(2)
    write(credit, [row(0.0), row(9.0, group=8, traj=5, done=False)])
    other.load_state_dict(credit.state_dict())
    buffer = write(other, [row(1.0), row(0.0, group=8, traj=5), row(0.0, group=8, traj=6)])
    half = 0.5**0.5
    assert advantages(buffer) == pytest.approx([-half, half, half, half, -half])
    assert other.get_stats()["completed_groups"] == 2


def test_a_rule_of_ones_own_needs_one_method():
    class FirstWins(CreditAssigner):
        def assign(self, group):
            return [
                [torch.full((1, 1), float(i == 0)) for _ in t.rows] for i, t in enumerate(group)
            ]

    assert advantages(write(FirstWins(3), [row(0.0)] * 3)) == [1.0, 0.0, 0.0]
    assert advantages(write(FirstWins(1), [row(0.0, group=g) for g in range(2)])) == [1.0, 1.0]


def test_positive_only_and_epsilon_reach_the_formula():
    rows = [row(r, dtype=torch.float64) for r in (0.0, 0.0, 0.0, 4.0)]
    # see test_advantages: differences -1 -1 -1 3
    credit = MCAdvantage(4, normalize="population", positive_only="before_std")
    assert advantages(write(credit, rows)) == pytest.approx([0, 0, 0, 3 / (27 / 16) ** 0.5])
    credit = MCAdvantage(4, normalize="population", eps=1.0, eps_as="added", positive_only=True)
    assert advantages(write(credit, rows)) == pytest.approx([0, 0, 0, 3 / (3**0.5 + 1)])


def test_trajectories_without_advantage_may_be_left_out():
    rows = [row(r, tokens=t) for r, t in ((0.0, 1), (1.0, 2), (2.0, 4))]
    credit = MCAdvantage(3, keep_zero_advantage=False, positive_only=True, normalize="none")
    buffer = write(credit, rows)
    assert advantages(buffer) == [1.0]  # differences -1 0 1
    assert credit.get_stats()["filtered_tokens"] == 3


def test_leave_one_out_by_hand():
    # 1 - (2 + 3 + 6) / 3 = -8/3, 2 - 10/3, 3 - 9/3, 6 - 6/3
    rows = [row(r, dtype=torch.float64) for r in (1.0, 2.0, 3.0, 6.0)]
    expected = [-8 / 3, -4 / 3, 0.0, 4.0]
    assert advantages(write(LeaveOneOutAdvantage(4), rows)) == pytest.approx(expected, abs=1e-8)


def test_leave_one_out_of_the_valid_members_only():
    buffer = write(LeaveOneOutAdvantage(3), [row(1.0), row(NAN), row(4.0)])
    assert advantages(buffer) == [-3.0, 3.0]


def test_a_baseline_without_its_own_return_has_no_bias():
    """The mean over all actions of A * dlogp, exactly: two actions, two samples, G = 2.

    E[A_i dlogp_i] with A_i = r_i - r_j is E[r dlogp] - E[r] E[dlogp] = the policy gradient, because
    E[dlogp] = 0. The group-centred A_i = (r_i - r_j) / 2 gives half of it, GRPO's bias for G = 2.
    """
    p = torch.tensor(0.3, dtype=torch.float64)
    probs, score, reward = (p, 1 - p), (1 / p, -1 / (1 - p)), (1.0, 0.0)
    true = sum(probs[a] * score[a] * reward[a] for a in (0, 1))
    for credit, factor in ((LeaveOneOutAdvantage(2), 1.0), (MCAdvantage(2, normalize="none"), 0.5)):
        total = 0.0
        for a in (0, 1):
            for b in (0, 1):
                rows = [row(reward[a], dtype=torch.float64), row(reward[b], dtype=torch.float64)]
                first, _ = advantages(write(credit, rows))
                total = total + probs[a] * probs[b] * score[a] * first
        assert total.item() == pytest.approx(factor * true.item(), abs=1e-8)


def test_agreement_with_a_loop_in_any_order():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(16, 4, generator=generator)
    rows = [row(rewards[g, i].item(), group=g, traj=4 * g + i) for g in range(16) for i in range(4)]
    order = torch.randperm(64, generator=generator).tolist()
    buffer = write(MCAdvantage(4), [rows[i] for i in order])
    for r in buffer[:].unbind(0):
        group, member = divmod(r["traj_id"].item(), 4)
        others = rewards[group]
        expected = (others[member] - others.mean()) / others.std()
        assert r["advantage"].item() == pytest.approx(expected.item(), abs=1e-5)

"""Which trajectories take part: selectors, bounds, and choices among candidates."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write
from tensordict import TensorDict

from torchrl_llm.data import TopKRewardSelector
from torchrl_llm.data.replay_buffers import ReplayBuffer, drop_incomplete, drop_truncated
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives.credit import (
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
    MCAdvantageSelector,
)


def _candidates(*returns):
    return TensorDict({"return": torch.tensor(returns)}, [len(returns)])


def _select(returns, size, bounds=None, **options):
    selector = MCAdvantageSelector(**options)
    return selector.select(_candidates(*returns), group_size=size, keep_return_bounds=bounds)


# -- selectors ----------------------------------------------------------------------------------


def test_cut_episodes_enter_no_baseline_where_they_are_dropped():
    rows = [row(1.0, truncated=False), row(9.0, truncated=True, tokens=5), row(3.0)]
    credit = MCAdvantage(3, normalize="none", selectors=[drop_truncated])
    assert advantages(write(credit, rows)) == [-1.0, 1.0]
    stats = credit.get_stats()
    assert (stats["filtered_tokens"], stats["written_groups"]) == (5, 1)


def test_incomplete_responses_are_told_by_their_finish_reason():
    rows = [row(1.0, finish="STOP"), row(9.0, finish="LENGTH"), row(3.0, finish="TOOL_CALLS")]
    credit = LeaveOneOutAdvantage(3, selectors=[drop_incomplete])
    assert advantages(write(credit, rows)) == [-2.0, 2.0]


def test_selectors_follow_one_another_and_may_be_any_function():
    credit = MCAdvantage(
        4,
        normalize="none",
        selectors=[drop_truncated, lambda group: [t.total < 5 for t in group]],
    )
    rows = [row(1.0), row(3.0), row(7.0), row(2.0, truncated=True)]
    assert advantages(write(credit, rows)) == [-1.0, 1.0]


def test_fewer_than_two_left_filter_the_group():
    credit = MCAdvantage(2, selectors=[drop_truncated])
    assert len(write(credit, [row(1.0), row(0.0, truncated=True)])) == 0
    stats = credit.get_stats()
    assert (stats["filtered_groups"], stats["filtered_tokens"], stats["invalid_tokens"]) == (
        1,
        6,
        0,
    )


def test_the_best_are_chosen_of_those_that_take_part():
    selector = TopKRewardSelector(3, 1, verbose=False, selectors=[drop_truncated])
    buffer = ReplayBuffer(transform=selector)
    buffer.extend([row(9.0, truncated=True), row(1.0), row(0.0)])
    assert [r["next", "reward"].item() for r in buffer[:].unbind(0)] == [1.0]


@pytest.mark.parametrize(
    "rule", [MCAdvantage, LeaveOneOutAdvantage, HybridNormalizedReturn], ids=lambda r: r.__name__
)
def test_every_comparing_rule_filters_groups_by_their_returns(rule):
    rows = [
        row(r, group=g) for g, pair in enumerate([(0, 0), (1, 1), (0, 1)]) for r in map(float, pair)
    ]
    credit = rule(2, keep_zero_variance=False)
    assert len(write(credit, rows)) == 2
    credit = rule(2, keep_return_bounds=(0.0, 1.0))
    assert len(write(credit, rows)) == 2
    stats = credit.get_stats()
    assert (stats["filtered_groups"], stats["filtered_tokens"], stats["written_groups"]) == (
        2,
        12,
        1,
    )


def test_the_variance_is_that_of_the_return_which_is_compared():
    rows = [row(1.0, traj=0, done=False), row(0.0, traj=0), row(1.0, traj=1)]
    assert len(write(MCAdvantage(2, keep_zero_variance=False, trajectory_return="max"), rows)) == 0
    assert len(write(MCAdvantage(2, keep_zero_variance=False, trajectory_return="mean"), rows)) == 3


def test_equal_returns_from_other_orders_are_equal():
    """0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 when it is added from the left."""
    orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)]
    assert sum(orders[0]) != sum(orders[1])
    rows = [
        row(r, traj=t, done=k == 2, dtype=torch.float64)
        for t, rewards in enumerate(orders)
        for k, r in enumerate(rewards)
    ]
    assert advantages(write(MCAdvantage(2), rows)) == [0.0] * 6
    assert len(write(MCAdvantage(2, keep_zero_variance=False), rows)) == 0


# -- the choice ---------------------------------------------------------------------------------


def test_the_first_are_taken_by_name():
    assert _select([5.0, 1.0, 0.0], 2, strategy="first") == [0, 1]
    assert _select([1.0, 1.0, 0.0], 2, (0.0, 1.0), strategy="first") is None


def test_uniform_spreads_over_the_order_of_returns():
    # sorted 0 1 2 3 4 at places 0, 2, 4: returns 0, 2, 4 of candidates 2, 4, 0
    assert _select([4.0, 3.0, 0.0, 1.0, 2.0], 3, strategy="uniform") == [0, 2, 4]
    assert _select([4.0, 3.0, 0.0, 1.0, 2.0], 3) == [0, 2, 4]  # balanced without bounds


def test_balanced_is_nearest_to_the_middle_and_then_widest():
    # middle 0.5: {0, 1} and {.4, .6} both have it, the first is wider
    assert _select([0.4, 0.0, 0.6, 1.0], 2, (0.0, 1.0)) == [1, 3]
    assert _select([0.0, 0.0, 0.0, 1.0], 2, (0.0, 1.0)) == [0, 3]
    assert _select([0.0, 0.0, 0.0, 0.0], 2, (0.0, 1.0)) is None


def test_without_looking_at_all_choices_the_mean_is_nearly_as_good():
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        returns = torch.rand(12, generator=generator, dtype=torch.float64).tolist()
        best = min(abs(sum(c) / 4 - 0.3) for c in combinations(returns, 4))
        exact = _select(returns, 4, (0.1, 0.5))
        greedy = _select(returns, 4, (0.1, 0.5), max_combinations=1)
        mean = [sum(returns[i] for i in chosen) / 4 for chosen in (exact, greedy)]
        assert abs(mean[0] - 0.3) == pytest.approx(best, abs=1e-12)
        assert abs(mean[1] - 0.3) < 0.02
        assert len(set(greedy)) == 4


def test_binary_rewards_are_balanced_in_large_groups():
    returns = [1.0] * 3 + [0.0] * 61  # 64 over 16 is beyond all choices
    chosen = _select(returns, 16, (0.0, 1.0))
    assert len(set(chosen)) == 16
    assert sum(returns[i] for i in chosen) == 3


def test_no_more_can_be_chosen_than_there_are():
    with pytest.raises(ConfigError, match="cannot choose 3 of 2"):
        _select([0.0, 1.0], 3)


# -- candidates ---------------------------------------------------------------------------------


def _oversampled(**options):
    settings = {"candidate_group_size": 4, "keep_return_bounds": (0.0, 1.0), "normalize": "none"}
    return MCAdvantage(2, **(settings | options))


def test_a_group_is_written_as_soon_as_two_candidates_are_worth_it():
    credit = _oversampled()
    buffer = write(credit, [row(0.0)], [row(1.0)])
    assert advantages(buffer) == [-0.5, 0.5]
    # The other two are still to come; they are no group of their own.
    buffer.extend([row(0.0, tokens=5), row(1.0, tokens=7)])
    assert len(buffer) == 2
    stats = credit.get_stats()
    assert (stats["filtered_tokens"], stats["queued_groups"], stats["written_groups"]) == (12, 0, 1)
    # After them the group is forgotten, and its identifier is a new one.
    buffer.extend([row(1.0), row(0.0)])
    assert len(buffer) == 4


def test_candidates_wait_until_one_makes_the_difference():
    credit = _oversampled()
    buffer = write(credit, [row(0.0, tokens=1), row(0.0, tokens=2)])
    assert len(buffer) == 0
    assert credit.get_stats()["queued_trajectories"] == 2
    buffer.extend([row(1.0, tokens=4)])
    assert advantages(buffer) == [-0.5, 0.5]
    assert credit.get_stats()["filtered_tokens"] == 2


def test_a_group_without_a_choice_is_filtered_when_all_have_come():
    credit = _oversampled()
    assert len(write(credit, [row(0.0)] * 4)) == 0
    stats = credit.get_stats()
    assert (stats["filtered_groups"], stats["filtered_tokens"]) == (1, 12)


def test_the_choice_may_wait_for_more_candidates():
    credit = _oversampled(
        candidate_selection_min_size=4, keep_return_bounds=None, candidate_selector=None
    )
    buffer = write(credit, [row(r) for r in (1.0, 2.0, 3.0)])
    assert len(buffer) == 0
    buffer.extend([row(5.0)])
    assert advantages(buffer) == [-2.0, 2.0]  # uniform: 1 and 5


def test_invalid_candidates_are_never_chosen():
    credit = _oversampled()
    buffer = write(credit, [row(NAN), row(0.0), row(1.0, tokens=2), row(NAN, tokens=5)])
    assert advantages(buffer) == [-0.5, 0.5]
    stats = credit.get_stats()
    assert (stats["invalid_tokens"], stats["filtered_tokens"]) == (8, 0)


def test_too_few_valid_candidates_are_a_smaller_group():
    credit = MCAdvantage(3, candidate_group_size=4, keep_zero_variance=False, normalize="none")
    assert advantages(write(credit, [row(0.0), row(NAN), row(NAN), row(1.0)])) == [-0.5, 0.5]


def test_a_selector_of_ones_own_reads_other_keys():
    class Shortest(MCAdvantageSelector):
        def select(self, candidates, *, group_size, keep_return_bounds=None):
            return candidates["length"].argsort()[:group_size].tolist()

    rows = [row(r) for r in (0.0, 1.0, 0.0)]
    for made, length in zip(rows, (9, 3, 4), strict=True):
        made["length"] = torch.tensor(length)
    options = {"candidate_group_size": 3, "candidate_selection_min_size": 3}
    credit = _oversampled(candidate_selector=Shortest(in_keys=["length"]), **options)
    buffer = write(credit, rows)
    assert [r["length"].item() for r in buffer[:].unbind(0)] == [3, 4]
    with pytest.raises(DataError, match="length"):
        write(credit, [row(0.0)] * 3)


def test_a_selector_reads_whole_trajectories():
    seen = []

    class FirstTurn(MCAdvantageSelector):
        def select(self, candidates, *, group_size, keep_return_bounds=None):
            for rows in candidates["trajectories"].unbind(0):
                seen.append([row["next", "reward"].item() for row in rows.unbind(0)])
            best = sorted(range(len(seen)), key=lambda at: -seen[at][0])
            return sorted(best[:group_size])

    turns = [(1.0, 0.0), (5.0,), (0.0, 2.0, 3.0)]
    rows = [
        row(reward, traj=number, done=at == len(rewards) - 1)
        for number, rewards in enumerate(turns)
        for at, reward in enumerate(rewards)
    ]
    options = {"candidate_group_size": 3, "candidate_selection_min_size": 3}
    options["keep_return_bounds"] = None
    selector = FirstTurn(in_keys=[("trajectories", "next", "reward")])
    buffer = write(_oversampled(candidate_selector=selector, **options), rows)
    assert seen == [list(rewards) for rewards in turns]
    assert [r["next", "reward"].item() for r in buffer[:].unbind(0)] == [1.0, 0.0, 5.0]


def test_the_strategies_choose_by_the_first_key():
    candidates = TensorDict(
        {"return": torch.tensor([0.0, 1.0, 2.0]), "length": torch.tensor([[5.0], [1.0], [3.0]])},
        batch_size=[3],
    )
    selector = MCAdvantageSelector("uniform", in_keys=["length"])
    assert sorted(selector.select(candidates, group_size=2)) == [0, 1]
    with pytest.raises(ConfigError, match="one number per candidate at 'width'"):
        MCAdvantageSelector(in_keys=["width"]).select(candidates, group_size=2)
    with pytest.raises(ConfigError, match="in_keys must name"):
        MCAdvantageSelector(in_keys=[])


def test_candidates_resume_where_they_were():
    credit, other = _oversampled(), _oversampled()
    write(credit, [row(0.0), row(1.0), row(0.0, group=1)])
    other.load_state_dict(credit.state_dict())
    buffer = write(other, [row(1.0), row(1.0), row(1.0, group=1)])
    assert advantages(buffer) == [-0.5, 0.5]  # group 1; those of group 0 came late
    assert other.get_stats()["filtered_tokens"] == 6


def test_candidates_that_never_come_are_not_expected_for_ever():
    credit = _oversampled(max_queued_groups=2)
    write(credit, [row(r, group=g) for g in range(5) for r in (0.0, 1.0)])
    assert len(credit.state_dict()["_extra_state"]["late"]) == 2


def test_an_epoch_that_ends_expects_nobody_any_more():
    credit = _oversampled()
    buffer = write(credit, [row(0.0), row(1.0)])
    credit.clear_queues()
    buffer.extend([row(0.0), row(1.0)])
    assert len(buffer) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"candidate_group_size": 2, "keep_zero_variance": False},
        {"candidate_group_size": 4},
        {"candidate_group_size": 4, "candidate_selection_min_size": 5},
        {"candidate_group_size": 4, "candidate_selection_min_size": 1},
        {"candidate_selection_min_size": 3},
        {"candidate_selector": MCAdvantageSelector()},
        {"candidate_group_size": 4, "candidate_selection_min_size": 3, "trajectory_return": None},
    ],
)
def test_candidates_that_would_have_no_effect_are_refused(options):
    with pytest.raises(ConfigError):
        MCAdvantage(2, **options)

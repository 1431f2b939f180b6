"""Rules whose statistics are over a batch: ScaleRL's and REINFORCE++."""

from __future__ import annotations

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write
from tensordict import TensorDict

from torchrl_llm.data.enums import Source
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.credit import BatchNormalizedReturn, HybridNormalizedReturn

F64 = torch.float64
# Group 0 has differences -1 1, group 1 has -2 2: squares 10 over four trajectories.
FOUR = [(0, 0.0), (0, 2.0), (1, 1.0), (1, 5.0)]


def _four(**options):
    return [row(reward, group=group, **options) for group, reward in FOUR]


def test_hybrid_by_hand():
    deviation = (10 / 4) ** 0.5
    expected = [x / deviation for x in (-1.0, 1.0, -2.0, 2.0)]
    got = advantages(write(HybridNormalizedReturn(2), _four(dtype=F64)))
    assert got == pytest.approx(expected, abs=1e-8)
    got = advantages(write(HybridNormalizedReturn(2), _four()))
    assert got == pytest.approx(expected, abs=1e-5)


def test_hybrid_by_the_deviation_of_the_returns():
    # 0 2 1 5: mean 2, squares 4 + 0 + 1 + 9 = 14, sample deviation sqrt(14 / 3)
    credit = HybridNormalizedReturn(2, normalize="sample", deviation_of="returns")
    expected = [x / (14 / 3) ** 0.5 for x in (-1.0, 1.0, -2.0, 2.0)]
    assert advantages(write(credit, _four(dtype=F64))) == pytest.approx(expected, abs=1e-8)


def test_epsilon_may_be_added_to_the_deviation():
    # Differences -1 1 -2 2 over sqrt(10 / 4) + 1/2.
    credit = HybridNormalizedReturn(2, eps=0.5, eps_as="added")
    expected = [x / (2.5**0.5 + 0.5) for x in (-1.0, 1.0, -2.0, 2.0)]
    assert advantages(write(credit, _four(dtype=F64))) == pytest.approx(expected, abs=1e-12)
    # 0 three times and 4 once: mean 1, deviation sqrt 3.
    rows = [row(0.0, tokens=3, dtype=F64), row(4.0, tokens=1, dtype=F64)]
    credit = BatchNormalizedReturn(eps=0.5, eps_as="added")
    expected = [x / (3**0.5 + 0.5) for x in (-1.0, 3.0)]
    assert advantages(write(credit, rows)) == pytest.approx(expected, abs=1e-12)


def test_filtered_groups_are_no_part_of_the_batch():
    credit = HybridNormalizedReturn(2, keep_zero_variance=False)
    rows = [*_four(dtype=F64), row(7.0, group=2), row(7.0, group=2)]
    got = advantages(write(credit, rows))
    assert got == advantages(write(HybridNormalizedReturn(2), _four(dtype=F64)))
    assert credit.get_stats()["filtered_groups"] == 1
    # Kept, their zeros shrink the deviation: squares 10 over six.
    kept = advantages(write(HybridNormalizedReturn(2), rows))
    assert kept[:2] == pytest.approx([-1 / (10 / 6) ** 0.5, 1 / (10 / 6) ** 0.5])


def test_invalid_members_are_no_part_of_the_batch():
    rows = [row(r, group=0) for r in (0.0, 2.0, NAN)] + [row(r, group=1) for r in (1.0, 5.0, NAN)]
    got = advantages(write(HybridNormalizedReturn(3), rows))
    assert got == pytest.approx([x / (10 / 4) ** 0.5 for x in (-1.0, 1.0, -2.0, 2.0)])


def test_the_batch_is_what_a_write_completes():
    one = advantages(write(HybridNormalizedReturn(2), _four()))
    two = advantages(write(HybridNormalizedReturn(2), _four()[:2], _four()[2:]))
    assert two == [-1.0, 1.0, -1.0, 1.0] != one


def test_with_a_batch_size_it_does_not_matter_how_rows_come():
    for cut in range(5):
        credit = HybridNormalizedReturn(2, batch_size=4)
        got = advantages(
            write(credit, _four()[:cut], _four()[cut:]) if cut % 4 else write(credit, _four())
        )
        assert got == advantages(write(HybridNormalizedReturn(2), _four()))


def test_groups_that_wait_for_their_batch_are_queued():
    credit = HybridNormalizedReturn(2, batch_size=4)
    buffer = write(credit, _four()[:3])
    stats = credit.get_stats()
    assert (stats["queued_groups"], stats["queued_trajectories"], stats["queued_tokens"]) == (
        2,
        3,
        9,
    )
    assert stats["written_groups"] == len(buffer) == 0
    assert credit.clear_queues() == 2
    stats = credit.get_stats()
    assert (stats["queued_tokens"], stats["unfilled_tokens"], stats["unfilled_groups"]) == (0, 9, 2)


def test_more_than_a_batch_is_several_batches():
    credit = HybridNormalizedReturn(2, batch_size=2)
    assert advantages(write(credit, _four())) == [-1.0, 1.0, -1.0, 1.0]


def test_a_batch_size_is_a_multiple_of_the_group_size():
    with pytest.raises(ConfigError, match="multiple"):
        HybridNormalizedReturn(4, batch_size=6)


def test_reinforce_plus_plus_weighs_by_tokens():
    # 0 three times and 4 once: mean 1, squares 3 + 9, deviation sqrt(12 / 4)
    rows = [row(0.0, tokens=3, dtype=F64), row(4.0, tokens=1, dtype=F64)]
    got = advantages(write(BatchNormalizedReturn(), rows))
    assert got == pytest.approx([-1 / 3**0.5, 3 / 3**0.5], abs=1e-8)
    got = advantages(write(BatchNormalizedReturn(over="samples"), rows))
    assert got == pytest.approx([-1.0, 1.0], abs=1e-8)


def test_a_reward_per_token_is_what_comes_after_the_token():
    """The paper's A_t = r - beta * sum of KL from t on: penalties of 1 and 2, a reward of 6."""
    rows = [row([-1.0, 4.0], tokens=2, dtype=F64), row(0.0, tokens=2, dtype=F64)]
    # To go 3, 4 and 0, 0: mean 7/4, squares 9 + 16 - 49/4 = 51/4, deviation sqrt(51/16)
    first, second = advantages(write(BatchNormalizedReturn(), rows))
    deviation = (51 / 16) ** 0.5
    assert first == pytest.approx([0, 0, (3 - 7 / 4) / deviation, (4 - 7 / 4) / deviation])
    assert second == pytest.approx(-7 / 4 / deviation)


def test_the_tokens_of_a_row_share_its_weight_where_rows_are_counted():
    # To go 3, 2, 1 at a third each, and 0 once: mean 2/2, squares 5/3 + 1, deviation sqrt(4/3).
    rows = [row([1.0, 1.0, 1.0], dtype=F64), row(0.0, dtype=F64)]
    first, second = advantages(write(BatchNormalizedReturn(over="samples"), rows))
    deviation = (4 / 3) ** 0.5
    assert first == pytest.approx([0, 0, 2 / deviation, 1 / deviation, 0], abs=1e-12)
    assert second == pytest.approx(-1 / deviation, abs=1e-12)


def test_only_sampled_tokens_are_counted():
    made = row([5.0, 100.0, 1.0], tokens=3, dtype=F64)
    source = [Source.PROMPT, Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED]
    codes = torch.tensor([int(s) for s in source], dtype=torch.int8)
    made["trace"] = TensorDict({"source": codes})
    other = row(3.0, tokens=2, dtype=F64)
    (_, _, a, _, c), b = advantages(write(BatchNormalizedReturn(normalize="none"), [made, other]))
    # To go 106 and 1 at the sampled tokens, 3 twice: mean 113 / 4. What the tool's token gets is of
    # no importance, the loss masks it.
    assert (a, c, b) == pytest.approx((106 - 113 / 4, 1 - 113 / 4, 3 - 113 / 4))


def test_the_group_baseline_by_hand():
    # Differences -1 1 -2 2 with 1 3 1 1 tokens: sum -1 + 3 - 2 + 2 = 2 over 6 tokens, mean 1/3;
    # squares 1 + 3 + 4 + 4 = 12, less 6 / 9: 34/3 over 6.
    rows = [
        row(reward, group=group, tokens=tokens, dtype=F64)
        for (group, reward), tokens in zip(FOUR, (1, 3, 1, 1), strict=True)
    ]
    deviation = (34 / 18) ** 0.5
    expected = [(x - 1 / 3) / deviation for x in (-1.0, 1.0, -2.0, 2.0)]
    credit = BatchNormalizedReturn(2, baseline="group")
    assert advantages(write(credit, rows)) == pytest.approx(expected, abs=1e-8)


def test_the_baseline_of_the_others_is_larger():
    # -2 2 -4 4, each once: squares 40 over 4
    credit = BatchNormalizedReturn(2, baseline="leave_one_out", over="samples")
    expected = [x / 10**0.5 for x in (-2.0, 2.0, -4.0, 4.0)]
    assert advantages(write(credit, _four(dtype=F64))) == pytest.approx(expected, abs=1e-8)


def test_turns_are_discounted_before_they_are_normalised():
    rows = [
        row(0.0, traj=0, done=False, dtype=F64),
        row(2.0, traj=0, dtype=F64),
        row(0.0, traj=1, dtype=F64),
    ]
    # 1, 2, 0 with gamma 1/2: mean 1
    credit = BatchNormalizedReturn(gamma=0.5, normalize="none", over="samples")
    assert advantages(write(credit, rows)) == [0.0, 1.0, -1.0]


def test_equal_returns_of_a_batch_give_exact_zeros():
    for credit in (BatchNormalizedReturn(), BatchNormalizedReturn(over="samples")):
        assert advantages(write(credit, [row(0.7, tokens=t) for t in (1, 5, 3)])) == [0.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "group"}, "at least 2"),
        ({"group_size": 2, "baseline": "group", "gamma": 0.9}, "gamma"),
        ({"trajectory_return": "max"}, "no effect"),
        ({"keep_zero_variance": False}, "at least 2"),
        ({"candidate_group_size": 4, "candidate_selection_min_size": 2}, "at least 2"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BatchNormalizedReturn(**options)


def test_a_write_that_completes_nothing_writes_nothing():
    credit = HybridNormalizedReturn(2)
    assert credit.inv(lazy_rows([row(0.0)])) is None

"""Advantages worked by hand from the papers' formulas, and a naive loop beside them."""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch

from torchrl_llm.functional import (
    batch_normalize,
    discounted_returns,
    group_advantages,
    hybrid_advantages,
    leave_one_out,
)

REWARDS = torch.tensor([0.0, 1.0, 1.0, 0.0])
NAN = math.nan
DTYPES = [(torch.float64, 1e-8), (torch.float32, 1e-5)]
# Two groups out of order: 7 has 1 2 3 6, 9 has 0 4; and one member of 9 without a valid reward.
IDS = torch.tensor([7, 9, 7, 9, 7, 9, 7])
MIXED = [1.0, 0.0, 2.0, 4.0, 3.0, NAN, 6.0]
VALID = torch.tensor([True, True, True, True, True, False, True])
FUNCTIONS = {
    "sample": lambda r, g, v: group_advantages(r, g, valid=v),
    "population": lambda r, g, v: group_advantages(r, g, valid=v, normalize="population"),
    "none": lambda r, g, v: group_advantages(r, g, valid=v, normalize="none"),
    "leave_one_out": lambda r, g, v: leave_one_out(r, g, valid=v),
    "hybrid": lambda r, g, v: hybrid_advantages(r, g, valid=v),
    "hybrid_of_returns": lambda r, g, v: hybrid_advantages(
        r, g, valid=v, normalize="sample", deviation_of="returns"
    ),
}


# Group 7: mean 3, differences -2 -1 0 3, squares 14. Group 9, of the valid 0 and 4: mean 2,
# differences -2 2, squares 8. The batch has squares 22 over its 6 valid members.
SEVEN, NINE = [-2.0, -1.0, 0.0, 3.0], [-2.0, 2.0]
# The six returns 1 2 3 6 0 4 have mean 8/3 and squares 66 - 6 * 64 / 9 = 70 / 3.
BY_HAND = {
    "sample": ([x / math.sqrt(14 / 3) for x in SEVEN], [x / math.sqrt(8) for x in NINE]),
    "population": ([x / math.sqrt(14 / 4) for x in SEVEN], [x / 2 for x in NINE]),
    "none": (SEVEN, NINE),
    # G / (G - 1) times the difference: 1 - (2+3+6)/3 = -8/3, ...; 0 - 4 and 4 - 0
    "leave_one_out": ([-8 / 3, -4 / 3, 0.0, 4.0], [-4.0, 4.0]),
    "hybrid": tuple([x / math.sqrt(22 / 6) for x in xs] for xs in (SEVEN, NINE)),
    "hybrid_of_returns": tuple([x / math.sqrt(70 / 3 / 5) for x in xs] for xs in (SEVEN, NINE)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ragged_groups_in_any_order_by_hand(name):
    for dtype, tolerance in DTYPES:
        got = FUNCTIONS[name](torch.tensor(MIXED, dtype=dtype), IDS, VALID)
        (a, b, c, d), (e, f) = BY_HAND[name]
        expected = torch.tensor([a, e, b, f, c, 0.0, d], dtype=dtype)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_as_a_dimension_are_groups_by_id(name):
    rewards = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(5, 4, dtype=torch.bool)
    valid[1, 2] = valid[3, :3] = False
    ids = torch.arange(5).repeat_interleave(4)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    flat = FUNCTIONS[name](rewards.view(-1)[order], ids[order], valid.view(-1)[order])
    torch.testing.assert_close(FUNCTIONS[name](rewards, None, valid).view(-1)[order], flat)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_rewards_give_exact_zeros(name):
    """0.7 in three places has a mean of another rounding, and over a floor of 1e-6 that shows."""
    for dtype in [torch.float32, torch.float64]:
        for reward in [0.7, 0.1 + 0.2, 1e7, -3.3]:
            rewards = torch.full((3,), reward, dtype=dtype)
            assert FUNCTIONS[name](rewards, None, None).tolist() == [0.0, 0.0, 0.0]
            assert batch_normalize(rewards).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_junk_of_invalid_members_has_no_influence(name):
    rewards = torch.tensor(MIXED, dtype=torch.float64)
    expected = FUNCTIONS[name](rewards, IDS, VALID)
    for junk in (1e30, -math.inf, math.inf):
        rewards[5] = junk
        assert torch.equal(FUNCTIONS[name](rewards, IDS, VALID), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_group_of_one_has_no_advantage(name):
    rewards = torch.tensor([5.0, 0.0, 1.0])
    valid = torch.tensor([True, True, True])
    got = FUNCTIONS[name](rewards, torch.tensor([0, 1, 1]), valid)
    alone = FUNCTIONS[name](rewards[1:], torch.tensor([1, 1]), valid[1:])
    assert got[0] == 0
    torch.testing.assert_close(got[1:], alone)  # nor has the lone 5 any part in the batch


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_member_is_no_error(name):
    assert FUNCTIONS[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64), None).shape == (0,)


def test_integers_become_float32():
    got = group_advantages(torch.tensor([0, 1]), normalize="none")
    assert got.dtype == torch.float32
    assert got.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("normalize", "deviation"),
    # Squares sum to 4 x 0.25 = 1: sample variance 1/3, population variance 1/4.
    [("sample", math.sqrt(1 / 3)), ("population", 0.5), ("none", 1.0)],
)
def test_normalisations_by_hand(normalize, deviation):
    got = group_advantages(REWARDS, normalize=normalize)
    torch.testing.assert_close(got, (REWARDS - 0.5) / deviation)


def test_the_deviation_has_a_floor():
    rewards = torch.tensor([0.0, 2e-9], dtype=torch.float32)
    torch.testing.assert_close(group_advantages(rewards), torch.tensor([-1e-3, 1e-3]))


@pytest.mark.parametrize(
    ("normalize", "eps", "deviation"),
    # What TRL divides by (sample) and Ludic (population), for rewards 0 and 2: sqrt 2 and 1.
    [("sample", 1e-4, math.sqrt(2) + 1e-4), ("population", 1e-8, 1 + 1e-8)],
)
def test_epsilon_may_be_added(normalize, eps, deviation):
    rewards = torch.tensor([0.0, 2.0], dtype=torch.float64)
    got = group_advantages(rewards, normalize=normalize, eps=eps, eps_as="added")
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64) / deviation
    torch.testing.assert_close(got, expected, atol=1e-8, rtol=0)


def test_epsilon_may_be_added_to_the_deviation_of_a_batch():
    # Differences -1 1 -3 3 in units of 1e-8: squares 20 over four, deviation sqrt 5, plus 1.
    rewards = torch.tensor([0.0, 2e-8, 0.0, 6e-8], dtype=torch.float64)
    groups, expected = torch.tensor([0, 0, 1, 1]), torch.tensor([-1.0, 1.0, -3.0, 3.0])
    got = hybrid_advantages(rewards, groups, eps=1e-8, eps_as="added")
    torch.testing.assert_close(got, expected.double() / (math.sqrt(5) + 1), atol=1e-12, rtol=0)
    # Below the floor of 1e-6 it is the floor that divides.
    torch.testing.assert_close(
        hybrid_advantages(rewards, groups), expected.double() / 100, atol=1e-12, rtol=0
    )
    # 0 three times and 4 once: mean 1, deviation sqrt 3, plus 1.
    values, tokens = torch.tensor([0.0, 4.0], dtype=torch.float64), torch.tensor([3, 1])
    got = batch_normalize(values, tokens, eps=1.0, eps_as="added")
    assert got.tolist() == pytest.approx([-1 / (math.sqrt(3) + 1), 3 / (math.sqrt(3) + 1)])
    assert batch_normalize(torch.ones(3), eps_as="added").tolist() == [0.0, 0.0, 0.0]


def test_positive_only_before_or_after_the_deviation():
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    # Differences -1 -1 -1 3, squares 12, population deviation sqrt 3.
    after = group_advantages(rewards, normalize="population", positive_only=True)
    assert after.tolist() == pytest.approx([0, 0, 0, 3 / math.sqrt(3)], abs=1e-12)
    # Clamped 0 0 0 3: mean 3/4, squares 9 - 9/4 = 27/4, deviation sqrt(27/16).
    before = group_advantages(rewards, normalize="population", positive_only="before_std")
    assert before.tolist() == pytest.approx([0, 0, 0, 3 / math.sqrt(27 / 16)], abs=1e-12)


def test_the_papers_batch_statistic_of_tokens_by_hand():
    # Values 0 (three tokens) and 4 (one): mean 1, squares 3 + 9 = 12, deviation sqrt(12 / 4).
    values, tokens = torch.tensor([0.0, 4.0], dtype=torch.float64), torch.tensor([3, 1])
    got = batch_normalize(values, tokens)
    assert got.tolist() == pytest.approx([-1 / math.sqrt(3), 3 / math.sqrt(3)], abs=1e-8)
    # Not centred, the same deviation.
    got = batch_normalize(values, tokens, center=False)
    assert got.tolist() == pytest.approx([0.0, 4 / math.sqrt(3)], abs=1e-8)
    # Once each: mean 2, squares 8, sample deviation sqrt 8.
    got = batch_normalize(values, normalize="sample")
    assert got.tolist() == pytest.approx([-2 / math.sqrt(8), 2 / math.sqrt(8)], abs=1e-8)


def test_a_weight_repeats_a_value():
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1, 3, 0, 2, 1, 4])
    for normalize in ("population", "sample", "none"):
        got = batch_normalize(values, weights, normalize=normalize)
        repeated = batch_normalize(values.repeat_interleave(weights), normalize=normalize)
        torch.testing.assert_close(got.repeat_interleave(weights), repeated)
        assert got[2] == 0


def test_values_of_no_weight_may_be_junk():
    values = torch.tensor([0.0, NAN, 4.0])
    assert batch_normalize(values, torch.tensor([1, 0, 1])).tolist() == [-1.0, 0.0, 1.0]


def test_agreement_with_loops():
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(40, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 7, (40,), generator=generator)
    pairs = list(zip(rewards.tolist(), ids.tolist(), strict=True))
    of = [[r for r, i in pairs if i == g] for _, g in pairs]
    both = [(r, group, r - fmean(group)) for (r, _), group in zip(pairs, of, strict=True)]
    centred = [c for _, _, c in both]
    expected = {
        "sample": [c / stdev(group) for _, group, c in both],
        "population": [c / pstdev(group) for _, group, c in both],
        "none": centred,
        "leave_one_out": [r - (sum(group) - r) / (len(group) - 1) for r, group, _ in both],
        "hybrid": [c / pstdev(centred) for c in centred],
        "hybrid_of_returns": [c / stdev(rewards.tolist()) for c in centred],
    }
    for name, values in expected.items():
        got = FUNCTIONS[name](rewards, ids, None)
        assert got.tolist() == pytest.approx(values, abs=1e-8), name


def test_returns_by_hand():
    for dtype, tolerance in DTYPES:
        rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]], dtype=dtype)
        # 4; 2 + 4/2 = 4; 1 + 4/2 = 3.   1; 1/2; 1/4
        expected = torch.tensor([[3.0, 4.0, 4.0], [0.25, 0.5, 1.0]], dtype=dtype)
        torch.testing.assert_close(discounted_returns(rewards, 0.5), expected)
        # A critic's 8 and 0 behind the cut add 4, 2, 1 to the first row.
        got = discounted_returns(rewards, 0.5, bootstrap=torch.tensor([8.0, 0.0], dtype=dtype))
        expected[0] += torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_without_discount_returns_are_sums_and_with_a_full_one_rewards():
    rewards = torch.tensor([1.0, 2.0, 4.0])
    assert discounted_returns(rewards).tolist() == [7.0, 6.0, 4.0]
    assert discounted_returns(rewards, 0.0).tolist() == [1.0, 2.0, 4.0]
    assert discounted_returns(rewards[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages(REWARDS, normalize="std"), "normalize"),
        (lambda: group_advantages(REWARDS, eps_as="max"), "eps_as"),
        (lambda: group_advantages(REWARDS, positive_only="after"), "positive_only"),
        (lambda: group_advantages(REWARDS, valid=torch.ones(3, dtype=torch.bool)), "shape"),
        (lambda: group_advantages(REWARDS, torch.zeros(3)), "group_ids"),
        (lambda: leave_one_out(REWARDS.view(2, 2), torch.zeros(2, 2)), "group_ids"),
        (lambda: hybrid_advantages(REWARDS, deviation_of="rewards"), "deviation_of"),
        (lambda: hybrid_advantages(REWARDS, eps_as="max"), "eps_as"),
        (lambda: batch_normalize(REWARDS, eps_as="max"), "eps_as"),
        (lambda: batch_normalize(REWARDS, torch.ones(3)), "shape"),
        (lambda: batch_normalize(REWARDS, normalize="std"), "normalize"),
        (lambda: discounted_returns(REWARDS, 1.5), "gamma"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_groups_as_a_dimension_compile_as_one_graph():
    compiled = torch.compile(group_advantages, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(REWARDS.view(2, 2)), group_advantages(REWARDS.view(2, 2)))


def test_large_rewards_have_advantages_and_rounding_has_none():
    large = torch.tensor([3e38, -3e38])  # their squares, and their difference, are infinite
    half = 0.5**0.5
    for compare, wanted in (
        (group_advantages, half),
        (hybrid_advantages, 1.0),
        (batch_normalize, 1.0),
    ):
        found = compare(large)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor([wanted, -wanted]))
        # 0.1 + 0.2 and 0.3 in float32.
        near = torch.tensor([0.1, 0.3]) + torch.tensor([0.2, 0.0])
        near[0] = torch.nextafter(near[1], torch.tensor(1.0))
        assert compare(near).tolist() == [0.0, 0.0]
        assert leave_one_out(near).tolist() == [0.0, 0.0]

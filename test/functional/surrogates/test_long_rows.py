"""One ratio for a row of 100,000 tokens: float32 in and out, the sums of float64."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import (
    Normalizer,
    aggregate,
    geometric_log_ratio,
    gmpo,
    gspo,
    gspo_token,
    level_log_ratio,
    sequence_log_ratio,
    sequence_weights,
)

LENGTHS = (100_000, 3, 30_000, 100_000)
ADVANTAGES = (1.0, -2.0, -0.7, 0.3)
ROW = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ADVANTAGE = torch.tensor(ADVANTAGES)[ROW]
WITHIN = 1e-6


def log_ratios(spread):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(ROW), generator=generator) * spread


def mean_of_rows(losses):
    return aggregate(losses, ROW, 4, "sequence_mean", normalizer=Normalizer(len(ROW), 4))


def gradient_of(function, values, **settings):
    values = values.clone().requires_grad_()
    losses, clipped = function(values, ADVANTAGE, ROW, 4, **settings)
    assert losses.dtype is values.dtype is torch.float32
    total = mean_of_rows(losses)
    total.backward()
    return total.item(), values.grad.double(), clipped


def clip_by_row(values, advantage, low, high, *, exponent):
    """min(s A, clip(s) A) of one row, s = exp(sum / exponent)."""
    ratio = (values.sum() / exponent).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reference(values, of_row):
    """Mean over rows in float64, row by row, and its gradient."""
    values = values.double().requires_grad_()
    parts = values.split(LENGTHS)
    total = sum(of_row(part, a) for part, a in zip(parts, ADVANTAGES, strict=True)) / 4
    total.backward()
    return total.item(), values.grad


def assert_close(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=WITHIN)
    torch.testing.assert_close(got[1], expected[1], rtol=WITHIN, atol=0.0)


def test_a_row_of_30000_tokens_has_a_gradient_of_one():
    # s = 1 and A = 1: each token has -1 / n, together -1.
    row, ones = torch.zeros(30_000, dtype=torch.int64), torch.ones(30_000)
    for function in (gspo, gmpo):
        values = torch.zeros(30_000, requires_grad=True)
        losses, _ = function(values, ones, row, 1)
        aggregate(losses, row, 1, "sequence_mean").backward()
        assert values.grad.double().sum().item() == pytest.approx(-1.0, rel=WITHIN)


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_gspo_within_a_millionth_of_float64(function):
    values = log_ratios(0.05)
    got = gradient_of(function, values, low=0.2, high=0.2)
    expected = reference(values, lambda part, a: clip_by_row(part, a, 0.2, 0.2, exponent=len(part)))
    assert not got[2].any()
    assert_close(got, expected)


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_gspo_of_the_product_within_a_millionth_of_float64(function):
    # A sum of log-ratios that is far from 0, where a float32 exponent has lost digits.
    values = log_ratios(0.001) - 3e-5
    got = gradient_of(function, values, low=0.99, high=9.0, level="sequence")
    value, gradient = reference(values, lambda part, a: clip_by_row(part, a, 0.99, 9.0, exponent=1))
    if function is gspo_token:
        # The token's own ratio and not the product's: 1 / n of the gradient, by the mean of a row.
        gradient = gradient / torch.tensor(LENGTHS)[ROW]
    assert_close(got, (value, gradient))


def test_gmpo_within_a_millionth_of_float64():
    values = log_ratios(0.3)

    def of_row(part, advantage):
        bounded = part.clamp(max=0.4) if advantage > 0 else part.clamp(min=-0.4)
        return -advantage * bounded.mean().exp()

    got = gradient_of(gmpo, values)
    cut = torch.where(ADVANTAGE > 0, values > 0.4, values < -0.4)
    assert torch.equal(got[2], cut)
    assert_close(got, reference(values, of_row))


def test_sums_and_means_of_a_row_are_those_of_float64():
    values = log_ratios(1.0) + 0.1
    sums = torch.stack([part.double().sum() for part in values.split(LENGTHS)])
    means = sums / torch.tensor(LENGTHS)
    for got, expected in (
        (sequence_log_ratio(values, ROW, 4), sums),
        (geometric_log_ratio(values, ROW, 4), means),
        (level_log_ratio(values, ROW, 4, "sequence"), sums[ROW]),
        (level_log_ratio(values, ROW, 4, "geometric"), means[ROW]),
    ):
        assert got.dtype is torch.float32
        # Exact but for the rounding of the result.
        assert torch.equal(got, expected.float())


def test_gradients_of_a_level_add_up_over_a_row_in_float64():
    for level, share in (("sequence", 1.0), ("geometric", 1 / 100_000)):
        values = torch.zeros(100_000, requires_grad=True)
        row = torch.zeros(100_000, dtype=torch.int64)
        level_log_ratio(values, row, 1, level).mul(1 / 100_000).sum().backward()
        torch.testing.assert_close(
            values.grad, torch.full((100_000,), share), rtol=WITHIN, atol=0.0
        )


def test_weights_of_long_sequences_are_those_of_float64():
    row, values = torch.zeros(100_000, dtype=torch.int64), torch.full((100_000,), 1.9e-4)
    expected = math.exp(values.double().sum().item())
    got = sequence_weights(values, row, 1)
    assert got.dtype is torch.float32
    assert got[0].item() == pytest.approx(expected, rel=WITHIN)

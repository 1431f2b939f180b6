from __future__ import annotations

import math

import pytest
import torch
from functional.surrogates.rows import ragged

from torchrl_llm.functional import Normalizer, aggregate, gmpo, gspo, gspo_token, ppo_clip

PRECISIONS = [(torch.float64, 1e-8), (torch.float32, 1e-5)]
ONE_ROW = torch.tensor([0, 0])


def mean_of_sequences(values, row, num_rows=1):
    sequences = int(row.unique().numel())
    return aggregate(
        values, row, num_rows, "sequence_mean", normalizer=Normalizer(len(row), sequences)
    )


@pytest.mark.parametrize(
    ("ratios", "advantage", "bounds", "loss", "clipped", "gradient"),
    [
        # Ratios 1.21 and 1: s = sqrt(1.21) = 1.1, inside: -s A. ds / dlog r_t = s / 2 for both.
        ((1.21, 1.0), 2.0, (0.2, 0.2), -2.2, False, -1.1),
        # Above the upper bound: -(1 + 0.05) A and no gradient for any token.
        ((1.21, 1.0), 2.0, (0.2, 0.05), -2.1, True, 0.0),
        # The same ratio, negative advantage: the pessimistic side, -s A.
        ((1.21, 1.0), -2.0, (0.2, 0.05), 2.2, False, 1.1),
        # Ratios 0.64 and 1: s = 0.8. Below the lower bound with a negative advantage: 0.9.
        ((0.64, 1.0), -1.0, (0.1, 0.1), 0.9, True, 0.0),
        ((0.64, 1.0), -1.0, (0.3, 0.1), 0.8, False, 0.4),
        # One token far off and the other far off the other way: s = 1, nothing is clipped.
        ((4.0, 0.25), 3.0, (3e-4, 4e-4), -3.0, False, -1.5),
    ],
)
@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_gspo_by_hand(function, ratios, advantage, bounds, loss, clipped, gradient):
    for dtype, tolerance in PRECISIONS:
        log_ratio = torch.tensor(ratios, dtype=dtype).log().requires_grad_()
        got, cut = function(
            log_ratio, torch.full((2,), advantage, dtype=dtype), ONE_ROW, 1, *bounds
        )
        mean_of_sequences(got, ONE_ROW).backward()
        assert got.dtype is dtype
        assert got.tolist() == pytest.approx([loss, loss], abs=tolerance)
        assert cut.tolist() == [clipped, clipped]
        assert log_ratio.grad.tolist() == pytest.approx([gradient, gradient], abs=tolerance)


def test_the_default_bounds_of_gspo_are_the_papers():
    one_row, advantage = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    for function in (gspo, gspo_token):
        for ratio, cut in ((1.00039, False), (1.00041, True)):
            assert function(torch.tensor([ratio]).log(), advantage, one_row, 1)[1].item() is cut
        for ratio, cut in ((0.99971, False), (0.99969, True)):
            assert function(torch.tensor([ratio]).log(), -advantage, one_row, 1)[1].item() is cut


def test_advantages_of_tokens_share_their_mean_in_gspo_and_stay_apart_in_its_token_variant():
    # s = 1.1; advantages 1 and 3. Values -s A_t in both.
    expected = torch.tensor([-1.1, -3.3], dtype=torch.float64)
    advantage = torch.tensor([1.0, 3.0], dtype=torch.float64)
    # GSPO: the mean of the two, -s (1 + 3) / 2, through s / 2 for each: -1.1 for both.
    # Token variant: (1/2) (-s A_t).
    for function, gradient in ((gspo, [-1.1, -1.1]), (gspo_token, [-0.55, -1.65])):
        log_ratio = torch.tensor([1.21, 1.0], dtype=torch.float64).log().requires_grad_()
        got, _ = function(log_ratio, advantage, ONE_ROW, 1, 0.2, 0.2)
        torch.testing.assert_close(got, expected)
        mean_of_sequences(got, ONE_ROW).backward()
        assert log_ratio.grad.tolist() == pytest.approx(gradient, abs=1e-8)


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_gspo_agrees_with_a_loop_over_sequences(function):
    log_ratio, _, advantage, row = ragged()
    loss = mean_of_sequences(function(log_ratio, advantage, row, 6, 0.1, 0.15)[0], row, 6)
    loss.backward()
    twin = log_ratio.detach().clone().requires_grad_()
    total = 0.0
    for index in (0, 1, 2, 4, 5):
        tokens = (row == index).nonzero()[:, 0]
        ratio = torch.exp(sum(twin[t] for t in tokens) / len(tokens))
        gain = advantage[tokens[0]]
        total = total - torch.minimum(ratio * gain, ratio.clamp(0.9, 1.15) * gain) / 5
    total.backward()
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-8)
    torch.testing.assert_close(log_ratio.grad, twin.grad, rtol=0, atol=1e-8)


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_gspo_on_responses_of_one_token_is_the_clip_of_ppo(function):
    log_ratio, _, advantage, _ = ragged()
    row = torch.arange(len(log_ratio))
    got, cut = function(log_ratio, advantage, row, len(row), 0.2, 0.28)
    expected, expected_cut = ppo_clip(log_ratio, advantage, 0.2, 0.28)
    torch.testing.assert_close(got, expected)
    assert torch.equal(cut, expected_cut)
    gradients = [torch.autograd.grad(x.sum(), log_ratio)[0] for x in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "clipped", "gradient"),
    [
        # Positive: 0.6 is cut to 0.4. Mean (0.4 - 0.2) / 2 = 0.1; d / dlog r = -2 e^0.1 / 2.
        ((0.6, -0.2), 2.0, -2 * math.exp(0.1), (True, False), (0.0, -math.exp(0.1))),
        # Positive: there is no lower bound. Mean (-0.6 + 0.2) / 2.
        ((-0.6, 0.2), 1.0, -math.exp(-0.2), (False, False), (-math.exp(-0.2) / 2,) * 2),
        # Negative: -0.6 is raised to -0.4, and 0.5 is not cut. Mean (-0.4 + 0.5) / 2.
        ((-0.6, 0.5), -1.0, math.exp(0.05), (True, False), (0.0, math.exp(0.05) / 2)),
        # No advantage: no loss, and nothing to clip.
        ((0.9, -0.9), 0.0, 0.0, (False, False), (0.0, 0.0)),
    ],
)
def test_gmpo_by_hand(log_ratios, advantage, loss, clipped, gradient):
    for dtype, tolerance in PRECISIONS:
        log_ratio = torch.tensor(log_ratios, dtype=dtype, requires_grad=True)
        got, cut = gmpo(log_ratio, torch.full((2,), advantage, dtype=dtype), ONE_ROW, 1)
        mean_of_sequences(got, ONE_ROW).backward()
        assert got.dtype is dtype
        assert got.tolist() == pytest.approx([loss, loss], abs=tolerance)
        assert tuple(cut.tolist()) == clipped
        assert log_ratio.grad.tolist() == pytest.approx(list(gradient), abs=tolerance)


def test_gmpo_is_the_geometric_mean_of_clipped_objectives_of_the_paper():
    log_ratio, _, advantage, row = ragged(spread=0.8)
    loss = mean_of_sequences(gmpo(log_ratio, advantage, row, 6, 0.3, 0.5)[0], row, 6)
    loss.backward()
    twin = log_ratio.detach().clone().requires_grad_()
    total = 0.0
    for index in (0, 1, 2, 4, 5):
        tokens = (row == index).nonzero()[:, 0]
        gain, product = advantage[tokens[0]], 1.0
        for t in tokens:
            ratio = twin[t].exp()
            bounded = ratio.clamp(math.exp(-0.3), math.exp(0.5))
            product = product * torch.minimum(ratio * gain, bounded * gain).abs()
        total = total - product ** (1 / len(tokens)) * gain.sign() / 5
    total.backward()
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-8)
    torch.testing.assert_close(log_ratio.grad, twin.grad, rtol=0, atol=1e-8)


def test_each_bound_of_gmpo_acts_on_one_sign():
    log_ratio, row = torch.tensor([0.6, -0.6]), torch.tensor([0, 0])
    for sign, matters in ((1.0, "high"), (-1.0, "low")):
        base = gmpo(log_ratio, torch.full((2,), sign), row, 1, low=0.4, high=0.4)[0]
        for bound in ("low", "high"):
            other = gmpo(log_ratio, torch.full((2,), sign), row, 1, **{bound: 0.1})[0]
            assert torch.equal(base, other) is (bound != matters)


@pytest.mark.parametrize("function", [gspo, gspo_token, gmpo])
class TestAnySequenceSurrogate:
    def test_the_order_of_tokens_and_rows_has_no_influence(self, function):
        log_ratio, _, advantage, row = ragged(per_token=True)
        order = torch.randperm(len(row), generator=torch.Generator().manual_seed(1))
        renamed = torch.tensor([4, 2, 0, 5, 1, 3])[row]
        got, cut = function(log_ratio, advantage, row, 6)
        other, other_cut = function(log_ratio[order], advantage[order], renamed[order], 6)
        torch.testing.assert_close(got[order], other)
        assert torch.equal(cut[order], other_cut)

    def test_ratios_beyond_float_range_stay_finite(self, function):
        log_ratio = torch.tensor([200.0, -200.0, 300.0], requires_grad=True)
        for sign in (1.0, -1.0):
            row = torch.tensor([0, 1, 2])
            loss, _ = function(log_ratio, torch.full((3,), sign), row, 3)
            (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
            assert loss.isfinite().all()
            assert gradient.isfinite().all()

    def test_a_batch_without_tokens_is_empty(self, function):
        none = torch.zeros(0)
        loss, cut = function(none, none, torch.zeros(0, dtype=torch.int64), 2)
        assert loss.shape == cut.shape == (0,)

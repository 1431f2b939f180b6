from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import effective_sample_size, policy_mismatch


def test_equal_weights_are_worth_all_samples_whatever_their_size():
    assert effective_sample_size(torch.full((7,), 50.0)).item() == pytest.approx(1.0)


def test_effective_sample_size_by_hand():
    # Weights 1, 1, 2: (4)^2 / (3 x 6) = 8/9.
    got = effective_sample_size(torch.tensor([0.0, 0.0, math.log(2)]))
    assert got.item() == pytest.approx(8 / 9)


def test_mismatch_by_hand():
    # Ratios 2 and 1/2: k1 means to 0, k3 to (2 - 1 - log 2 + 1/2 - 1 + log 2) / 2 = 1/4.
    got = policy_mismatch(torch.tensor([math.log(2), -math.log(2)]), torch.zeros(2))
    assert got.k1.item() == pytest.approx(0.0)
    assert got.k3.item() == pytest.approx(0.25)
    assert (got.max_ratio.item(), got.min_ratio.item()) == pytest.approx((2.0, 0.5))


def test_diagnostics_take_no_gradient():
    values = torch.zeros(3, requires_grad=True)
    assert not any(x.requires_grad for x in policy_mismatch(values, torch.zeros(3)))

"""Draws: what their distribution leaves out, and sums that are the same on every device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.modules import SamplingParams
from torchrl_llm.modules.backends.sampling import draw, sampling_log_probs


class Sums(TorchDispatchMode):
    """Notes the dtype of each running sum; on a GPU one of floats is refused where it matters."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cumsum.default:
            self.dtypes.append(result.dtype)
        return result


def test_running_sums_are_of_whole_numbers():
    params = SamplingParams(max_new_tokens=1, top_p=0.7)
    with Sums() as sums:
        draw(sampling_log_probs(torch.randn(3, 50), params))
    assert sums.dtypes == [torch.int64, torch.int64]


def test_a_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25]]).expand(2000, -1)
    torch.manual_seed(0)
    points = torch.rand(2000, 1, dtype=torch.float64)
    torch.manual_seed(0)
    drawn = draw(probs.log())
    # Below 0.25 the second token, below 0.75 the third, else the fifth.
    expected = torch.tensor([1, 2, 4])[(points >= 0.25).int() + (points >= 0.75).int()]
    assert torch.equal(drawn, expected.squeeze(-1))


def test_the_last_possible_token_is_drawn_where_rounding_reaches_the_total(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.ones(*a, dtype=torch.float64))
    assert draw(torch.tensor([[0.5, 0.5, 0.0]]).log()).tolist() == [1]


@pytest.mark.parametrize("top_p", [0.5, 0.999, 0.99999])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_in_a_vocabulary_of_150_000(top_p):
    logits = 3 * torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0))
    kept = sampling_log_probs(logits, SamplingParams(max_new_tokens=1, top_p=top_p)).isfinite()
    probs = logits.double().softmax(-1)
    least = probs[kept].min()
    assert probs[kept].sum() >= top_p - 1e-9
    assert probs[kept].sum() - least < top_p + 1e-9

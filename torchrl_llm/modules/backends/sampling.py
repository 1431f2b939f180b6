"""Log-probs of the sampled distribution from logits, and draws from it.

Shape legend: ``B`` rows, ``V`` vocabulary, ``N`` scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.modules.backends.backend_port import SamplingParams

# A probability of 1 has this many units; a power of two scales float32 without rounding.
_UNITS = 2.0**52


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Make already seen tokens less probable (arXiv:1909.05858, section 4.1).

    Args:
        logits_BV: float ``[B, V]``.
        seen_BV: bool ``[B, V]``.
        penalty: above 1 discourages, below 1 encourages.

    Example:
        >>> seen = torch.tensor([[True, True, False]])
        >>> penalize_repetition(torch.tensor([[2.0, -2.0, 1.0]]), seen, 2.0)
        tensor([[ 1., -4.,  1.]])
    """
    penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized, logits_BV)


def sampling_log_probs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Return log-probs of the sampled distribution: temperature, then top-k, top-p and min-p.

    Args:
        logits_BV: float32 ``[B, V]``.
        params: the sampling fields; for greedy sampling, the distribution has temperature 1.

    Returns:
        float32 ``[B, V]`` in nats, normalised over the kept tokens, ``-inf`` for dropped ones.

    Example:
        >>> params = SamplingParams(max_new_tokens=1, top_k=2)
        >>> sampling_log_probs(torch.tensor([[3.0, 3.0, 1.0]]), params).exp()
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    if params.greedy:
        return logits_BV.log_softmax(-1)
    if params.temperature != 1:
        logits_BV = logits_BV / params.temperature
    if 0 < params.top_k < logits_BV.shape[-1]:
        floor = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor, -torch.inf)
    if params.top_p < 1:
        logits_BV = _keep_top_p(logits_BV, params.top_p)
    log_probs_BV = logits_BV.log_softmax(-1)
    if params.min_p > 0:
        floor = log_probs_BV.amax(-1, keepdim=True) + torch.tensor(params.min_p).log().item()
        log_probs_BV = log_probs_BV.masked_fill(log_probs_BV < floor, -torch.inf).log_softmax(-1)
    return log_probs_BV


def _keep_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    ordered, order = logits_BV.sort(dim=-1, descending=True)
    units = _units(ordered.softmax(-1))
    mass = units.cumsum(-1)
    # A token stays while the mass of more probable tokens is below top_p of the total. In a large
    # vocabulary, rounding moves the total from 1 by 1e-5. The first token always stays.
    dropped = mass - units >= mass[:, -1:].double().mul_(top_p).long()
    dropped[:, 0] = False
    return logits_BV.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def draw(log_probs_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    One uniform number per row replaces the ``V`` exponentials of ``torch.multinomial``. On the CPU,
    these cost 7 % of a step of a 0.6M-parameter model, and far more with a real vocabulary.

    Args:
        log_probs_BV: float32 ``[B, V]``, normalised, ``-inf`` where a token cannot be drawn.
        generator: ``None`` for torch's global generator of the device.

    Returns:
        int64 ``[B]``.

    Example:
        >>> draw(torch.tensor([[-torch.inf, 0.0], [0.0, -torch.inf]]))
        tensor([1, 0])
    """
    cumulative = _units(log_probs_BV.exp()).cumsum(-1)
    total = cumulative[:, -1:]
    share = torch.rand(total.shape, dtype=torch.float64, device=total.device, generator=generator)
    # Rounding may reach the total. Only impossible tokens come after it.
    point = torch.minimum(share.mul_(total).long(), total - 1)
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


def _units(probs_BV: Tensor) -> Tensor:
    """Convert to integers, because the running sum of floats is not deterministic on a GPU."""
    return probs_BV.mul(_UNITS).long()

"""From logits to the sampled distribution, a draw from it, and scores of given tokens.

Shape legend: ``B`` rows, ``V`` vocabulary, ``N`` scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.modules.backends.backend_port import SamplingParams


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Make tokens that were seen less probable (arXiv:1909.05858, section 4.1).

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
    """Log-probs of the distribution that is sampled: temperature, then top-k, top-p and min-p.

    Args:
        logits_BV: float32 ``[B, V]``.
        params: the sampling fields; a greedy one gives the distribution of temperature 1.

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
    probs = ordered.softmax(-1)
    # A token stays while the mass of the more probable ones is below top_p; the first always does.
    dropped = probs.cumsum(-1) - probs >= top_p
    dropped[:, 0] = False
    return logits_BV.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def draw(log_probs_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    One uniform number per row replaces the ``V`` exponentials of ``torch.multinomial``, which cost
    7 % of a step of a 0.6M-parameter model and far more with a real vocabulary on the CPU.

    Args:
        log_probs_BV: float32 ``[B, V]``, normalised, ``-inf`` where a token cannot be drawn.
        generator: ``None`` for torch's global generator of the device.

    Returns:
        int64 ``[B]``.

    Example:
        >>> draw(torch.tensor([[-torch.inf, 0.0], [0.0, -torch.inf]]))
        tensor([1, 0])
    """
    cumulative = log_probs_BV.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.rand(
        total.shape, dtype=torch.float64, device=total.device, generator=generator
    ).mul_(total)
    # Rounding may reach the total, beyond which only impossible tokens lie.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)

"""Log-probs and entropy of tokens, from logits that exist already.

Use these where logits are at hand (small vocabularies, tests, another library's output). Where a
model's hidden states are, :func:`~torchrl_llm.functional.chunked_head.chunked_log_probs` gives the
same numbers without ever holding the logits.

Alignment, everywhere in this package: entry ``t`` belongs to token ``t`` and is
``log p(x_t | x_<t)``. The model's output at position ``t - 1`` predicts token ``t``, so index 0 has
no prediction and is 0.0.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-softmax at one index a row, without keeping the whole log-softmax.

    Args:
        logits: ``[..., V]`` of any floating type; the sum is taken in float32.
        index: int64 ``[...]``.

    Returns:
        float32 ``[...]``, nats.

    Example:
        >>> selective_log_softmax(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
        tensor([0.5000])
    """
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).float()
    return picked - torch.logsumexp(logits.float(), dim=-1)


def token_log_probs(logits_BTV: Tensor, ids_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token of a sequence given its prefix.

    Args:
        logits_BTV: ``[B, T, V]`` logits; those at position ``t`` predict token ``t + 1``.
        ids_BT: int64 ``[B, T]`` token ids.
        temperature: what the logits are divided by first.

    Returns:
        float32 ``[B, T]`` in nats, log p(x_t | x_<t); index 0 is 0.0.

    Raises:
        ValueError: for shapes that do not fit or a temperature that is not positive.

    Example:
        >>> logits = torch.zeros(1, 3, 4)
        >>> token_log_probs(logits, torch.tensor([[0, 1, 2]])).exp()
        tensor([[1.0000, 0.2500, 0.2500]])
    """
    if logits_BTV.shape[:-1] != ids_BT.shape:
        raise ValueError(
            f"logits must be [B, T, V] and ids [B, T], got {tuple(logits_BTV.shape)} "
            f"and {tuple(ids_BT.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logits = logits_BTV[:, :-1]
    if temperature != 1.0:
        logits = logits.float() / temperature
    scores = selective_log_softmax(logits, ids_BT[:, 1:])
    return torch.nn.functional.pad(scores, (1, 0))


def entropy_from_logits(logits: Tensor) -> Tensor:
    r"""Entropy of the softmax, :math:`H = -\sum_v p_v \log p_v`.

    Args:
        logits: ``[..., V]``; entries of minus infinity have probability zero and add nothing.

    Returns:
        float32 ``[...]``, nats, between 0 and log V.

    Example:
        >>> entropy_from_logits(torch.zeros(4)).exp()
        tensor(4.)
    """
    log_probs = logits.float().log_softmax(-1)
    return torch.special.entr(log_probs.exp()).sum(-1)

"""Everything that a loss may ask about tokens, from the hidden states of one forward.

:class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer` runs the body; what is made of its
states is said here, each part by a function of :mod:`torchrl_llm.functional`.

Shape legend: ``N`` selected tokens, ``D`` hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import HeadScores
from torchrl_llm.modules.backends.head import LMHead
from torchrl_llm.modules.value_head import ValueHead


def score_hidden(
    head: LMHead,
    hidden_ND: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    extras: ScoreExtras | None = None,
    value_head: ValueHead | None = None,
    chunk_size: int | None = None,
    in_place_head_grad: bool = False,
) -> TokenScores:
    """Score the tokens that hidden states predict.

    Args:
        head: the language-model head.
        hidden_ND: ``[N, D]``.
        targets_N: int64 ``[N]``.
        temperature: a number, or float32 ``[N]``.
        entropy: also return the entropy of each distribution.
        extras: what else is wanted.
        value_head: estimates the values that ``extras`` may ask for.
        chunk_size: the most logits alive at once; chosen by device when ``None``.
        in_place_head_grad: add the gradient of the head's weight in place.

    Raises:
        ConfigError: for extras that are out of reach.
    """
    extras = ScoreExtras() if extras is None else extras
    scores = HeadScores(hidden_ND.new_zeros(0, dtype=torch.float32), None)
    if extras.log_probs:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not extras.detach_log_probs):
            scores = head.score(
                hidden_ND,
                targets_N,
                temperature=temperature,
                entropy=entropy,
                support=extras.support,
                chunk_size=chunk_size,
                in_place_head_grad=in_place_head_grad and not extras.detach_log_probs,
            )
    divergence = None
    if extras.teachers:
        divergence = _divergence(head, hidden_ND, extras, temperature, chunk_size)
    return TokenScores(
        *scores,
        values=_values(value_head, hidden_ND) if extras.values else None,
        divergence=divergence,
        states=head.states(hidden_ND) if extras.states else None,
    )


def _values(value_head: ValueHead | None, hidden_ND: Tensor) -> Tensor:
    if value_head is None:
        raise ConfigError(
            "values were asked of a model without value head: build it with "
            "TransformersBackend(model, value_head=ValueHead.for_model(model))"
        )
    return value_head(hidden_ND)


def _divergence(
    head: LMHead,
    hidden_ND: Tensor,
    extras: ScoreExtras,
    temperature: float | Tensor,
    chunk_size: int | None,
) -> Tensor:
    """Divergence of each token from its teacher, 0 where it has none."""
    settings = {"direction": extras.divergence, "chunk_size": chunk_size}
    if extras.teacher_index is None:
        (teacher,) = extras.teachers
        return head.divergence(hidden_ND, teacher, temperature=temperature, **settings)
    whole = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.float32)
    for number, teacher in enumerate(extras.teachers):
        # Indices rather than a mask: tokens are picked once and put back once.
        index = (extras.teacher_index.to(hidden_ND.device) == number).nonzero()[:, 0]
        own = temperature[index] if isinstance(temperature, Tensor) else temperature
        values = head.divergence(hidden_ND[index], teacher, temperature=own, **settings)
        whole = whole.to(values.dtype).index_put((index,), values)
    return whole

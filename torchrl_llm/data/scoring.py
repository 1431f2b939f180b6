"""Interface between losses and models: log-probs and other scores of given tokens.

Losses depend only on this interface, never on a wrapper class.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``N`` selected tokens, ``D`` hidden size,
``V`` vocabulary, ``S`` kept ids of all selected tokens together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import take_support


class Support(NamedTuple):
    """The ids that truncated sampling (top-k, top-p, min-p) kept for each token.

    Attributes:
        token_ids: int32 or int64 ``[S]``, the kept ids of all tokens, concatenated.
        counts: int32 or int64 ``[N]``, number of kept ids of each token; 0 means the whole
            vocabulary.

    Example:
        >>> support = Support(torch.tensor([4, 5, 6]), torch.tensor([2, 0, 1]))
        >>> support.take(torch.tensor([2, 0])).token_ids.tolist()
        [6, 4, 5]
    """

    token_ids: Tensor
    counts: Tensor

    @classmethod
    def whole(cls, num_tokens: int) -> Support:
        """Make the support of tokens without truncation: no ids, int32 counts of 0."""
        none = torch.zeros(0, dtype=torch.int32)
        return cls(none, torch.zeros(num_tokens, dtype=torch.int32))

    @classmethod
    def join(cls, parts: Sequence[Support]) -> Support:
        """Concatenate the supports of consecutive tokens (at least one support)."""
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @classmethod
    def of_rows(
        cls, token_ids: Sequence[Tensor], counts: Sequence[Tensor], select: Sequence[Tensor]
    ) -> Support:
        """Make the support of the selected tokens of rows.

        Args:
            token_ids: ``B`` tensors ``[S_b]``; everything after the counted ids is padding.
            counts: ``B`` tensors ``[T_b]``.
            select: ``B`` bool tensors ``[T_b]``.
        """
        rows = zip(token_ids, counts, select, strict=True)
        return cls.join([cls(ids[: int(c.sum())], c).take(mask) for ids, c, mask in rows])

    def take(self, index: Tensor) -> Support:
        """Return the support of some tokens: int64 positions ``[M]`` in order, or bool ``[N]``."""
        return Support(*take_support(self.token_ids, self.counts, index))

    def span(self, start: int, stop: int) -> Support:
        """Return the support of the tokens from ``start`` to ``stop - 1``, as views."""
        first, size = int(self.counts[:start].sum()), int(self.counts[start:stop].sum())
        return Support(self.token_ids[first : first + size], self.counts[start:stop])

    def to(self, device: torch.device) -> Support:
        """Return the same support on a device."""
        return Support(self.token_ids.to(device), self.counts.to(device))


class HeadStates(NamedTuple):
    """The distributions of a different model in the cheapest form: the states before its head.

    Attributes:
        hidden: ``[N, D]``, without gradient, the states that predict the selected tokens.
        weight: ``[V, D]`` of the head.
        bias: ``[V]`` of the head, or ``None``.
        scale: factor of the logits.
        softcap: cap of the scaled logits, or ``None``.
        low_rank: ``(u, B)``, ``[N, R]`` and ``[V, R]``, if an adapter adds ``u @ B.T`` to the
            head's output; else ``None``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    low_rank: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreExtras:
    """Requested outputs of a scorer besides log-probs, all from one forward.

    A scorer that does not support a request raises :class:`~torchrl_llm.errors.ConfigError`.

    Attributes:
        values: also return the value head's estimate of the state before each selected token.
        support: score under the distribution restricted to these ids, aligned with the selected
            tokens.
        teachers: also return the divergence over the whole vocabulary between the model and each
            token's teacher. Several teachers must have disjoint tokens, see ``teacher_index``.
        teacher_index: int64 ``[N]``, index of the teacher of each token, -1 for none; ``None`` if
            one teacher has all tokens. Teacher ``k`` has the states of the tokens with index ``k``,
            in order.
        divergence: ``"reverse"``, KL(model || teacher), or ``"forward"``, KL(teacher || model).
        states: also return the model's own detached states before its head. Losses request them
            from a teacher.
        greedy: also return whether each selected token is the most likely one.
        log_probs: if ``False``, the head does not compute log-probs, and the returned log-probs are
            empty, ``[0]``.
        detach_log_probs: return log-probs and entropy without a gradient, which saves memory.
    """

    values: bool = False
    support: Support | None = None
    teachers: tuple[HeadStates, ...] = ()
    teacher_index: Tensor | None = None
    divergence: Literal["reverse", "forward"] = "reverse"
    states: bool = False
    greedy: bool = False
    log_probs: bool = True
    detach_log_probs: bool = False

    def of_rows(self, select: Sequence[Tensor]) -> Iterator[ScoreExtras]:
        """Return the same extras for each row separately, with the row's part of the support.

        Args:
            select: ``B`` bool tensors ``[T_b]``, the selected tokens.
        """
        start = 0
        for stop in accumulate(int(mask.sum()) for mask in select):
            own = self.support and self.support.span(start, stop)
            yield replace(self, support=own)
            start = stop


class TokenScores(NamedTuple):
    """Scores of the selected tokens of a batch, flat and in row-major order.

    Attributes:
        log_probs: float32 ``[N]`` in nats, log p(x_t | x_<t) at the row's temperature.
        entropy: float32 ``[N]`` in nats, entropy of the distribution that x_t was drawn from;
            ``None`` if not requested.
        values: float32 ``[N]``, value of the state before x_t; ``None`` if not requested.
        divergence: float32 ``[N]`` in nats, over the whole vocabulary, 0 for tokens without
            teacher; ``None`` if not requested.
        states: the states before the head and the head itself, without gradient; ``None`` if not
            requested.
        greedy: bool ``[N]``, whether x_t is the most likely token; ``None`` if not requested.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    divergence: Tensor | None = None
    states: HeadStates | None = None
    greedy: Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence[TokenScores], *, entropy: bool) -> TokenScores:
        """Concatenate log-probs (and entropies) of consecutive tokens; ``parts`` may be empty.

        Args:
            parts: the scores of each part.
            entropy: whether the parts have entropies.
        """
        none = torch.zeros(0)
        log_probs = torch.cat([none, *(part.log_probs for part in parts)])
        return cls(log_probs, torch.cat([none, *(p.entropy for p in parts)]) if entropy else None)


class TokenScorer(ABC):
    """Anything that can score given token ids, with gradients during training.

    Attributes:
        tokenizer: the tokenizer of the ids, if known; ``None`` otherwise. Two scorers may score the
            same ids only if their tokenizers agree.
        vocab_size: number of ids, if known; ``None`` otherwise.
        layouts: supported layouts of rows of different length in a forward (see
            ``torchrl_llm.modules.backends.layouts``); empty if there is only one.
        layout: the current layout, which can be set to any of ``layouts``. Scores and gradients are
            the same up to rounding. ``None`` if there is only one layout.
    """

    tokenizer: Any = None
    vocab_size: int | None = None
    layouts: tuple[str, ...] = ()
    layout: str | None = None

    @abstractmethod
    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """Score selected positions of ragged sequences.

        Args:
            sequences: ``B`` int64 tensors of shape ``[T_b]``.
            select: ``B`` bool tensors of shape ``[T_b]``: the positions to score. Position 0 has no
                prefix and must not be selected.
            temperature: one value, or float32 ``[B]``, one per row.
            entropy: also return the entropy at each selected position.
            extras: other requested outputs.

        Returns:
            The scores of the ``N`` selected positions, row by row.

        Raises:
            ConfigError: the scorer does not support a request of ``extras``.
        """

    def naive_scorer(self) -> TokenScorer | None:
        """Return a slow, simple scorer with the same weights, to compare; ``None`` without one.

        It supports no extras except the support.
        """
        return None


def last_values(
    scorer: TokenScorer, sequences: Sequence[Tensor], *, pad_id: int | None = None
) -> Tensor:
    """Return the value of each sequence: the value of the state after its last token.

    Args:
        scorer: scorer with a value head, or a classifier with one output.
        sequences: ``B`` int64 tensors ``[T_b]``.
        pad_id: padding id: the last token that differs from it is the last token of the row, as in
            transformers' classifiers.

    Returns:
        float32 ``[B]``, with gradients if enabled.
    """
    longer, select = [], []
    for ids in sequences:
        kept = (ids != (-1 if pad_id is None else pad_id)).nonzero()
        end = int(kept[-1]) + 1 if len(kept) else 1
        # A value belongs to the state before a token, so one more token is appended. The model does
        # not run it.
        longer.append(torch.cat([ids[:end], ids[:1]]))
        select.append(torch.arange(end + 1) == end)
    extras = ScoreExtras(values=True, log_probs=False)
    return scorer.token_scores(longer, select, extras=extras).values


def check_same_vocabulary(
    first: TokenScorer, second: TokenScorer, *, names: tuple[str, str]
) -> None:
    """Check that two scorers decode the same ids to the same text.

    If both have a tokenizer, their vocabularies must be equal (the embeddings may be padded to
    different sizes); otherwise their numbers of ids must be equal, if both are known.

    Args:
        first: a scorer.
        second: a different scorer.
        names: names of the scorers for the error.

    Raises:
        ConfigError: the vocabularies differ.
    """
    tokenizers = first.tokenizer, second.tokenizer
    if None not in tokenizers:
        if tokenizers[0] is tokenizers[1]:
            return
        known, other = (tokenizer.get_vocab() for tokenizer in tokenizers)
        differing = set(known.keys() ^ other.keys())
        differing |= {
            token for token in known.keys() & other.keys() if known[token] != other[token]
        }
        if not differing:
            return
        examples = ", ".join(repr(token) for token in sorted(differing)[:4])
        what = f"their tokenizers differ in {len(differing)} tokens ({examples})"
    elif None in (first.vocab_size, second.vocab_size) or first.vocab_size == second.vocab_size:
        return
    else:
        what = f"they have {first.vocab_size} and {second.vocab_size} ids"
    raise ConfigError(
        f"{names[0]} and {names[1]} must have one vocabulary, because one scores ids of "
        f"the other, but {what}"
    )

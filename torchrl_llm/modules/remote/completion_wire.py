"""Prompts and completions as a few flat arrays: what travels between a pool and its replicas.

A tensor costs a process boundary some 20 microseconds and 400 bytes whatever it holds; a thousand
completions have five thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import find_fact
from torchrl_llm.modules.backends.backend_port import Completion


class PackedIds(NamedTuple):
    """Rows of ids, or of flags.

    Attributes:
        values: of all rows, one row after the other.
        lengths: int64, one a row.

    Example:
        >>> packed = PackedIds.of([torch.tensor([5, 6]), torch.tensor([7])])
        >>> [row.tolist() for row in packed.rows()]
        [[5, 6], [7]]
    """

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> PackedIds:
        """Pack 1-d tensors of one dtype."""
        flat = torch.cat([row.cpu() for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        return cls(flat.numpy(), np.array([len(row) for row in rows], dtype=np.int64))

    def rows(self) -> list[Tensor]:
        """The rows again, tensors that may be written to."""
        return _split(self.values, self.lengths)


class PackedCompletions(NamedTuple):
    """What :meth:`~torchrl_llm.modules.backends.backend_port.Backend.generate` returns.

    Attributes:
        num_samples: completions a prompt.
        token_ids: int64, of all completions.
        log_probs: float32.
        versions: int32; ``None`` where nobody counts them yet.
        lengths: int64, one a completion.
        reasons: int8, one a completion.
        support_ids: int32, the kept ids of all completions; ``None`` where none were recorded.
        support_counts: int32, one a token.
        facts: registered per-token facts by name, one value a token; ``None`` for none.
    """

    num_samples: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray | None
    lengths: np.ndarray
    reasons: np.ndarray
    support_ids: np.ndarray | None = None
    support_counts: np.ndarray | None = None
    facts: dict[str, np.ndarray] | None = None

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Completion]], *, version: int | None
    ) -> PackedCompletions:
        """Pack completions.

        Args:
            groups: as many completions for each prompt.
            version: that of tokens whose completion does not say it; ``None`` where it is unknown.

        Raises:
            DataError: a completion's fact is not registered, or of another dtype or length.
        """
        flat = [completion for group in groups for completion in group]
        lengths = np.array([len(c.token_ids) for c in flat], dtype=np.int64)
        versions = None
        if version is not None or (flat and all(c.versions is not None for c in flat)):
            versions = [
                torch.full((len(c.token_ids),), version, dtype=torch.int32)
                if c.versions is None
                else c.versions
                for c in flat
            ]
        support = None
        if flat and all(c.support is not None for c in flat):
            support = Support.join([c.support for c in flat])
        return cls(
            len(groups[0]) if groups else 0,
            _join([c.token_ids for c in flat], torch.int64),
            _join([c.log_probs for c in flat], torch.float32),
            None if versions is None else _join(versions, torch.int32),
            lengths,
            np.array([int(c.finish_reason) for c in flat], dtype=np.int8),
            None if support is None else support.token_ids.to(torch.int32).numpy(),
            None if support is None else support.counts.to(torch.int32).numpy(),
            _join_facts(flat),
        )

    def groups(self) -> list[list[Completion]]:
        """The completions again."""
        ids, log_probs = _split(self.token_ids, self.lengths), _split(self.log_probs, self.lengths)
        versions: list[Tensor | None] = [None] * len(ids)
        if self.versions is not None:
            versions = list(_split(self.versions, self.lengths))
        reasons = [FinishReason(int(reason)) for reason in self.reasons]
        supports: list[Support | None] = [None] * len(ids)
        if self.support_counts is not None:
            counts = _split(self.support_counts, self.lengths)
            sizes = np.array([int(count.sum()) for count in counts], dtype=np.int64)
            kept = _split(self.support_ids, sizes)
            supports = [Support(*pair) for pair in zip(kept, counts, strict=True)]
        facts: list[dict[str, Tensor] | None] = [None] * len(ids)
        if self.facts is not None:
            columns = {name: _split(values, self.lengths) for name, values in self.facts.items()}
            facts = [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
        rows = zip(ids, log_probs, reasons, supports, versions, facts, strict=True)
        flat = [Completion(*row) for row in rows]
        size = self.num_samples
        return [flat[at : at + size] for at in range(0, len(flat), size)] if size else []


def _join_facts(completions: Sequence[Completion]) -> dict[str, np.ndarray] | None:
    """The facts of completions, with their defaults where only others have them."""
    joined = {}
    for name in dict.fromkeys(name for c in completions for name in c.facts or ()):
        fact = find_fact(name)
        rows = []
        for completion in completions:
            length = len(completion.token_ids)
            values = (completion.facts or {}).get(name)
            if values is not None:
                fact.check(values, length)
            rows.append(fact.filled(length) if values is None else values)
        joined[name] = _join(rows, fact.dtype)
    return joined or None


def _join(rows: Sequence[Tensor], dtype: torch.dtype) -> np.ndarray:
    joined = torch.cat([row.detach().cpu() for row in rows]) if rows else torch.zeros(0)
    return joined.to(dtype).numpy()


def _split(values: np.ndarray, lengths: np.ndarray) -> list[Tensor]:
    # Arrays out of the object store are read-only, which torch would warn of.
    flat = torch.from_numpy(values if values.flags.writeable else values.copy())
    return list(flat.split(lengths.tolist())) if len(lengths) else []

"""What travels between a pool and its replicas, as a few flat arrays.

A tensor costs a process boundary some 20 microseconds and 400 bytes whatever it holds; a thousand
completions have five thousand of them. Weights lie in Ray's object store: they are sent once to
each machine, and every process there maps them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_llm._ray import CALL_TIMEOUT_S, get, require_ray
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import find_fact
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Completion
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import WeightSource


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
        versions: int32; ``None`` where none are counted yet.
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


_ALIGNMENT = 64


class _Place(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class ObjectStoreSource(WeightSource):
    """Weights as one flat buffer in Ray's object store.

    Make it with :meth:`put`. It may be opened any number of times while whoever put it lives; the
    tensors that it yields are views of shared memory and must not be written to.

    Args:
        ref: Ray's reference to the bytes.
        places: where each weight lies in them.
        kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
        digest: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
        timeout_s: most seconds to wait for the bytes.
    """

    def __init__(
        self,
        ref: Any,
        places: list[_Place],
        *,
        kind: Literal["full", "delta", "adapter"],
        digest: str | None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._ref, self._places, self._timeout_s = ref, places, timeout_s
        self.kind, self.digest = kind, digest

    @classmethod
    def put(
        cls,
        weights: Mapping[str, Tensor],
        *,
        kind: Literal["full", "delta", "adapter"] = "full",
        digest: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ObjectStoreSource:
        """Copy weights into the object store.

        Args:
            weights: name to tensor, on any device.
            kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
            digest: of the weights; computed by default.
            timeout_s: most seconds that a receiver waits for the bytes.

        Raises:
            ResourceError: Ray is not running.
        """
        ray = require_ray("ObjectStoreSource")
        places, size = [], 0
        for name, tensor in weights.items():
            places.append(_Place(name, tensor.dtype, tuple(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        flat = torch.empty(size, dtype=torch.uint8)
        with torch.no_grad():
            for place, tensor in zip(places, weights.values(), strict=True):
                _view(flat, place).copy_(tensor)
        digest = weights_digest(weights) if digest is None else digest
        return cls(ray.put(flat.numpy()), places, kind=kind, digest=digest, timeout_s=timeout_s)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`; nothing is copied on the machine that has the bytes."""
        try:
            array = get(self._ref, timeout_s=self._timeout_s, what="weights in the object store")
        except WorkerError as error:
            raise WeightUpdateError(str(error)) from error
        with warnings.catch_warnings():
            # Torch knows no read-only tensors; receivers copy out of these.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(array)
        for place in self._places:
            yield place.name, _view(flat, place)


def _view(flat: Tensor, place: _Place) -> Tensor:
    size = math.prod(place.shape) * place.dtype.itemsize
    return flat[place.offset : place.offset + size].view(place.dtype).view(place.shape)

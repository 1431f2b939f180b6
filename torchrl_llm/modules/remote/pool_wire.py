"""Messages between a pool and its replicas, packed into a few flat arrays.

Sending a tensor to a different process costs some 20 microseconds and 400 bytes, for any size. A
thousand completions have five thousand tensors. Weights are in Ray's object store: they are sent
once to each machine, and every process of the machine maps them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm._ray import CALL_TIMEOUT_S, get, require_ray
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import RaggedColumn
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import find_fact
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Completion
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import WeightSource


class PackedCompletions(NamedTuple):
    """Result of :meth:`~torchrl_llm.modules.backends.backend_port.Backend.generate`.

    Attributes:
        num_samples: completions per prompt.
        reasons: finish reason of each completion.
        columns: columns of the completions, one value per token: int64 ``token_ids``, float32
            ``log_probs``, int32 ``versions`` if they are known, int32 ``support_ids`` and
            ``support_counts`` if the kept ids were recorded.
        facts: registered per-token facts by name.
    """

    num_samples: int
    reasons: list[FinishReason]
    columns: dict[str, RaggedColumn]
    facts: dict[str, RaggedColumn]

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Completion]], *, version: int | None
    ) -> PackedCompletions:
        """Pack completions.

        Args:
            groups: the completions of each prompt, the same number for all prompts.
            version: version of tokens whose completion has none; ``None`` if it is unknown.

        Raises:
            DataError: a fact of a completion is not registered, or has a different dtype or length.
        """
        flat = [completion for group in groups for completion in group]
        columns = {
            "token_ids": _column([c.token_ids for c in flat], torch.int64),
            "log_probs": _column([c.log_probs for c in flat], torch.float32),
        }
        if version is not None or all(c.versions is not None for c in flat):
            versions = [
                torch.full(c.token_ids.shape, version) if c.versions is None else c.versions
                for c in flat
            ]
            columns["versions"] = _column(versions, torch.int32)
        if all(c.support is not None for c in flat):
            columns["support_ids"] = _column([c.support.token_ids for c in flat], torch.int32)
            columns["support_counts"] = _column([c.support.counts for c in flat], torch.int32)
        number = len(groups[0]) if groups else 0
        return cls(number, [c.finish_reason for c in flat], columns, _fact_columns(flat))

    def groups(self) -> list[list[Completion]]:
        """Unpack the completions."""
        columns = {name: column.split() for name, column in self.columns.items()}
        facts = {name: column.split() for name, column in self.facts.items()}
        flat = [
            Completion(
                columns["token_ids"][i],
                columns["log_probs"][i],
                reason,
                Support(columns["support_ids"][i], columns["support_counts"][i])
                if "support_ids" in columns
                else None,
                columns["versions"][i] if "versions" in columns else None,
                {name: rows[i] for name, rows in facts.items()} or None,
            )
            for i, reason in enumerate(self.reasons)
        ]
        size = self.num_samples
        return [flat[at : at + size] for at in range(0, len(flat), size)] if size else []


def _column(rows: Sequence[Tensor], dtype: torch.dtype) -> RaggedColumn:
    return RaggedColumn.of([row.detach().to("cpu", dtype) for row in rows])


def _fact_columns(completions: Sequence[Completion]) -> dict[str, RaggedColumn]:
    """Return the facts of completions, with defaults for completions without them."""
    columns = {}
    for name in dict.fromkeys(name for c in completions for name in c.facts or ()):
        fact, rows = find_fact(name), []
        for completion in completions:
            length = len(completion.token_ids)
            values = (completion.facts or {}).get(name)
            rows.append(fact.filled(length) if values is None else values)
            fact.check(rows[-1], length)
        columns[name] = _column(rows, fact.dtype)
    return columns


class ObjectStoreSource(WeightSource):
    """Weights as arrays in Ray's object store.

    Create it with :meth:`put`. While the process that called :meth:`put` lives, the source can be
    opened any number of times. The tensors that it yields are views of shared memory and must not
    be written to.

    Args:
        ref: Ray's reference to the bytes of each weight, by name.
        kinds: dtype and shape of each weight.
        kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
        digest: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
        timeout_s: most seconds to wait for the bytes.
    """

    def __init__(
        self,
        ref: Any,
        kinds: dict[str, tuple[torch.dtype, torch.Size]],
        *,
        kind: Literal["full", "delta", "adapter"],
        digest: str | None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._ref, self._kinds, self._timeout_s = ref, kinds, timeout_s
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
        arrays = {
            name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for name, tensor in weights.items()
        }
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        digest = weights_digest(weights) if digest is None else digest
        return cls(ray.put(arrays), kinds, kind=kind, digest=digest, timeout_s=timeout_s)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`; a machine that has the bytes copies nothing."""
        try:
            arrays = get(self._ref, timeout_s=self._timeout_s, what="weights in the object store")
        except WorkerError as error:
            raise WeightUpdateError(str(error)) from error
        for name, (dtype, shape) in self._kinds.items():
            with warnings.catch_warnings():
                # Torch has no read-only tensors; receivers copy from these.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(arrays[name])
            yield name, flat.view(dtype).view(shape)

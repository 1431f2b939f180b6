"""Weights in Ray's object store: sent once to each machine, mapped by every process there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm._ray import CALL_TIMEOUT_S, get, require_ray
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import WeightSource

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

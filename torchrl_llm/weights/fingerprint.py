"""Fingerprints of weights, and the ledger that keeps the one of each version.

What the sender hashed, the receiver must find in what it got.

It proves that bytes arrived, not that an engine uses them: fused and padded weights inside an
engine cannot be hashed alike. That is what the canary prompt of :mod:`torchrl_llm.weights` is for.
Batches are checked against the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchrl_llm.errors import WeightUpdateError

# Bytes that are copied and then hashed while the processor still has them in its cache.
_CHUNK = 1 << 20


class WeightDigest:
    """A digest that takes weights one after the other, in any order.

    Names, dtypes, shapes and bytes count; the order and the device do not. It is XXH3 with 128
    bits, which reads as fast as memory does: made against what goes wrong, not against somebody who
    wants two weights to look alike.

    Attributes:
        num_tensors: how many were counted in.
        num_bytes: of all of them.

    Example:
        >>> digest = WeightDigest()
        >>> digest.update("a", torch.ones(2))
        >>> digest.value == weights_digest({"a": torch.ones(2)})
        True
    """

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._sum = 0
        self.num_tensors = 0
        self.num_bytes = 0

    def update(self, name: str, tensor: Tensor, *, target: Tensor | None = None) -> None:
        """Count a weight in, and copy it where it belongs on the way.

        Args:
            name: its dotted name.
            tensor: its values; on an accelerator they are copied to the CPU.
            target: gets the values, whatever its dtype; together this costs little more than the
                copy.
        """
        data = tensor.detach()
        if target is not None and not _side_by_side(data, target):
            target.copy_(data)
            target = None
        data = data.to("cpu").contiguous()
        content = xxhash.xxh3_128(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        if data.numel():
            flat = data.flatten()
            read = memoryview(flat.view(torch.uint8).numpy())
            if target is None:
                content.update(read)
            else:
                step = _CHUNK // data.itemsize
                pieces = zip(flat.split(step), target.view(-1).split(step), strict=True)
                for start, (piece, place) in zip(range(0, len(read), _CHUNK), pieces, strict=True):
                    place.copy_(piece)
                    content.update(read[start : start + _CHUNK])
        number = int.from_bytes(content.digest(), "big")
        # A sum does not depend on the order in which weights come.
        self._sum = (self._sum + number) % 2**128
        self._parts[name] = number
        self.num_tensors += 1
        self.num_bytes += data.numel() * data.element_size()

    @property
    def parts(self) -> dict[str, int]:
        """Name to the number of each weight; the digest is their sum modulo 2^128."""
        return dict(self._parts)

    @property
    def value(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._sum:032x}"

    @staticmethod
    def of_parts(parts: Mapping[str, int]) -> str:
        """The digest of weights whose numbers are known.

        Args:
            parts: see :attr:`parts`.

        Returns:
            32 hexadecimal digits.
        """
        return f"{sum(parts.values()) % 2**128:032x}"


def _side_by_side(data: Tensor, target: Tensor) -> bool:
    """Whether two tensors can be copied in pieces that lie next to each other."""
    return all(one.device.type == "cpu" and one.is_contiguous() for one in (data, target))


def weights_digest(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named weights.

    Args:
        weights: name to tensor, or pairs of them.

    Returns:
        32 hexadecimal digits.
    """
    digest = WeightDigest()
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        digest.update(name, tensor)
    return digest.value


class WeightLedger:
    """Version to digest of the weights that were proven to have arrived.

    Updaters of engines record into it; whoever takes batches checks what they claim. A version that
    was never proven, or that somebody sampled with other weights, is refused. Threads may share it.

    Args:
        keep: versions that are remembered, the newest.

    Example:
        >>> ledger = WeightLedger()
        >>> ledger.record(1, "aa")
        >>> ledger.check({1: "aa"})
        >>> ledger.check({1: "ab"})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.WeightUpdateError: rows claim version 1 of the weights with the digest \
'ab'; that version is 'aa'
    """

    def __init__(self, keep: int = 1024) -> None:
        self._keep = keep
        self._digests: dict[int, str] = {}
        self._lock = threading.Lock()

    def record(self, version: int, digest: str) -> None:
        """Write down what a version is.

        Args:
            version: number of the weights.
            digest: of them.

        Raises:
            WeightUpdateError: the version is known, with another digest.
        """
        with self._lock:
            known = self._digests.get(version, digest)
            if known != digest:
                raise WeightUpdateError(
                    f"version {version} of the weights is {known!r} and was sent again as "
                    f"{digest!r}; a version has one value"
                )
            self._digests[version] = digest
            for old in sorted(self._digests)[: -self._keep]:
                del self._digests[old]

    def digest(self, version: int) -> str | None:
        """That of a version; ``None`` when it was not proven, or is forgotten."""
        return self._digests.get(version)

    def check(
        self, digests: Mapping[int, str], versions: Iterable[int] = (), *, proven: bool = True
    ) -> None:
        """Refuse rows that do not hold what they claim.

        Args:
            digests: version to digest, as the sampler had them
                (``digests``).
            versions: of the sampled tokens; each needs a digest.
            proven: refuse versions that are not in the book; without it they pass, as where the
                first weights were not hashed.

        Raises:
            WeightUpdateError: names the first version that is wrong, and why.
        """
        bare = sorted(set(versions) - set(digests))
        if bare:
            raise WeightUpdateError(
                f"rows hold tokens of version {bare[0]}, and their sampler gave no digest of it; "
                f"it gave {sorted(digests)}"
            )
        for version, claimed in sorted(digests.items()):
            known = self.digest(version)
            if known is None and not proven:
                continue
            if known is None:
                raise WeightUpdateError(
                    f"rows claim version {version} of the weights, which was never proven to have "
                    "arrived anywhere, or is forgotten"
                )
            if known != claimed:
                raise WeightUpdateError(
                    f"rows claim version {version} of the weights with the digest {claimed!r}; "
                    f"that version is {known!r}"
                )

    def state_dict(self) -> dict[str, Any]:
        """The digests, for a checkpoint."""
        with self._lock:
            return {"digests": dict(self._digests)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        with self._lock:
            self._digests = {int(key): value for key, value in state_dict["digests"].items()}

    def __len__(self) -> int:
        return len(self._digests)

"""Digests of weights, and the ledger that records the digest of each version.

The receiver computes a digest, which must equal the sender's.

Equal digests prove that the bytes arrived. They do not prove that an engine uses the weights,
because fused and padded weights inside an engine have different digests; the canary of
:mod:`torchrl_llm.weights` checks this. The ledger is used to check batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchrl_llm.errors import WeightUpdateError

# Chunk size: bytes are copied and then hashed while they are in the processor's cache.
_CHUNK = 1 << 20


class WeightDigest:
    """A digest of weights, added one by one in any order.

    The digest depends on names, dtypes, shapes and bytes, not on the order or the device. The hash
    is 128-bit XXH3, which is as fast as reading memory. It protects against errors, not against
    deliberate collisions.

    Attributes:
        num_tensors: number of added weights.
        num_bytes: bytes of all of them.

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
        """Add a weight, and optionally copy it at the same time.

        Args:
            name: its dotted name.
            tensor: its values; on an accelerator they are copied to the CPU.
            target: receives a copy of the values, in its own dtype. Copying and hashing together
                cost little more than the copy.
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
        # A sum does not depend on the order of the weights.
        self._sum = (self._sum + number) % 2**128
        self._parts[name] = number
        self.num_tensors += 1
        self.num_bytes += data.numel() * data.element_size()

    @property
    def parts(self) -> dict[str, int]:
        """Number of each weight by name; the digest is their sum modulo 2^128."""
        return dict(self._parts)

    @property
    def value(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._sum:032x}"

    @staticmethod
    def of_parts(parts: Mapping[str, int]) -> str:
        """Compute the digest from the numbers of single weights.

        Args:
            parts: see :attr:`parts`.

        Returns:
            32 hexadecimal digits.
        """
        return f"{sum(parts.values()) % 2**128:032x}"


def _side_by_side(data: Tensor, target: Tensor) -> bool:
    """Return whether two tensors can be copied in contiguous pieces."""
    return all(one.device.type == "cpu" and one.is_contiguous() for one in (data, target))


def weights_digest(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Compute the digest of named weights.

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
    """Records the digest of each verified version of the weights.

    Updaters of engines record versions; receivers of batches check the versions of the rows. Rows
    of a version that was never verified, or that were sampled by different weights, are rejected.
    Thread-safe.

    Args:
        keep: number of newest versions to keep.

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
        """Record the digest of a version.

        Args:
            version: version number of the weights.
            digest: digest of these weights.

        Raises:
            WeightUpdateError: the version is known with a different digest.
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
        """Return the digest of a version; ``None`` if it was not verified or is no longer kept."""
        return self._digests.get(version)

    def check(
        self, digests: Mapping[int, str], versions: Iterable[int] = (), *, proven: bool = True
    ) -> None:
        """Reject rows whose versions and digests do not match the ledger.

        Args:
            digests: digest of each version, as reported by the sampler (``digests``).
            versions: versions of the sampled tokens; each needs a digest.
            proven: reject versions that are not in the ledger. ``False`` accepts them, for example
                because the first weights were not hashed.

        Raises:
            WeightUpdateError: for the first wrong version, with the reason.
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
        """Return the digests, for a checkpoint."""
        with self._lock:
            return {"digests": dict(self._digests)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        with self._lock:
            self._digests = {int(key): value for key, value in state_dict["digests"].items()}

    def __len__(self) -> int:
        return len(self._digests)

"""A fingerprint of weights: what the sender hashed, the receiver must find in what it got.

It proves that bytes arrived, not that an engine uses them: fused and padded weights inside an
engine cannot be hashed alike. That is what the canary prompt of
:mod:`torchrl_llm.weight_update` is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["WeightDigest", "weights_digest"]


class WeightDigest:
    """A digest that takes weights one after the other, in any order.

    Names, dtypes, shapes and bytes count; the order and the device do not.

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

    def update(self, name: str, tensor: Tensor) -> None:
        """Count a weight in.

        Args:
            name: its dotted name.
            tensor: its values; on an accelerator it is copied to the CPU.
        """
        data = tensor.detach().to("cpu").contiguous()
        head = f"{name}|{data.dtype}|{tuple(data.shape)}|".encode()
        # Most processors have instructions for SHA-256: more than twice as fast as BLAKE2 here.
        content = hashlib.sha256(head)
        if data.numel():
            content.update(memoryview(data.flatten().view(torch.uint8).numpy()))
        part = int.from_bytes(content.digest()[:16], "big")
        # A sum does not depend on the order in which weights come.
        self._sum = (self._sum + part) % 2**128
        self._parts[name] = part
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

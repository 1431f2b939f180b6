"""What a backend is told about new weights, and what it answers.

A :class:`WeightSource` is small and picklable: it says where weights are (a file, memory that is
mapped, an object store, a collective that the receiver joins), and is opened where they are needed.
The senders are in :mod:`torchrl_llm.weight_update`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm.data.fingerprint import WeightDigest
from torchrl_llm.errors import WeightUpdateError

__all__ = ["TensorSource", "WeightReceipt", "WeightSource", "checked", "load_into"]


class WeightReceipt(NamedTuple):
    """What one receiver got.

    Attributes:
        version: number of the weights.
        digest: of the received bytes, see :class:`~torchrl_llm.data.fingerprint.WeightDigest`.
        num_tensors: how many.
        num_bytes: of all of them.
        seconds: from opening the source to the last copy.
    """

    version: int
    digest: str
    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSource(ABC):
    """Where weights are.

    Attributes:
        kind: ``full`` names every weight of the model, ``delta`` those that changed since the last
            version, ``adapter`` those of a LoRA adapter.
        digest: of what was sent; a receiver that finds another one refuses. ``None`` where the
            sender could not know it beforehand.
    """

    kind: Literal["full", "delta", "adapter"] = "full"
    digest: str | None = None

    @abstractmethod
    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Names (those of the Hugging Face model) and values, each once.

        Raises:
            WeightUpdateError: they cannot be had, or not in time.
        """


class TensorSource(WeightSource):
    """Weights in hand: for one process, or small enough to be sent with the message.

    Args:
        weights: name to tensor.
        kind: see :class:`WeightSource`.
        digest: see :class:`WeightSource`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        kind: Literal["full", "delta", "adapter"] = "full",
        digest: str | None = None,
    ) -> None:
        self._weights = dict(weights)
        self.kind, self.digest = kind, digest

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`."""
        yield from self._weights.items()


def checked(source: WeightSource, *, version: int) -> tuple[dict[str, Tensor], WeightReceipt]:
    """Everything that a source gives, compared with the digest of what was sent.

    Args:
        source: where the weights are.
        version: their number, for the receipt.

    Returns:
        The weights by name, and the receipt.

    Raises:
        WeightUpdateError: other bytes arrived than were sent.
    """
    started = time.perf_counter()
    digest, weights = WeightDigest(), {}
    for name, tensor in source.receive():
        digest.update(name, tensor)
        weights[name] = tensor
    if source.digest is not None and source.digest != digest.value:
        raise WeightUpdateError(
            f"version {version} of the weights arrived as {digest.value} ({digest.num_tensors} "
            f"tensors, {digest.num_bytes} bytes) and was sent as {source.digest}"
        )
    receipt = WeightReceipt(
        version,
        digest.value,
        digest.num_tensors,
        digest.num_bytes,
        time.perf_counter() - started,
    )
    return weights, receipt


def load_into(module: nn.Module, source: WeightSource, *, version: int) -> WeightReceipt:
    """Copy weights into a torch module in place, all or none.

    Args:
        module: has every weight that the source names; with ``kind="full"`` the source names all of
            its parameters, a tied one by any of its names.
        source: where the weights are.
        version: their number, for the receipt.

    Raises:
        WeightUpdateError: a name or shape that the module does not have, a weight that is missing,
            or other bytes than were sent.

    Example:
        >>> sampler, trained = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> receipt = load_into(sampler, TensorSource(dict(trained.state_dict())), version=3)
        >>> receipt.version, receipt.num_tensors, torch.equal(sampler.weight, trained.weight)
        (3, 2, True)
    """
    started = time.perf_counter()
    weights, receipt = checked(source, version=version)
    own = module.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            found = tuple(own[name].shape) if name in own else "no such weight"
            raise WeightUpdateError(
                f"{name!r} was sent with shape {tuple(tensor.shape)}; the sampler has {found}"
            )
    if source.kind == "full":
        given = {own[name].data_ptr() for name in weights}
        parameters = module.named_parameters()
        missing = [name for name, value in parameters if value.data_ptr() not in given]
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} weights of the sampler were not sent: {missing[:3]}"
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    return receipt._replace(seconds=time.perf_counter() - started)

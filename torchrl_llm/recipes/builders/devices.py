"""Seeds, threads, devices and precision of a configuration."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchrl_llm._settings import ensure
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ResourceError
from torchrl_llm.recipes.shared_keys import TrainedConfig

_TINY_BYTES = 2**23


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch.

    Args:
        seed: any integer.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_threads(config: TrainedConfig) -> None:
    """Set torch's number of CPU threads as configured, or with :func:`spare_threads`.

    Args:
        config: configuration with ``train.num_threads`` and ``model.name``.
    """
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    else:
        spare_threads(config.model.name)


def spare_threads(name: str | Path | None) -> None:
    """Limit torch to one CPU thread for a tiny model: a second thread mostly busy-waits.

    Args:
        name: folder or hub name; ``None`` for the model of the package. Only for this model, and
            for tiny models in a folder, is the number of threads changed.
    """
    weights = Path(name or embedded_model_path()) / "model.safetensors"
    if weights.is_file() and weights.stat().st_size < _TINY_BYTES:
        torch.set_num_threads(1)


def device_of(config: TrainedConfig) -> torch.device:
    """The configured device; with ``auto`` CUDA if available.

    Args:
        config: configuration with ``train.device``.

    Raises:
        ResourceError: this machine does not have the device.
    """
    return present_device(config.train.device, "train.device")


def device_kind(config: TrainedConfig) -> str:
    """Kind of the device, ``"cpu"`` or ``"cuda"``, whether or not this machine has it.

    Args:
        config: configuration with ``train.device``.
    """
    name = config.train.device
    return device_of(config).type if name == "auto" else torch.device(name).type


@functools.cache
def present_device(name: str, key: str) -> torch.device:
    """A device of this machine.

    Args:
        name: as ``torch.device`` takes it, or ``auto`` for CUDA if available.
        key: dotted key of the setting.

    Raises:
        ResourceError: this machine does not have the device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device fails in its own way
        raise ResourceError(
            f"{key}={name!r}: torch cannot use it here ({str(error).splitlines()[0]}); it finds "
            f"{torch.cuda.device_count()} CUDA devices; choose another, or auto"
        ) from error
    return device


def reference_device(config: TrainedConfig) -> torch.device:
    """Device of the reference: the policy's device, or the GPU after it.

    Args:
        config: configuration with ``ref_model.num_devices`` and ``train.device``.

    Raises:
        ResourceError: the reference needs its own GPU, and this machine has no further GPU.
    """
    device = device_of(config)
    if not config.ref_model.num_devices:
        return device
    ensure(
        config.train.parallel == "none",
        f"ref_model.num_devices=1 with train.parallel={config.train.parallel}: the GPU behind a "
        "rank's is that of another rank; choose 0",
    )
    index = (device.index or 0) + 1
    found = torch.cuda.device_count()
    if device.type != "cuda" or index >= found:
        raise ResourceError(
            f"ref_model.num_devices=1 needs a GPU beside the policy's, {index + 1} in all; there "
            f"are {found}, and the policy is on {device}"
        )
    return torch.device("cuda", index)


@contextmanager
def autocast(config: TrainedConfig) -> Iterator[None]:
    """Context for sampling and scoring in the configured precision.

    With ``train_model.offload_activations`` it keeps the activations for the backward on the CPU.

    Args:
        config: configuration with ``train.mixed_precision`` and ``train_model``.
    """
    device, low = device_of(config).type, samples_in_bfloat16(config)
    offloads = config.train_model.offload_activations
    kept = ActivationsOnCpu() if offloads else nullcontext()
    # Autocast would cache a copy of each weight, although the gathered weight is only needed
    # briefly.
    caches = config.train.parallel != "fsdp2" or config.train.gathers == "model"
    with kept, torch.autocast(device, torch.bfloat16, enabled=low, cache_enabled=caches):
        yield


class ActivationsOnCpu(saved_tensors_hooks):
    """Context that keeps autograd's saved tensors in CPU memory until the backward.

    Weights are not moved, and a tensor that several operations save is copied once. Gradients are
    bitwise identical.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> with ActivationsOnCpu():
        ...     loss = (weight * torch.tensor([2.0, 3.0])).sum()
        >>> loss.backward()
        >>> weight.grad.tolist()
        [2.0, 3.0]
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[StorageWeakRef, torch.dtype, int], Tensor] = {}
        super().__init__(self._to_cpu, lambda fetch: fetch())

    def _to_cpu(self, tensor: Tensor) -> Callable[[], Tensor]:
        owner = tensor._base if tensor._is_view() else tensor
        if isinstance(owner, nn.Parameter):
            return lambda: tensor
        storage = tensor.untyped_storage()
        # A weak reference does not keep the tensor in memory, and tells if its address was reused.
        key = (StorageWeakRef(storage), tensor.dtype, tensor._version)
        if key not in self.copies:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self.copies[key] = self.room(flat).copy_(flat, non_blocking=True)
        kept, device = self.copies[key], tensor.device
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return lambda: kept.to(device, non_blocking=True, copy=True).as_strided(*place)

    def room(self, like: Tensor) -> Tensor:
        """Allocate CPU memory for a copy; pinned for a GPU tensor, so that copies are asynchronous.

        Args:
            like: tensor with the size and type of the copy.
        """
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def samples_in_bfloat16(config: TrainedConfig) -> bool:
    """Whether sampling and scoring are in bfloat16, for weights of any type.

    Args:
        config: configuration with ``train.mixed_precision`` and ``train.device``.
    """
    precision = config.train.mixed_precision
    return precision == "bfloat16" or (precision == "auto" and device_kind(config) == "cuda")

"""A device that is a GPU to everyone who asks: finds mixed devices and waits without a GPU.

Its tensors say ``pretend:0`` and hold their numbers on the CPU. An operation on tensors of both
devices is an error, as on CUDA, and what would make the CPU wait for a GPU is counted: numbers that
are read, shapes that depend on numbers, copies that are not ``non_blocking``.

It takes torch's place for devices of others in the whole process, and patches torch: use it in a
process of its own.
"""

from __future__ import annotations

import traceback
from collections import Counter

import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

waits: Counter[str] = Counter()
"""What waited, and where: the three innermost places in torchrl_llm or transformers."""

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


def _wait(what: str) -> None:
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_stack()
        if "/torchrl_llm/" in frame.filename or "/transformers/" in frame.filename
    ]
    waits[f"{what} in {' < '.join(reversed(frames[-3:]))}"] += 1


def _is_here(device) -> bool:
    return device is not None and torch.device(device).type == "pretend"


class Pretended(torch.Tensor):
    """A tensor on the device; ``inner`` has its numbers."""

    @staticmethod
    def __new__(cls, inner):
        whole = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("pretend", 0),
        )
        whole.inner = inner
        return whole

    def __repr__(self):
        return f"Pretended({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _inner(x):
    return x.inner if isinstance(x, Pretended) else x


def _run(func, args, kwargs):
    name = func._schema.name.removeprefix("aten::")
    tensors = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
    ours = [x for x in tensors if isinstance(x, Pretended)]
    if name in ("_to_copy", "copy_"):
        return _copy(name, func, args, kwargs, ours)
    given = kwargs.get("device")
    if not ours and not _is_here(given):
        return func(*args, **kwargs)
    for x in tensors:
        if not isinstance(x, Pretended) and x.dim() and name not in _INDEXED:
            raise RuntimeError(f"{func} of tensors on two devices")
    indices = [x for x in args[1] if x is not None] if name in _INDEXED else []
    if any(x.dtype == torch.bool or not isinstance(x, Pretended) for x in indices):
        _wait("an index of bools or of the CPU")
    if name in _READS or (name == "repeat_interleave" and not kwargs.get("output_size")):
        _wait(name)
    plain_args, plain = tree_map(_inner, args), tree_map(_inner, kwargs)
    if _is_here(given):
        plain["device"] = "cpu"
    result = func(*plain_args, **plain)
    known = {id(x.inner): x for x in ours}

    def wrapped(x):
        return (known[id(x)] if id(x) in known else Pretended(x)) if torch.is_tensor(x) else x

    return tree_map(wrapped, result)


def _copy(name, func, args, kwargs, ours):
    if name == "copy_":
        if 0 < len(ours) < 2 and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            _wait("copy_")
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    device = kwargs.get("device")
    was, will = bool(ours), _is_here(device) if device is not None else bool(ours)
    # A copy to the CPU that does not wait has no numbers yet.
    if was != will and (was or not kwargs.get("non_blocking")):
        _wait("a copy")
    result = func(_inner(args[0]), **{k: v for k, v in kwargs.items() if k != "device"})
    return Pretended(result) if will else result


class OnDevice(TorchDispatchMode):
    """A context in which tensors can be made on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _patched(make):
    """A constructor of tensors from numbers, which are copied to the device and waited for."""

    def made(data, *args, device=None, **kwargs):
        if _is_here(device):
            _wait(make.__name__)
            return Pretended(make(data, *args, **kwargs))
        return make(data, *args, device=device, **kwargs)

    return made


def install() -> None:
    """Make the device known to torch."""
    backend_registration._setup_privateuseone_for_python_backend("pretend")
    dummy = backend_registration._DummyBackendModule
    dummy.get_amp_supported_dtype = lambda self: [torch.bfloat16]
    dummy.get_rng_state = lambda self, device=None: torch.zeros(0)
    dummy.set_rng_state = lambda self, state, device=None: None
    tensor, new_tensor, tolist = torch.tensor, torch.Tensor.new_tensor, torch.Tensor.tolist
    torch.tensor = _patched(tensor)

    def new(self, data, **kwargs):
        if not isinstance(self, Pretended):
            return new_tensor(self, data, **kwargs)
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    def listed(self):
        if not isinstance(self, Pretended):
            return tolist(self)
        _wait("tolist")
        return tolist(self.inner)

    torch.Tensor.new_tensor, torch.Tensor.tolist = new, listed
    # torch refuses to make a mask's class of one of these; the mask's numbers are not read.
    from torchrl_llm.modules.backends.attention import RowMask

    of = RowMask.of.__func__
    RowMask.of = classmethod(lambda cls, blocks, device: of(cls, blocks, torch.device("cpu")))


def move(module: nn.Module) -> nn.Module:
    """Put a module's weights and buffers onto the device; tied ones stay so."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and id(weight) not in moved:
                copy = Pretended(weight.detach().clone())
                moved[id(weight)] = nn.Parameter(copy, requires_grad=weight.requires_grad)
            part._parameters[name] = None if weight is None else moved[id(weight)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else Pretended(buffer)
    return module

"""The weight transfer of vLLM where there is no GPU: its own classes, over something else.

Its store of key and value carries what NCCL would, and tensors go as they are where CUDA would hand
out memory. All else, of both ends, is vLLM's.
"""

import os
from types import SimpleNamespace

import torch


class StoreGroup:
    """What vLLM's NCCL communicator is to its ends; broadcasts tensor by tensor.

    Attributes:
        before: called before each broadcast with the number of those that went before it.
    """

    before = None

    def __init__(self, address, port, rank, world_size, device):
        from vllm.distributed.utils import StatelessProcessGroup

        self._group = StatelessProcessGroup.create(address, port, rank, world_size)
        self._count = 0

    def broadcast(self, tensor, src, stream=None):
        if StoreGroup.before is not None:
            StoreGroup.before(self._count, tensor)
        self._count += 1
        found = self._group.broadcast(tensor, src)
        if found is not tensor:
            tensor.copy_(found)

    def destroy(self):
        self._group = None


class _Torch:
    """Torch as vLLM's ends ask it for devices."""

    cuda = SimpleNamespace(
        current_stream=lambda: None,
        is_available=lambda: False,
        get_device_properties=lambda device: SimpleNamespace(uuid="GPU-0"),
        ipc_collect=lambda: None,
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0, synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(torch, name)


def install():
    """Let this process transfer weights."""
    import weights.import_vllm  # noqa: F401
    from vllm.distributed.weight_transfer import base, ipc_engine, nccl_common, nccl_engine

    for module in (base, ipc_engine, nccl_common, nccl_engine):
        module.torch = _Torch()
    nccl_common.stateless_init_process_group = StoreGroup
    # The seventh argument is the device, which the receiver overwrites.
    ipc_engine.reduce_tensor = lambda tensor: (None, (tensor, *[None] * 5, 0))
    ipc_engine.rebuild_cuda_tensor = lambda tensor, *rest: tensor


def strike(how, after):
    """End this process, or stop it, when so many tensors of an update went out."""

    def before(count, tensor):
        if count == after:
            os.kill(os.getpid(), how)

    StoreGroup.before = staticmethod(before)

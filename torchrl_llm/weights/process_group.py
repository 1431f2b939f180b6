"""Groups of processes that exchange tensors without ``torch.distributed``'s global state.

A trainer and the processes of an engine belong to different programs, each perhaps with a world of
its own; a :class:`WeightGroup` joins them for weights alone. Gloo carries tensors on the CPU, NCCL
on CUDA. Every wait has a limit, also those that the store of ``torch.distributed`` would wait
forever (for a host that is frozen, say).

The store and the group listen on the network without authentication, as all of
``torch.distributed`` does: use them inside a cluster's own network only.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError, WorkerError

JOIN_TIMEOUT_S = 60.0
"""Seconds that the members of a group have to come together, unless the caller says otherwise."""

# NCCL's watchdog ends the whole process when it finds an operation that is late. Our own limits
# raise an error instead, long before that.
_WATCHDOG = timedelta(days=1)

T = TypeVar("T")


class CallGroup:
    """Starts calls at once, each in a thread that nobody has to wait for.

    The threads end with the process if a call never returns.

    Args:
        calls: functions without arguments.

    Example:
        >>> CallGroup([lambda: 1, lambda: 2]).results(timeout_s=5)
        [1, 2]
    """

    def __init__(self, calls: Iterable[Callable[[], Any]]) -> None:
        self._results: dict[int, Any] = {}
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index, call), daemon=True)
            for index, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, call: Callable[[], Any]) -> None:
        try:
            self._results[index] = call()
        except BaseException as error:  # raised in the thread that asks for the results
            self._errors.append(error)

    def failed(self) -> bool:
        """Whether any call raised."""
        return bool(self._errors)

    def returned(self) -> list[Any]:
        """The results that there are by now, in the order of the calls."""
        return [self._results[index] for index in sorted(self._results)]

    def raise_failure(self, *, grace_s: float = 0.0) -> None:
        """Raise the first error of a call.

        Args:
            grace_s: seconds to wait for calls that are about to fail.
        """
        deadline = time.monotonic() + grace_s
        while not self._errors and time.monotonic() < deadline:
            if not any(thread.is_alive() for thread in self._threads):
                return
            time.sleep(0.005)
        if self._errors:
            raise self._errors[0]

    def wait(self, timeout_s: float) -> int:
        """Wait until all have returned or raised.

        Args:
            timeout_s: most seconds to wait for all.

        Returns:
            How many have not.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return len(self._threads) - len(self._results) - len(self._errors)

    def results(self, timeout_s: float) -> list[Any]:
        """The results, in the order of the calls.

        Args:
            timeout_s: most seconds to wait for all.

        Raises:
            WeightUpdateError: a call did not return in time.
            Exception: the first error of a call.
        """
        late = self.wait(timeout_s)
        self.raise_failure()
        if late:
            raise WeightUpdateError(
                f"{late} of {len(self._threads)} samplers did not answer within {timeout_s:.3g} s"
            )
        return self.returned()


def bounded(call: Callable[[], T], *, timeout_s: float, what: str) -> T:
    """Run a call that may never return, and stop waiting for it at the limit.

    Args:
        call: runs in a thread of its own, which is left behind when it is late.
        timeout_s: most seconds to wait.
        what: what is waited for; begins the error message.

    Raises:
        WorkerError: it did not return in time, or the network failed it.

    Example:
        >>> bounded(lambda: 3, timeout_s=1, what="three")
        3
    """
    calls = CallGroup([call])
    if calls.wait(timeout_s):
        raise WorkerError(f"{what}: no answer within {timeout_s:.3g} s")
    try:
        calls.raise_failure()
    except RuntimeError as error:  # of the store, of the collectives, and of a peer that is gone
        raise WorkerError(f"{what}: {_first_line(error)}") from None
    return calls.returned()[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def open_store(
    address: str, port: int, *, host: bool, timeout_s: float = JOIN_TIMEOUT_S
) -> dist.TCPStore:
    """A small key-value store, hosted by one process and used by all members of a group.

    Args:
        address: of the host.
        port: of the host; it may pass 0 for a free one, which is then ``store.port``.
        host: whether this process hosts it.
        timeout_s: most seconds to wait for the host.

    Raises:
        ResourceError: the port is taken.
        WorkerError: no host answers at this address.
    """
    limit = _limit(timeout_s)
    if host:
        try:
            return dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=limit
            )
        except dist.DistNetworkError as error:
            raise ResourceError(
                f"no store can be hosted at {address}:{port}: {_first_line(error)}; name another "
                "port, or 0 for a free one"
            ) from None
    return bounded(
        lambda: dist.TCPStore(address, port, wait_for_workers=False, timeout=limit),
        timeout_s=timeout_s + 1,
        what=f"the sender of weights at {address}:{port}",
    )


class Pending:
    """A collective that runs.

    Args:
        work: of ``torch.distributed``.
        what: begins the error message.
    """

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work: dist.Work | None = work
        self._what = what

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, once.

        Raises:
            WorkerError: a member died, or was late.
        """
        # Whoever holds the work holds the group's connections open, and an error holds this frame.
        work, self._work = self._work, None
        try:
            work.wait(_limit(timeout_s))
        except RuntimeError as error:
            raise WorkerError(f"{self._what}: {_first_line(error)}") from None
        finally:
            del work


class WeightGroup:
    """The processes that share a collective; see :func:`stateless_init_process_group`.

    Args:
        group: of ``torch.distributed``, unregistered.
        store: what it met through.
        device: where its tensors live.

    Attributes:
        device: as given.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, device: torch.device) -> None:
        self._group: dist.ProcessGroup | None = group
        self._store = store
        self.device = device

    @property
    def rank(self) -> int:
        """Number of this process; 0 sends."""
        return self._joined().rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._joined().size()

    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise WorkerError("this group for weights was left")
        return self._group

    def start(self, tensor: Tensor, src: int = 0, *, timeout_s: float = JOIN_TIMEOUT_S) -> Pending:
        """Begin to broadcast; every member calls it alike.

        Args:
            tensor: contiguous, on the group's device; read at ``src``, written on the other ranks.
            src: rank that sends.
            timeout_s: most seconds that it may take.
        """
        what = f"broadcast in a group of {self.world_size}"
        try:
            work = self._joined().broadcast([tensor], _broadcast_options(src, timeout_s))
            return Pending(work, what)
        except RuntimeError as error:
            raise WorkerError(f"{what}: {_first_line(error)}") from None

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, timeout_s: float = JOIN_TIMEOUT_S
    ) -> Tensor:
        """Broadcast and wait; see :meth:`start`.

        Raises:
            WorkerError: a member died, or was late. The group is of no use any more.
        """
        self.start(tensor, src, timeout_s=timeout_s).wait(timeout_s)
        return tensor

    def close(self) -> None:
        """Leave; members that still wait for this one get an error at once."""
        group, self._group = self._group, None
        # Gloo closes its connections with the last reference, NCCL when it is told to.
        if group is not None and self.device.type == "cuda":
            group.abort()


def join_group(
    store: dist.Store,
    name: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    address: str = "127.0.0.1",
    timeout_s: float = JOIN_TIMEOUT_S,
) -> WeightGroup:
    """Come together with the other members.

    Args:
        store: the same for all.
        name: the same for all, used once.
        rank: of this process.
        world_size: number of processes.
        device: CPU for gloo, CUDA for NCCL; the same kind for all.
        address: of the store's host; one on this machine keeps gloo on the loopback device.
        timeout_s: most seconds to wait for the others.

    Raises:
        WorkerError: they did not come.
    """
    device = torch.device(device)
    prefixed = dist.PrefixStore(name, store)
    if device.type == "cuda":
        make = partial(_make_nccl, prefixed, rank, world_size, device, timeout_s)
    else:
        make = partial(_make_gloo, prefixed, rank, world_size, address, timeout_s)
    group = bounded(
        make,
        timeout_s=timeout_s + 1,
        what=f"member {rank} of {world_size} of a group for weights",
    )
    return WeightGroup(group, store, device)


def _make_gloo(
    store: dist.Store, rank: int, world_size: int, address: str, timeout_s: float
) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    if address in ("127.0.0.1", "localhost"):
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _make_nccl(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _WATCHDOG
    torch.cuda.set_device(device)
    group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    # NCCL connects at the first collective; a small one here makes a late member fail here.
    work = group.broadcast([torch.zeros(1, device=device)], _broadcast_options(0, timeout_s))
    work.wait(_limit(timeout_s))
    return group


def _broadcast_options(src: int, timeout_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src, 0
    options.timeout = _limit(timeout_s)
    return options


def _limit(timeout_s: float) -> timedelta:
    # To torch, no time at all means for ever.
    return timedelta(seconds=max(timeout_s, 0.001))


def stateless_init_process_group(
    master_address: str | None,
    master_port: int | str | None,
    rank: int,
    world_size: int,
    device: torch.device | str | int | None = None,
    *,
    timeout_s: float = JOIN_TIMEOUT_S,
) -> WeightGroup:
    """A group of its own, next to any other that the processes are in.

    Args:
        master_address: of rank 0; ``None`` for this machine.
        master_port: where rank 0 listens.
        rank: of this process; 0 hosts the store.
        world_size: number of processes.
        device: CUDA device for NCCL, by its index or name; ``"cpu"`` for gloo. By default the first
            CUDA device where there is one, else the CPU.
        timeout_s: most seconds to wait for the others.

    Returns:
        The group, with ``broadcast(tensor, src)``.

    Raises:
        ConfigError: no port, or a rank outside the world.
        ResourceError: rank 0 cannot listen there.
        WorkerError: the others did not come in time.

    Example:
        >>> group = stateless_init_process_group(None, 0, rank=0, world_size=1, device="cpu")
        >>> group.broadcast(torch.ones(2))
        tensor([1., 1.])
    """
    if master_port is None:
        raise ConfigError("master_port is needed: all members must know where rank 0 listens")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
    address = master_address or "127.0.0.1"
    deadline = time.monotonic() + timeout_s
    store = open_store(address, int(master_port), host=rank == 0, timeout_s=timeout_s)
    return join_group(
        store,
        "group",
        rank=rank,
        world_size=world_size,
        device=collective_device(device),
        address=address,
        timeout_s=max(0.001, deadline - time.monotonic()),
    )


@wraps(stateless_init_process_group, assigned=())
async def stateless_init_process_group_async(*args: Any, **kwargs: Any) -> WeightGroup:
    """:func:`stateless_init_process_group` without holding up the event loop."""
    return await asyncio.to_thread(stateless_init_process_group, *args, **kwargs)


def collective_device(device: torch.device | str | int | None = None) -> torch.device:
    """The device that a group uses.

    Args:
        device: an index means CUDA where there is any, else the CPU; ``None`` is the index 0.

    Example:
        >>> collective_device("cpu")
        device(type='cpu')
    """
    if isinstance(device, int) or device is None:
        return (
            torch.device("cuda", device or 0) if torch.cuda.is_available() else torch.device("cpu")
        )
    return torch.device(device)


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

"""Processes that train one model together: their start, communication and end.

``torchrun`` starts a script as several processes, the ranks; :func:`begin_ranks` makes a group of
them, by gloo on CPUs and by NCCL on GPUs. A rank has its own rows, and either whole weights
(``ddp``) or a part of them (``fsdp2``, :func:`shard`). A rank computes a sum over its rows divided
by counts of the rows of all ranks (:func:`sum_counts`), so that results of ranks add up like those
of micro-batches; gradients are added, never averaged.

:data:`ALONE` is a process without others; its methods do not communicate.

Next: :func:`torchrl_llm.trainers.optimize` steps all ranks together.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchrl_llm._parent import end_with_parent
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.wire import PackedRows, pack_rows
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.functional import Normalizer
from torchrl_llm.objectives.composite_loss import CompositeNormalizer

Parallel = Literal["none", "ddp", "fsdp2"]
T = TypeVar("T")
Counts = TypeVar("Counts", Normalizer, CompositeNormalizer)

# Bytes of gradients that are added up at a time.
_BUCKET_BYTES = 64 << 20
_NO_MORE = "no more batches"
# Store of the process group.
_stores: list[dist.Store] = []
# Groups that this process has left; they are kept to the end of the process.
_ended: list[dist.ProcessGroup] = []
# Seconds to wait for a store that may no longer exist.
_SHORT_WAIT_S = 10.0
# Objects that ranks use to work for each other until all of them reach a collective call: before it
# they call ``meet(world)`` with the number of ranks in the call.
between_calls: list[Any] = []
# Messages of torch if another process has ended or does not answer.
_GONE = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|tcpstore|peer",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One of several processes that train together, or the only one.

    All methods but :attr:`is_main` are collective: every rank has to call them, in the same order.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.

    Example:
        >>> alone = Ranks()
        >>> alone.is_main, alone.gather("a"), alone.from_main("b")
        (True, ['a'], 'b')
    """

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and messages for all."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for the others."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank.

        Args:
            value: any object that can be pickled, a small one; tensors must be on the CPU.
        """
        _meet(self.world)
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value: T) -> T:
        """The value of rank 0, on every rank.

        Args:
            value: any object that can be pickled; the values of other ranks are ignored.
        """
        _meet(self.world)
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is true.

        Args:
            flag: flag of this rank.
        """
        return any(self.gather(bool(flag)))

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Numbers of all ranks, added up name by name.

        Args:
            numbers: numbers of this rank; other ranks may have different names.
        """
        return _merged(self.gather(dict(numbers)), sum)

    def maxima(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The largest number of any rank, name by name.

        Args:
            numbers: numbers of this rank; other ranks may have different names.
        """
        return _merged(self.gather(dict(numbers)), max)

    def to_main(self, value: T) -> list[T] | None:
        """The values of all ranks, in their order, on rank 0; ``None`` on the others.

        Args:
            value: any object that can be pickled; the value of rank 0 is not pickled.
        """
        _meet(self.world)
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.is_main else None
        dist.gather_object(None if self.is_main else value, values, dst=0)
        return None if values is None else [value, *values[1:]]

    def rows(self, rows: LazyStackedTensorDict) -> LazyStackedTensorDict:
        """The rows of all ranks on rank 0; on other ranks, their own rows.

        Args:
            rows: 1-d stack of this rank's rows.
        """
        if self.world == 1:
            return rows
        parts = self.to_main(None if self.is_main else pack_rows(rows))
        if parts is None:
            return rows
        others = [row for part in parts[1:] for row in row_list(part.unpack())]
        return lazy_rows([*row_list(rows), *others])

    def share(self, total: int, key: str, *, what: str) -> int:
        """This rank's share of a number that counts all ranks.

        Args:
            total: the number.
            key: dotted key of its setting.
            what: name of the counted things, in the plural.

        Raises:
            ConfigError: the ranks cannot have equal shares.
        """
        self.share_at_least_one(total, key, what=what)
        if total % self.world:
            raise ConfigError(
                f"{key}={total} counts the {what} of all {self.world} ranks together, and is not a "
                f"multiple of them: choose {-(-total // self.world) * self.world}, or start "
                "a different number of processes"
            )
        return total // self.world

    def share_at_least_one(self, total: int, key: str, *, what: str) -> None:
        """Reject a number that is smaller than the number of ranks.

        Args:
            total: as for :meth:`share`.
            key: as for :meth:`share`.
            what: as for :meth:`share`.

        Raises:
            ConfigError: the number of ranks is larger.
        """
        if total < self.world:
            raise ConfigError(
                f"{key}={total} counts the {what} of all {self.world} ranks together, and is less "
                f"than their number: choose {self.world} or more, or start fewer processes"
            )


def _meet(world: int) -> None:
    for each in between_calls:
        each.meet(world)


ALONE = Ranks()
"""The only process of its run."""


def _merged(parts: Sequence[dict[str, float]], merge: Any) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part[name] for part in parts if name in part]) for name in names}


def scattered(
    batches: Iterable[LazyStackedTensorDict], ranks: Ranks
) -> Iterator[LazyStackedTensorDict | None]:
    """Spread the batches of rank 0 over the ranks: whole groups, similar numbers of tokens.

    Args:
        batches: batches of rank 0; the batches of other ranks are ignored.
        ranks: the processes, which all have to iterate.

    Yields:
        This rank's rows of a batch, ``None`` if it gets none.

    Example:
        >>> list(scattered(["whole batches"], ALONE))
        ['whole batches']
    """
    if ranks.world == 1:
        yield from batches
        return
    own = iter(batches)
    while True:
        parts: list[Any] | None = None
        if ranks.is_main:
            batch = next(own, None)
            ended = [_NO_MORE] * ranks.world
            parts = ended if batch is None else _spread(row_list(batch), ranks.world)
        received: list[Any] = [None]
        _meet(ranks.world)
        dist.scatter_object_list(received, parts, src=0)
        if received[0] == _NO_MORE:
            return
        yield None if received[0] is None else received[0].unpack()


def _spread(rows: list[TensorDict], number: int) -> list[PackedRows | None]:
    groups: dict[Any, list[TensorDict]] = {}
    for place, row in enumerate(rows):
        group = leaf(row, ("group_id",))
        groups.setdefault(("row", place) if group is None else int(group), []).append(row)
    tokens = {
        key: sum(leaf(row, ("tokens", "full")).shape[0] for row in members)
        for key, members in groups.items()
    }
    parts: list[list[TensorDict]] = [[] for _ in range(number)]
    load = [0] * number
    for key in sorted(groups, key=lambda key: -tokens[key]):
        lightest = load.index(min(load))
        parts[lightest] += groups[key]
        load[lightest] += tokens[key]
    return [pack_rows(part) if part else None for part in parts]


# -- beginning ------------------------------------------------------------------------------------


def begin_ranks(parallel: Parallel, *, device: torch.device, timeout_s: float = 1800.0) -> Ranks:
    """Join the processes that ``torchrun`` has started.

    Args:
        parallel: how they train together; ``none`` for a process without others.
        device: device of the model; on CUDA each process takes the GPU of its local rank.
        timeout_s: most seconds that a rank waits for another.

    Raises:
        ConfigError: ``parallel`` does not match the way in which the process was started.
        ResourceError: there are fewer GPUs than processes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    if parallel == "none":
        if started and world > 1:
            raise ConfigError(
                f"torchrun has started {world} processes, and with train.parallel=none each would "
                "train alone: choose train.parallel=ddp (the whole model in each process), or "
                "fsdp2 (a part of it in each)"
            )
        return ALONE
    if not started:
        raise ConfigError(
            f"train.parallel={parallel} needs processes that train together: torchrun "
            "--nproc-per-node 2 PAGE.py ..., or train.parallel=none"
        )
    if device.type == "cuda" and device.index is not None and world > 1:
        raise ConfigError(
            f"train.device={device} would be the GPU of all {world} processes: choose "
            "train.device=cuda, which is a different GPU in each"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if not dist.is_initialized():
        backend = "gloo"
        if device.type == "cuda":
            place, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if place >= found:
                raise ResourceError(
                    f"process {place} of this machine needs its own GPU, and there are only "
                    f"{found}: start fewer with --nproc-per-node, or choose train.device=cpu"
                )
            torch.cuda.set_device(place)
            backend = "cpu:gloo,cuda:nccl"
        store, rank, world = _open_store(timeout_s)
        _stores[:] = [store]
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
        # Engines and workers started from here would look for torchrun's store.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size())


def _open_store(timeout_s: float) -> tuple[dist.Store, int, int]:
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))


def check_equal(config: Mapping[str, Any], ranks: Ranks) -> None:
    """Reject ranks with different configurations.

    Args:
        config: flat, dotted key to value.
        ranks: the processes.

    Raises:
        ConfigError: names the keys, on every rank.
    """
    first, *others = ranks.gather(dict(config))
    for rank, other in enumerate(others, start=1):
        changed = [
            f"{key} ({first.get(key)!r} at rank 0, {other.get(key)!r} at rank {rank})"
            for key in sorted(first.keys() | other.keys())
            if first.get(key) != other.get(key)
        ]
        if changed:
            raise ConfigError(
                "all ranks need equal configurations, but these keys differ: " + "; ".join(changed)
            )


# -- weights --------------------------------------------------------------------------------------


def shard(scorer: nn.Module, model: nn.Module, *, device: torch.device) -> None:
    """Spread a model over the ranks by FSDP2: each block separately, all other weights together.

    Tied weights stay tied, and the choice of trained weights does not change.

    Args:
        scorer: the root whose ``forward`` computes log-probs, over the model and its value head.
        model: the Hugging Face model, in PEFT or not.
        device: device of the model.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(scorer, mesh=mesh)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that :func:`shard` spreads separately: its layers.

    Args:
        model: a Hugging Face model, in PEFT or not.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [part for part in model.modules() if type(part).__name__ in names]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, sharded like another one.

    Args:
        tensor: the same on all ranks.
        like: tensor of the same shape, sharded.
    """
    if not isinstance(like, DTensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    place = tensor.to(like.device)
    return distribute_tensor(place, like.device_mesh, like.placements, src_data_rank=None)


def add_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace the gradients of whole weights by their sums over all ranks.

    One reduction after all micro-batches: it works for any rows, any number of backward calls, and
    ranks without rows. Gradients of shards have already been added.

    Args:
        parameters: the same on all ranks.
        ranks: the processes.
    """
    trained = [p for p in parameters if not isinstance(p, DTensor)]
    used = map(any, zip(*ranks.gather([p.grad is not None for p in trained]), strict=True))
    bucket: list[Tensor] = []
    size = 0
    # A parameter without a gradient on any rank stays without one: an optimizer skips it.
    for parameter in (p for p, has_gradient in zip(trained, used, strict=True) if has_gradient):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if bucket and (size + grad.nbytes > _BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            _add(bucket)
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        _add(bucket)


def _add(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


# -- losses ---------------------------------------------------------------------------------------


def sum_counts(counts: Iterable[Counts | None]) -> Counts | None:
    """Sum the counts of several sets of rows; ``None`` if there are none.

    Args:
        counts: counts of each set; ``None`` for an empty set.

    Raises:
        ValueError: when some count prompt groups and some do not.
    """
    found = [each for each in counts if each is not None]
    return functools.reduce(lambda total, each: total.plus(each), found) if found else None


# -- ending ---------------------------------------------------------------------------------------


def end_ranks() -> None:
    """Leave the process group when all ranks have ended.

    A different group in this process, such as the group of a vLLM engine, stays.
    """
    if _stores and dist.is_initialized():
        leave_group()
        _stores.clear()


def leave_group() -> None:
    """Leave the default group together with all its members; it stays in memory.

    If a DDP model held the last reference to it, freeing the model would wait for the group's
    threads without releasing the GIL, which those threads may need.
    """
    _meet(dist.get_world_size())
    between_calls.clear()
    _ended.append(dist.group.WORLD)
    dist.barrier()
    if (engine := sys.modules.get("vllm.distributed.parallel_state")) is not None:
        # Groups of an engine among the ranks are part of this group; the engine would look for them
        # at its end.
        engine.destroy_model_parallel()
        engine.destroy_distributed_environment()
    if dist.is_initialized():
        dist.destroy_process_group()


def last_words(error: Exception) -> str | None:
    """Final message of a rank that ends with an error; each error is reported once, by its rank.

    If a rank ends, the next collective calls of the others fail. The others do not report this; but
    rank 0 repeats the message in its log.

    Args:
        error: the error that ends this rank.

    Returns:
        The text; ``None`` if another rank reports it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all; print this first
    rank = int(os.environ.get("RANK", "0"))
    text = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(dist.DistError, RuntimeError, ValueError):
        store = _stores[0] if _stores else _open_store(_SHORT_WAIT_S)[0]
        if speaks_of_others(error):
            if store.check(["ended"]):
                return f"ended with {store.get('ended').decode()}" if rank == 0 else None
            text = (
                "another process has ended without a word (killed, or out of memory?), or did not "
                f"answer within train.timeout_s; what rank {rank} saw of it: "
                f"{str(error).splitlines()[0]}"
            )
            return text if store.compare_set("unsaid", "", text) == text.encode() else None
        store.compare_set("ended", "", text)
        said = f"said {type(error).__name__}: {error}"
        return text if store.compare_set(said, "", text) == text.encode() else None
    return text if rank == 0 or not speaks_of_others(error) else None


def speaks_of_others(error: BaseException | None) -> bool:
    """Whether an error means that another rank has ended or does not answer.

    Args:
        error: an error of a collective call, or any other error.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if type(error) is RuntimeError and _GONE.search(str(error)):
            return True
        error = error.__cause__
    return False

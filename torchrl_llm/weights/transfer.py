"""Weights from GPU to GPU with vLLM's weight transfer (NCCL, CUDA IPC), plus verification.

vLLM provides both ends. vLLM's trainer end calls a client of this module, which announces the
update to backends with the usual call ``update_weights``. vLLM's worker end normally loads weights
piece by piece into a model. In this module it loads them into a buffer (:class:`TransferSource`),
so that an engine takes a version only if it is complete and has the sender's digest.

Every update opens a new connection, so a restarted receiver takes part in the next update.
:mod:`torchrl_llm.weights.weight_source` loads the received weights. This module is not yet tested
on a GPU: the tests use vLLM's classes with replacements for NCCL and CUDA.
"""

from __future__ import annotations

import copyreg
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm._checked import Gt, checked
from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.engine_updaters import EngineWeights
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_names import Weights, engine_weights
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt, WeightSource

Kind = Literal["nccl", "ipc"]
Tell = Callable[[WeightSource], list[WeightReceipt]]
Told = Callable[[], list[WeightReceipt]]

_POLL_S = 0.005
_MODULE = "vllm.distributed.weight_transfer"


class _Call(threading.Thread):
    """A call with a timeout: NCCL may never return if a process has died."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="weights")
        self._call, self._value, self._error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # raised in the thread that waits for the result
            self._error = error

    @property
    def ended(self) -> bool:
        return not self.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def result(self, timeout_s: float, what: str) -> Any:
        self.join(timeout_s)
        if not self.ended:
            raise WeightUpdateError(f"{what} did not come to its end in time")
        if isinstance(self._error, TorchRLLLMError):
            raise self._error
        if self._error is not None:
            # Errors of the store, of NCCL and of vLLM, which have no common class.
            told = str(self._error).partition("\n")[0][:300]
            raise WeightUpdateError(f"{what} failed: {told}") from self._error
        return self._value


def free_port() -> int:
    """Return a currently unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _store(address: str, port: int, timeout_s: float, *, host: bool = False) -> dist.TCPStore:
    limit = timedelta(seconds=max(timeout_s, 0.001))
    return dist.TCPStore(address, port, is_master=host, wait_for_workers=False, timeout=limit)


class TransferSource(WeightSource):
    """Source of the weights of one push through vLLM's transfer; valid during that push.

    Args:
        kind: vLLM's name of the transfer.
        timeout_s: most seconds from opening to the last byte.

    Attributes:
        meeting: address and port of the sender's store, where receivers of NCCL meet; ``None`` if
            not needed.
        update: message of the sender to vLLM's worker end, if ``meeting`` is ``None``.
    """

    reusable = False

    def __init__(self, kind: Kind, timeout_s: float) -> None:
        self._transfer, self._timeout_s = kind, timeout_s
        self.meeting: tuple[str, int] | None = None
        self.update: Mapping[str, Any] = {}
        self._afterwards: TensorSource | None = None

    def end(self, copy: TensorSource) -> None:
        """End the push: later receivers of this source get a copy instead.

        Args:
            copy: the same weights on the CPU.
        """
        self._afterwards = copy

    def __reduce__(self) -> Any:
        if self._afterwards is None:
            return copyreg.__newobj__, (TransferSource,), vars(self)
        return _itself, (self._afterwards,)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`; nothing is delivered before everything has arrived."""
        yield from _Call(self._receive).result(self._timeout_s, _what(self._transfer))

    def _receive(self) -> list[tuple[str, Tensor]]:
        arrived: list[tuple[str, Tensor]] = []
        engine = _worker_end(self._transfer, SimpleNamespace(load_weights=arrived.extend))
        if self.meeting is None:
            engine.init_transfer_engine(engine.parse_init_info({}))
            engine.update_weights(self.update)
        else:
            store = _store(*self.meeting, self._timeout_s)
            rank = store.add("receivers", 1)
            # The rendezvous cannot be interrupted, so no receiver starts it before all have
            # arrived.
            init = {**_said(store, "init"), "rank_offset": rank}
            engine.init_transfer_engine(engine.parse_init_info(init))
            engine.update_weights(_said(store, "update"))
        engine.shutdown()
        return arrived


def _said(store: dist.Store, key: str) -> dict[str, Any]:
    said = json.loads(store.get(key))
    if said is None:
        raise WeightUpdateError("the sender gave the update up")
    return said


def _itself(source: WeightSource) -> WeightSource:
    return source


def _worker_end(kind: Kind, model: Any) -> Any:
    """Return vLLM's receiving end, as a single worker whose model stores the weights."""
    vllm = require(_MODULE, extra="vllm", feature=f"weights by {kind}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # a new thread starts with the first device
    alone = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=alone, model_config=None)
    return vllm.WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend=kind), config, device, model
    )


class _Named:
    """Weights in the form that vLLM's trainer end expects."""

    def __init__(self, weights: Mapping[str, Tensor], meta: type) -> None:
        self._weights, self._meta = weights, meta

    def metadata(self) -> list[Any]:
        return [
            self._meta(n, value.dtype, tuple(value.shape)) for n, value in self._weights.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()


class _Client:
    """The client that vLLM's trainer end calls during an update, for IPC."""

    def __init__(self, update: Callable[[dict[str, Any]], None]) -> None:
        self.update_weights = update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: receivers start when they open their source."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: receivers have loaded when they answer."""


class _NCCLClient(_Client):
    """The client for NCCL, whose receivers wait at a store for each step."""

    def __init__(self, store: dist.Store, wait: Callable[[], None]) -> None:
        self._store, self._wait = store, wait

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._store.set("init", json.dumps(init_info))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._store.set("update", json.dumps(update_info))
        self._wait()


class VLLMTransfer:
    """The trainer's end of vLLM's weight transfer.

    Args:
        kind: ``"nccl"`` for receivers on other GPUs, ``"ipc"`` for other processes on the trainer's
            GPU.
        address: address of this machine for receivers.
        timeout_s: most seconds of an update, including the rendezvous.
        packed: send a few large buffers with NCCL instead of single tensors.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: an unknown kind, or a timeout that is not positive.
    """

    @checked
    def __init__(
        self,
        kind: Kind,
        *,
        address: str = "127.0.0.1",
        timeout_s: Annotated[float, Gt(0)] = 120.0,
        packed: bool = True,
    ) -> None:
        require(_MODULE, extra="vllm", feature=f"weights by {kind}")
        self.kind, self.timeout_s = kind, timeout_s
        self._address, self._packed = address, packed

    def send(
        self, weights: Mapping[str, Tensor], tell: Tell, *, num_receivers: int, **about: Any
    ) -> list[WeightReceipt]:
        """Send weights to all receivers at once.

        Args:
            weights: name to tensor, on the GPU.
            tell: function that sends a source to every receiver and returns their receipts after
                all have loaded.
            num_receivers: number of receivers.
            **about: attributes of the source, such as ``counter`` and ``canary``.

        Returns:
            The receivers' receipts.

        Raises:
            WeightUpdateError: the weights did not arrive in time, or arrived changed.
            Exception: an exception of ``tell``.
        """
        if num_receivers < 1:
            raise ConfigError("there is no receiver to send weights to")
        copies = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        copy = TensorSource(copies)
        about.setdefault("hashed", True)
        about["digest"] = weights_digest(copies) if about["hashed"] else None
        source = TransferSource(self.kind, self.timeout_s)
        for one in (copy, source):
            vars(one).update(about)
        send = self._by_ipc if self.kind == "ipc" else self._by_nccl
        receipts = send(weights, source, partial(tell, source), num_receivers)
        source.end(copy)
        return receipts

    def _by_ipc(
        self, weights: Mapping[str, Tensor], source: TransferSource, tell: Told, num_receivers: int
    ) -> list[WeightReceipt]:
        receipts: list[WeightReceipt] = []

        def update(said: dict[str, Any]) -> None:
            source.update = said
            receipts.extend(tell())

        vllm = require(f"{_MODULE}.ipc_engine", extra="vllm", feature="weights by ipc")
        call = _Call(partial(_send, vllm.IPCTrainerInitInfo(rank=0), weights, _Client(update)))
        call.result(self.timeout_s, _what(self.kind))
        return receipts

    def _by_nccl(
        self, weights: Mapping[str, Tensor], source: TransferSource, tell: Told, num_receivers: int
    ) -> list[WeightReceipt]:
        vllm = require(f"{_MODULE}.nccl_engine", extra="vllm", feature="weights by nccl")
        end = time.monotonic() + self.timeout_s
        store = _store(self._address, 0, self.timeout_s, host=True)
        source.meeting = self._address, store.port
        telling = _Call(tell)
        try:
            while (there := store.add("receivers", 0)) < num_receivers:
                if telling.ended or time.monotonic() > end:
                    raise WeightUpdateError(
                        f"{there} of {num_receivers} receivers came for the weights within "
                        f"{self.timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            info = vllm.NCCLTrainerInitInfo(
                rank=0,
                master_address=self._address,
                master_port=free_port(),
                world_size=num_receivers + 1,
                packed=self._packed,
            )
            client = _NCCLClient(store, lambda: telling.result(self.timeout_s, _what(self.kind)))
            sending = _Call(partial(_send, info, weights, client))
            while not (sending.ended or telling.failed or time.monotonic() > end):
                time.sleep(_POLL_S)
            sending.result(0, _what(self.kind))
        except TorchRLLLMError:
            # An error of a receiver is more informative than the timeout that it causes.
            refused = telling.failed
            for step in ("init", "update"):
                store.compare_set(step, "", "null")  # do not let receivers wait for long
            if refused:
                telling.result(0, _what(self.kind))
            raise
        return telling.result(0, _what(self.kind))


def _what(kind: Kind) -> str:
    return f"the transfer of weights by {kind}"


def _send(info: Any, weights: Mapping[str, Tensor], client: _Client) -> None:
    """Run one complete update with vLLM's trainer end."""
    vllm = require(_MODULE, extra="vllm", feature=_what(info.backend))
    device = next(iter(weights.values())).device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread begins with the first one
    given = _Named(weights, vllm.ParamMeta)
    engine = vllm.WeightTransferTrainerFactory.trainer_init(info, client=client, source=given)
    engine.send_weights()
    engine.shutdown()


class TransferWeights(EngineWeights):
    """Sends weights to engines in other processes with vLLM's weight transfer.

    If the trainer dies, its engines keep their weights. If an engine dies, the push raises an error
    within ``timeout_s``, and the next push goes to the remaining engines.

    Args:
        *backends: see :class:`~torchrl_llm.weights.EngineWeights`.
        kind: see :class:`VLLMTransfer`, also for the next three arguments.
        address: see there.
        timeout_s: see there.
        packed: see there.
        **options: see :class:`~torchrl_llm.weights.EngineWeights`.

    Example:
        >>> updater = TransferWeights(pool, kind="nccl", address="10.0.0.1")  # doctest: +SKIP
        >>> updater.push_weights(model)  # doctest: +SKIP
    """

    def __init__(
        self,
        *backends: Backend,
        kind: Kind = "nccl",
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        packed: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*backends, **options)
        self._transfer = VLLMTransfer(kind, address=address, timeout_s=timeout_s, packed=packed)

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        backends = self.backends

        def tell(source: WeightSource) -> list[WeightReceipt]:
            calls = [_Call(partial(b.update_weights, source, version=version)) for b in backends]
            for call in calls:
                call.join()
                if not call.failed:
                    receipts.extend(call.result(0, "an update of weights"))
            for call in calls:
                call.result(0, "an update of weights")
            return receipts

        self._transfer.send(
            engine_weights(weights, dtype=self._dtype),
            tell,
            num_receivers=sum(backend.num_copies for backend in backends),
            hashed=self._fingerprint,
            counter=self._name,
        )

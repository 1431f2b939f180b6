"""Weights to other processes by collective broadcast: gloo on the CPU, NCCL on CUDA.

The sender hosts a small store (:func:`~torchrl_llm.weights.process_group.open_store`). For each
update it writes an announcement, the members of the update's group join, the buffers of
:mod:`torchrl_llm.weights.broadcast_source` go out, and at the end the digest of all that was sent.
A receiver opens a :class:`BroadcastSource` for it, whoever handed it the source: a call from the
sender (:meth:`BroadcastSender.push`) or the announcement itself
(:class:`~torchrl_llm.weights.broadcast_source.BroadcastReceiver`).

A group is kept from update to update. When one of its members fails, it is given up by all, and the
next update makes a new one; whoever is alive then may join. Nothing waits longer than
``timeout_s``, on either side.

Written for both, run on gloo: no CUDA device was at hand when this was made.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.broadcast_source import (
    GO,
    Announcement,
    BroadcastSource,
    Deadline,
    Kind,
    flatten,
    metadata_to_json,
    plan_buckets,
    split,
)
from torchrl_llm.weights.fingerprint import WeightDigest
from torchrl_llm.weights.process_group import (
    CallGroup,
    WeightGroup,
    collective_device,
    join_group,
    open_store,
)
from torchrl_llm.weights.weight_source import WeightReceipt

_POLL_S = 0.002
_KEPT = 8  # announcements that stay in the store, for receivers that are late with an answer


class BroadcastSender:
    """The trainer's end.

    Args:
        address: of this machine, as receivers reach it.
        port: where the store listens; 0 for a free port.
        device: ``"cpu"`` for gloo, a CUDA device or its index for NCCL; by default the first CUDA
            device where there is one.
        timeout_s: most seconds that an update may take, the coming together included.
        bucket_bytes: most bytes a buffer.

    Attributes:
        address: as given.
        timeout_s: as given.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        device: torch.device | str | int | None = None,
        timeout_s: float = 120.0,
        bucket_bytes: int = 256 << 20,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
        plan_buckets({}, bucket_bytes)
        self.address, self.timeout_s = address, timeout_s
        self._port, self._device = port, collective_device(device)
        self._bucket_bytes = bucket_bytes
        self._name = uuid.uuid4().hex[:12]
        self._store: dist.TCPStore | None = None
        self._group: WeightGroup | None = None
        self._group_name, self._group_size, self._hellos = "", 0, 0
        self._sequence = 0

    @property
    def port(self) -> int:
        """Where the store listens; it is opened by the first question."""
        return self._open().port

    def _open(self) -> dist.TCPStore:
        if self._store is None:
            self._store = open_store(self.address, self._port, host=True, timeout_s=self.timeout_s)
            self._store.set("sender", self._name)
        return self._store

    # -- one update, two ways to tell the receivers ---------------------------------------------

    def push(
        self,
        weights: Mapping[str, Tensor],
        backends: Sequence[Backend],
        *,
        version: int,
        kind: Kind = "full",
        bucket_tensors: int = 0,
        arrived: list[WeightReceipt] | None = None,
    ) -> list[WeightReceipt]:
        """Broadcast, and have remote backends take part by a call of ``update_weights``.

        Args:
            weights: name to tensor.
            backends: each opens the source once for each of its ``num_copies``.
            version: number of these weights.
            kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
            bucket_tensors: most tensors a buffer; 0 for as many as fit.
            arrived: gets the receipts too, also those before an error.

        Returns:
            The receivers' receipts.

        Raises:
            WeightUpdateError: a receiver did not get them, or others than were sent.
        """

        def attempt(deadline: Deadline) -> list[WeightReceipt]:
            # Asked again for a second attempt: a pool has lost or rebuilt replicas by then.
            size = sum(backend.num_copies for backend in backends)
            update = self._announce(weights, version, kind, size, bucket_tensors)
            source = BroadcastSource(
                self.address, self.port, self._name, update, timeout_s=deadline.left_s
            )
            calls = CallGroup(
                lambda backend=backend: backend.update_weights(source, version=version)
                for backend in backends
            )
            try:
                digest = self._send(weights, update, deadline, calls.failed)
                receipts = [r for part in calls.results(deadline.left_s + 1) for r in part]
            except WorkerError as error:
                # Why a receiver went away says more than that it did.
                calls.raise_failure(grace_s=1.0)
                raise WeightUpdateError(str(error)) from None
            finally:
                if calls.failed():
                    # The others find the group closed, and must be back before they are called
                    # again.
                    self._give_up_group()
                    calls.wait(deadline.left_s)
                if arrived is not None:
                    arrived[:] = [receipt for part in calls.returned() for receipt in part]
            return _confirmed(receipts, digest, size)

        return self._attempts(attempt)

    def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        version: int,
        num_receivers: int,
        kind: Kind = "full",
    ) -> list[WeightReceipt]:
        """Broadcast to receivers that listen for it.

        Args:
            weights: name to tensor.
            version: number of these weights.
            num_receivers: how many must take part.
            kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.

        Returns:
            The receivers' receipts.

        Raises:
            WeightUpdateError: a receiver did not get them, or others than were sent.
        """

        def attempt(deadline: Deadline) -> list[WeightReceipt]:
            update = self._announce(weights, version, kind, num_receivers)
            try:
                digest = self._send(weights, update, deadline, lambda: self._refused(update))
                receipts = self._answers(update, deadline)
            except WorkerError as error:
                raise WeightUpdateError(str(error)) from None
            finally:
                self._open().set(f"done/{update.sequence}", "")
            return _confirmed(receipts, digest, num_receivers)

        return self._attempts(attempt)

    def _attempts(self, attempt: Callable[[Deadline], list[WeightReceipt]]) -> list[WeightReceipt]:
        deadline = Deadline(self.timeout_s)
        kept = self._group is not None
        try:
            return attempt(deadline)
        except TorchRLLLMError:
            self._give_up_group()
            if not kept or deadline.left_s == 0:
                raise
        # The group was an old one, whose members may have changed since: once more with a new one.
        try:
            return attempt(deadline)
        except TorchRLLLMError:
            self._give_up_group()
            raise

    def close(self) -> None:
        """Leave the group and close the store; receivers may wait for another sender."""
        self._give_up_group()
        self._store = None

    # -- the steps of an update -----------------------------------------------------------------

    def _announce(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        kind: Kind,
        size: int,
        bucket_tensors: int = 0,
    ) -> Announcement:
        if size < 1:
            raise ConfigError("there is no receiver to broadcast to")
        store = self._open()
        self._sequence += 1
        newcomers = store.add("hello", 0) != self._hellos
        if self._group is None or newcomers or self._group_size != size:
            self._give_up_group()
            self._group_name, self._group_size = f"{self._name}/{self._sequence}", size
        text, layout = metadata_to_json({n: (w.dtype, w.shape) for n, w in weights.items()})
        if not store.check([f"layout/{layout}"]):
            store.set(f"layout/{layout}", text)
        update = Announcement(
            self._sequence,
            version,
            kind,
            self._group_name,
            size,
            layout,
            self._bucket_bytes,
            bucket_tensors,
            self._device.type,
        )
        for name in ("update", "digest", "done", "answers", "numbers", "refusals"):
            store.delete_key(f"{name}/{self._sequence - _KEPT}")
        store.set(f"update/{update.sequence}", json.dumps(update))
        store.set("sequence", str(update.sequence))
        return update

    def _send(
        self,
        weights: Mapping[str, Tensor],
        update: Announcement,
        deadline: Deadline,
        failed: Callable[[], bool],
    ) -> str:
        try:
            digest = self._send_buckets(weights, update, deadline, failed)
        except WorkerError:
            # Those who have all of it wait for the digest, which says that it was whole.
            self._open().set(f"digest/{update.sequence}", "")
            raise
        self._open().set(f"digest/{update.sequence}", digest)
        return digest

    def _send_buckets(
        self,
        weights: Mapping[str, Tensor],
        update: Announcement,
        deadline: Deadline,
        failed: Callable[[], bool],
    ) -> str:
        if self._group is None:
            self._group = self._form(update, deadline, failed)
        digest = WeightDigest()
        metadata = {name: (w.dtype, w.shape) for name, w in weights.items()}
        for bucket in plan_buckets(metadata, update.bucket_bytes, update.bucket_tensors):
            buffer = flatten(bucket, weights, self._device)
            pending = self._group.start(buffer, timeout_s=deadline.left_s)
            # While the bytes travel, the same bytes are counted.
            for name, value in split(bucket, buffer):
                digest.update(name, value)
            pending.wait(deadline.left_s)
        return digest.value

    def _form(
        self, update: Announcement, deadline: Deadline, failed: Callable[[], bool]
    ) -> WeightGroup:
        store = self._open()
        while (members := store.add(f"members/{update.group}", 0)) < update.num_receivers:
            if failed() or deadline.left_s == 0:
                store.set(f"go/{update.group}", "no")
                raise WorkerError(
                    f"{members} of {update.num_receivers} receivers joined the broadcast of version"
                    f" {update.version} within {deadline.timeout_s - deadline.left_s:.3g} s"
                )
            time.sleep(_POLL_S)
        store.set(f"go/{update.group}", GO)
        group = join_group(
            store,
            update.group,
            rank=0,
            world_size=update.num_receivers + 1,
            device=self._device,
            address=self.address,
            timeout_s=deadline.left_s,
        )
        self._hellos = store.add("hello", 0)
        return group

    def _give_up_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    # -- answers of receivers that listen -------------------------------------------------------

    def _refused(self, update: Announcement) -> bool:
        return self._open().add(f"refusals/{update.sequence}", 0) > 0

    def _answers(self, update: Announcement, deadline: Deadline) -> list[WeightReceipt]:
        store, answers = self._open(), f"answers/{update.sequence}"
        while (count := store.add(answers, 0)) < update.num_receivers:
            if self._refused(update) and count:
                break
            if deadline.left_s == 0:
                raise WorkerError(
                    f"{count} of {update.num_receivers} receivers said that they loaded version "
                    f"{update.version} within {deadline.timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        keys = [f"{answers}/{number}" for number in range(1, update.num_receivers + 1)]
        read = [json.loads(store.get(key)) for key in keys if store.check([key])]
        for answer in read:
            if "error" in answer:
                raise WeightUpdateError(f"a receiver refused: {answer['error']}")
        return [WeightReceipt(*values) for answer in read for values in answer["receipts"]]


def _confirmed(receipts: list[WeightReceipt], digest: str, size: int) -> list[WeightReceipt]:
    """The receipts, when they tell of the bytes that were sent.

    Raises:
        WeightUpdateError: they do not, or some are missing.
    """
    others = sorted({receipt.digest for receipt in receipts} - {digest})
    if others or len(receipts) < size:
        raise WeightUpdateError(
            f"weights with the digest {digest} went to {size} receivers; {len(receipts)} answered"
            + (f", with {others}" if others else "")
        )
    return receipts

"""The end of a broadcast in a process that nobody can call: it watches the sender's store."""

from __future__ import annotations

import functools
import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrl_llm.errors import TorchRLLLMError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.broadcast_source import Announcement, BroadcastSource
from torchrl_llm.weights.process_group import bounded, open_store
from torchrl_llm.weights.weight_receiver import WeightReceiver

_WAIT_S = 1.0
_RECONNECT_S = 0.2


class BroadcastReceiver(WeightReceiver):
    """Takes part in the broadcasts of whatever sender is at an address.

    When the sender dies, the weights and their version stay, and the backend serves on; a new
    sender at the address is found by the next :meth:`poll_and_apply`.

    Args:
        backend: gets the weights.
        address: of the sender's store.
        port: of the sender's store.
        timeout_s: most seconds that one update may take.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        address: str = "127.0.0.1",
        port: int,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(backend)
        self._address, self._port, self._timeout_s = address, port, timeout_s
        self._store: dist.Store | None = None
        self._sender = ""
        self._next = 1

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """See :meth:`WeightReceiver.poll_and_apply`."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                update = self._find_update(left)
            except WorkerError:
                # No sender, or one that is dying: there may be another before the time is up.
                self._store, update = None, None
                time.sleep(min(_RECONNECT_S, left))
            if update is not None:
                self._take(update)
                return True
            if time.monotonic() >= deadline:
                return False

    def _find_update(self, timeout_s: float) -> Announcement | None:
        wait_s = min(timeout_s, _WAIT_S)
        if self._store is None:
            self._connect(max(wait_s, 1.0))
        look = functools.partial(_look, self._store, self._next, wait_s)
        self._next, text = bounded(look, timeout_s=wait_s + 5, what="the sender's store")
        if text is None:
            return None
        self._next += 1
        return Announcement(*json.loads(text))

    def _connect(self, limit: float) -> None:
        store = open_store(self._address, self._port, host=False, timeout_s=limit)
        sender = bounded(lambda: store.get("sender").decode(), timeout_s=limit, what="the sender")
        if sender != self._sender:
            # Of a sender that is new to us the last update counts, if it still waits for somebody.
            self._next = bounded(lambda: _first_open(store), timeout_s=limit, what="the sender")
        self._store, self._sender = store, sender

    def _take(self, update: Announcement) -> None:
        source = BroadcastSource(
            self._address, self._port, self._sender, update, timeout_s=self._timeout_s
        )
        try:
            receipts = self.apply_weights(source, version=update.version)
        except TorchRLLLMError as error:
            self._answer(update, {"error": str(error)})
            raise
        self._answer(update, {"receipts": receipts})

    def _answer(self, update: Announcement, answer: dict[str, Any]) -> None:
        store = self._store

        def send() -> None:
            if "error" in answer:
                store.add(f"refusals/{update.sequence}", 1)
            # The answer first, then the count: whoever counts may read.
            number = store.add(f"numbers/{update.sequence}", 1)
            store.set(f"answers/{update.sequence}/{number}", json.dumps(answer))
            store.add(f"answers/{update.sequence}", 1)

        try:
            bounded(send, timeout_s=self._timeout_s, what="the sender's store")
        except WorkerError:
            # The sender is gone; what was loaded stays loaded.
            self._store = None


def _first_open(store: dist.Store) -> int:
    """The update that is under way, or the next one."""
    if not store.check(["sequence"]):
        return 1
    last = int(store.get("sequence"))
    return last + 1 if store.check([f"done/{last}"]) else last


def _look(store: dist.Store, wanted: int, wait_s: float) -> tuple[int, str | None]:
    """The number to look for, and its announcement when there is one."""
    # Updates that went by without this receiver are gone.
    wanted = max(wanted, _first_open(store))
    key = f"update/{wanted}"
    try:
        store.wait([key], timedelta(seconds=max(wait_s, 0.001)))
    except dist.DistStoreError:  # nothing came in this time
        return wanted, None
    return wanted, store.get(key).decode()

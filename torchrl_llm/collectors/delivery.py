"""Batches into queues, of this process or another."""

from __future__ import annotations

import queue as queues
import threading
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.wire import pack_rows

__all__ = ["put_batch"]

_POLL_S = 0.05


def put_batch(queue: Any, batch: TensorDictBase, stopping: threading.Event | None = None) -> None:
    """Put a batch into a queue, waiting while it is full.

    Args:
        queue: has ``put(item, timeout=...)``. A queue of the standard library's :mod:`queue` gets
            the batch, any other one its wire form: tensor by tensor, a batch would take hundreds of
            file descriptors to another process.
        batch: the batch.
        stopping: gives the batch up when it is set, for a full queue that nobody empties must not
            keep a thread from ending.
    """
    in_process = isinstance(queue, (queues.Queue, queues.SimpleQueue))
    item = batch if in_process else pack_rows(split_rollout(batch))
    while stopping is None or not stopping.is_set():
        try:
            queue.put(item, timeout=_POLL_S)
            return
        except queues.Full:
            continue

"""Queue that runs the requests of several threads together.

The queue has no thread. The caller that finds enough items, or a request that has waited long
enough, runs the batch for all. A failing batch is repeated request by request, so that an error
reaches only the caller of the failing request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import BackendError, ConfigError

_SETTINGS = ("min_batch_size", "max_batch_size", "timeout_s")
Run = Callable[[list[Any], Any], list[Any]]


@dataclass(eq=False)
class _Request:
    items: list[Any]
    key: Any
    run: Run
    arrived: float = field(default_factory=time.monotonic)
    answer: Future[list[Any]] = field(default_factory=Future)


class RequestBatcher:
    """Collects items from several callers and runs those with equal keys in one call.

    Args:
        min_batch_size: items to wait for.
        max_batch_size: most items of one call; a single larger request still runs, alone.
        timeout_s: seconds that a request waits for others; then it runs with the requests that have
            arrived.

    Raises:
        ConfigError: for sizes that contradict each other.

    Example:
        >>> batcher = RequestBatcher(min_batch_size=1)
        >>> batcher.submit([1, 2], key="double", run=lambda items, key: [2 * x for x in items])
        [2, 4]
    """

    @checked
    def __init__(
        self,
        *,
        min_batch_size: Annotated[int, Ge(1)] = 1,
        max_batch_size: int | None = None,
        timeout_s: Annotated[float, Ge(0)] = 10.0,
    ) -> None:
        if max_batch_size is not None and max_batch_size < min_batch_size:
            raise ConfigError(
                f"max_batch_size={max_batch_size} is below min_batch_size={min_batch_size}"
            )
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: list[_Request] = []
        self._running = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Requests belong to the threads of the process that made them.
        self.__init__(**state)

    def submit(self, items: Sequence[Any], *, key: Any, run: Run) -> list[Any]:
        """Run the items, alone or together with others, and wait for the results.

        Args:
            items: the request.
            key: requests with equal keys may run together.
            run: function from the items of one or more requests and their key to a result per item.

        Returns:
            The results of these items, in order.

        Raises:
            Exception: an exception of ``run`` for these items.
        """
        request = _Request(list(items), key, run)
        with self._changed:
            self._queue.append(request)
            self._changed.notify_all()
        while not request.answer.done():
            batch = self._next_batch(request)
            if batch:
                self._execute(batch)
        return request.answer.result()

    def _next_batch(self, own: _Request) -> list[_Request]:
        """Wait for a due batch; return none if another thread ran the own request."""
        with self._changed:
            while not own.answer.done():
                batch = [] if self._running else self._due()
                if batch:
                    self._queue = [request for request in self._queue if request not in batch]
                    self._running = sum(len(request.items) for request in batch)
                    return batch
                self._changed.wait(self._wait_s())
            return []

    def _wait_s(self) -> float | None:
        if self._running or not self._queue:
            return None
        oldest = min(request.arrived for request in self._queue)
        return max(0.0, oldest + self.timeout_s - time.monotonic())

    def _due(self) -> list[_Request]:
        now = time.monotonic()
        for first in self._queue:
            group = [request for request in self._queue if request.key == first.key]
            size = sum(len(request.items) for request in group)
            if size >= self.min_batch_size or now >= first.arrived + self.timeout_s:
                return self._fitting(group)
        return []

    def _fitting(self, group: list[_Request]) -> list[_Request]:
        if self.max_batch_size is None:
            return group
        taken, size = [], 0
        for request in group:
            size += len(request.items)
            if taken and size > self.max_batch_size:
                break
            taken.append(request)
        return taken

    def _execute(self, batch: list[_Request]) -> None:
        try:
            self._run_together(batch)
        except BaseException as error:  # after an interrupt, no caller may wait forever
            stopped = BackendError(f"the thread that ran the batch stopped: {error!r}")
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(stopped)
            raise
        finally:
            with self._changed:
                self._running = 0
                self._changed.notify_all()

    @staticmethod
    def _run_together(batch: list[_Request]) -> None:
        try:
            items = [item for request in batch for item in request.items]
            results = iter(batch[0].run(items, batch[0].key))
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for request in batch:
                RequestBatcher._run_together([request])
            return
        for request in batch:
            request.answer.set_result(list(islice(results, len(request.items))))

    def cleanup(self, *, flush: bool = False) -> None:
        """Empty the queue; a running batch is not affected.

        Args:
            flush: run the queued requests; otherwise their callers get a
                :class:`~torchrl_llm.errors.BackendError`.
        """
        with self._changed:
            queued, self._queue = self._queue, []
            if not flush:
                taken = BackendError("the request was taken back by cleanup_batching()")
                for request in queued:
                    request.answer.set_exception(taken)
                self._changed.notify_all()
                return
        while queued:
            together = [request for request in queued if request.key == queued[0].key]
            queued = [request for request in queued if request not in together]
            with self._changed:
                while self._running:
                    self._changed.wait()
                self._running = sum(len(request.items) for request in together)
            self._execute(together)

    def state(self) -> dict[str, Any]:
        """Return the settings, and the numbers of queued and running requests."""
        with self._changed:
            return {
                **self.__getstate__(),
                "queued_requests": len(self._queue),
                "queued_items": sum(len(request.items) for request in self._queue),
                "running_items": self._running,
            }


def make_batcher(
    batching: bool | None, minimum: int | None, maximum: int | None, timeout_s: float
) -> RequestBatcher | None:
    """Return the batcher for a policy's arguments; ``None`` without batching.

    Args:
        batching: ``True``, ``False``, or ``None``, which turns batching on if a size is given.
        minimum: see :class:`RequestBatcher`.
        maximum: see :class:`RequestBatcher`.
        timeout_s: see :class:`RequestBatcher`.

    Raises:
        ConfigError: for sizes while ``batching`` is off.
    """
    sizes = minimum is not None or maximum is not None
    if batching is False and sizes:
        raise ConfigError("min_batch_size and max_batch_size have no effect: batching=False")
    if not batching and not sizes:
        return None
    return RequestBatcher(
        min_batch_size=1 if minimum is None else minimum,
        max_batch_size=maximum,
        timeout_s=timeout_s,
    )

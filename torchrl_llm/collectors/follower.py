"""A collecting process that fetches its weights itself, for learners that cannot call it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from torchrl._utils import logger

from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.weights.weight_source import WeightSource

_POLL_S = 0.1


class WeightFollower:
    """Keeps a worker at the newest weights that a learner has left somewhere.

    The worker looks before each batch, so that rows are begun with the newest weights; with
    ``in_flight`` other than ``wait``, a thread looks beside it too (:meth:`start`).

    Args:
        worker: gets the weights.
        newest: version and place of the newest weights, ``None`` before the first.
        in_flight: what new weights do with conversations that have begun, see
            :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.

    Attributes:
        version: of the weights that the worker has; ``None`` before the first.

    Raises:
        ConfigError: something else looks before the worker's batches already.
    """

    def __init__(
        self,
        worker: CollectorWorker,
        newest: Callable[[], tuple[int, WeightSource] | None],
        *,
        in_flight: Literal["wait", "keep", "abort"] = "wait",
    ) -> None:
        if worker.before_batch is not None:
            raise ConfigError("this worker has something that it does before each batch already")
        self.version: int | None = None
        self._worker, self._newest, self._in_flight = worker, newest, in_flight
        self._has: tuple[int, str | None] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        worker.before_batch = self.refresh

    def refresh(self) -> bool:
        """Take the newest weights where the worker does not have them.

        Weights that did not arrive whole are logged, and tried again next time: the worker goes on
        with those it has, whose version its rows name.

        Returns:
            Whether it got any.

        Raises:
            WorkerError: the place does not answer.
        """
        with self._lock:
            try:
                found = self._newest()
                if found is None or (found[0], found[1].digest) == self._has:
                    return False
                version, source = found
                # A learner that came back from a checkpoint counts some versions again; what was
                # begun under the number's first weights must not go on under the second ones.
                source.recounted = self.version is not None and version <= self.version
                rule = "abort" if source.recounted else self._in_flight
                self._worker.load_weights(source, version, rule)
            except WeightUpdateError as error:
                logger.warning(f"{self._worker.name} goes on with version {self.version}: {error}")
                return False
            self.version, self._has = version, (version, source.digest)
            return True

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the first weights.

        Args:
            timeout_s: most seconds.

        Raises:
            WorkerError: no learner left any in time.
        """
        deadline = time.monotonic() + timeout_s
        while self.version is None and not self.refresh():
            if time.monotonic() > deadline:
                raise WorkerError(f"no learner has published weights for {timeout_s:g} s")
            time.sleep(_POLL_S)

    def start(self) -> None:
        """Look in a thread too, until :meth:`shutdown`."""
        if self._in_flight != "wait" and self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True, name="weights")
            self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                self.refresh()
            except WorkerError as error:
                logger.warning(f"{self._worker.name} cannot see whether weights came: {error}")

    def shutdown(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

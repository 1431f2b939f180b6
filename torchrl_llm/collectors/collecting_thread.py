"""Part of a collector that collects in a thread next to training, until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl_llm._threads import BackgroundLoop, PauseGate
from torchrl_llm.errors import ConfigError

_POLL_S = 0.05


class BesideTraining:
    """Part of :class:`~torchrl_llm.collectors.LLMCollector` that runs in a thread.

    Attributes:
        replay_buffer: what is filled, or ``None``.
        queue: what is filled instead, or ``None``.
    """

    env: Any
    replay_buffer: Any
    queue: Any
    _background: BackgroundLoop | None
    _batches: PauseGate
    _closed: bool

    def start(self) -> None:
        """Collect into the buffer or queue in its own thread, until :meth:`shutdown`.

        An error of policy or environment ends the thread; it is logged at once, and raised by the
        next call of :meth:`wait_for_rows`, :meth:`update_policy_weights_`, :meth:`state_dict` or
        :meth:`shutdown`.

        Raises:
            ConfigError: there is neither buffer nor queue, or it was started before.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer or a queue to collect into")
        self._check_usable()
        if self._background is not None:
            raise ConfigError("this collector was started before")
        self._background = BackgroundLoop(self._collect_once, name="LLMCollector")
        self._background.start()

    def _collect_once(self) -> bool:
        if self.exhausted:
            return False
        with self._batches.work(self._background.stopping) as enters:
            if enters:
                batch = self.rollout()
                # Written before anyone may save: a batch must not be neither here nor there.
                if self.replay_buffer is not None:
                    self._deliver(batch)
        # A full queue is waited for outside: whoever empties it may be the one that pauses.
        if enters and self.replay_buffer is None:
            self._deliver(batch)
        return True

    @property
    def is_running(self) -> bool:
        """Whether the thread of :meth:`start` collects."""
        return self._background is not None and self._background.is_running

    def wait_for_rows(self, num_rows: int, *, timeout_s: float | None = None) -> None:
        """Wait until the buffer has enough rows.

        Args:
            num_rows: rows that the buffer must hold.
            timeout_s: seconds to wait; ``None`` for no limit.

        Raises:
            TimeoutError: they have not come in time.
            ConfigError: the collector does not run, so they will never come.
            Exception: whatever ended the collector's thread.
        """
        if self.replay_buffer is None:
            raise ConfigError("wait_for_rows needs a replay_buffer")
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while len(self.replay_buffer) < num_rows:
            self._raise_failure()
            # Asked before the length is read again: the last rows may have come in between.
            running = self.is_running
            if len(self.replay_buffer) >= num_rows:
                return
            if not running:
                self._raise_failure()
                raise ConfigError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows, and the "
                    "collector does not run: start() it, raise total_dialog_turns, or see whether "
                    "a transform of the buffer holds rows back"
                )
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows after "
                    f"{timeout_s} s"
                )
            time.sleep(_POLL_S)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No batch is collected inside this context; the one under way is written first.

        Save collector and buffer inside it, so that they belong together.
        """
        with self._batches.pause():
            yield

    def _raise_failure(self) -> None:
        if self._background is not None and self._background.failure is not None:
            failure, self._background.failure = self._background.failure, None
            raise failure

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("this collector was shut down")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the thread, close the environment, and raise what the thread failed of.

        Args:
            timeout: seconds to wait for the batch under way; ``None`` for as long as it takes.
            close_env: close the environment.
            raise_on_error: raise an error of the thread that was not raised yet.

        Raises:
            TimeoutError: the thread still runs; the environment is left open then.
        """
        if self._background is not None:
            self._background.stop(timeout)
        if close_env and not self._closed:
            self.env.close(raise_if_closed=False)
        self._closed = True
        if raise_on_error:
            self._raise_failure()

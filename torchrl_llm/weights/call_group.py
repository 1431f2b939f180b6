"""Calls that run side by side, each in a thread that nobody has to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_llm.errors import WeightUpdateError


class CallGroup:
    """Starts calls at once; their threads end with the process if a call never returns.

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

    def wait(self, timeout_s: float) -> None:
        """Wait until all have returned or raised.

        Args:
            timeout_s: most seconds to wait for all.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def results(self, timeout_s: float) -> list[Any]:
        """The results, in the order of the calls.

        Args:
            timeout_s: most seconds to wait for all.

        Raises:
            WeightUpdateError: a call did not return in time.
            Exception: the first error of a call.
        """
        self.wait(timeout_s)
        self.raise_failure()
        late = len(self._threads) - len(self._results)
        if late:
            raise WeightUpdateError(
                f"{late} of {len(self._threads)} samplers did not answer within {timeout_s:.3g} s"
            )
        return self.returned()

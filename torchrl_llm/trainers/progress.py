"""Progress bar, stop requests without loss, and conversations next to each other."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm


class ProgressBar:
    """A bar with step, a metric of it, tokens per second and the time left.

    Args:
        total: steps of the run.
        done: steps that an earlier process already took.
        enabled: ``False`` shows no bar; :meth:`say` still writes.
        file: where to write, standard error by default.
    """

    def __init__(
        self, total: int, *, done: int = 0, enabled: bool = True, file: TextIO | None = None
    ) -> None:
        file = _Screen(sys.stderr if file is None else file)
        self._file = file
        # A log file gets a line every ten seconds, not ten a second.
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not enabled,
            file=file,
            desc="step",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.1 if file.isatty() else 10.0,
        )

    def step(self, name: str, value: float, *, tokens_per_s: float) -> None:
        """Advance by one training step.

        Args:
            name: of the metric that is shown, as ``"reward"``.
            value: that of the step.
            tokens_per_s: tokens per second of the step.
        """
        self._bar.set_postfix_str(f"{name} {value:.3f}, {tokens_per_s:,.0f} tokens/s", False)
        self._bar.update(1)

    def say(self, text: str) -> None:
        """Write a text above the bar."""
        tqdm.write(text, file=self._file)

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        self._bar.close()


class _Screen:
    """A stream whose reader may be gone: what cannot be written there is not worth the run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class StopRequest:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a wish that the loop grants at the end of its step.

    A context manager. The first signal sets :attr:`requested`; a second Ctrl-C interrupts at once.
    A signal that the process ignores (SIGHUP under ``nohup``) stays ignored. Outside the main
    thread, where signals cannot be caught, it does nothing.

    Args:
        notice: called once, when the first signal arrives (:meth:`ProgressBar.say` with a text).

    Attributes:
        signal: the first one that arrived, ``None`` before.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested
        True
    """

    def __init__(self, notice: Any = None) -> None:
        self.signal: signal.Signals | None = None
        self._notice = notice
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal arrived."""
        return self.signal is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the signals back while the body runs; it may not come back here at all."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if first and self._notice is not None:
            self._notice()


def compare_conversations(before: Sequence[str], after: Sequence[str]) -> str:
    """The same held-out conversations before and after training, as one text.

    Args:
        before: rendered conversations of the untrained model.
        after: the same prompts, answered by the trained model.

    Example:
        >>> print(compare_conversations(["assistant: 3"], ["assistant: 2"]))
        held-out conversation 1, before training
          assistant: 3
        held-out conversation 1, after training
          assistant: 2
    """
    parts = []
    for number, pair in enumerate(zip(before, after, strict=True), start=1):
        for when, text in zip(("before", "after"), pair, strict=True):
            parts.append(f"held-out conversation {number}, {when} training")
            parts.extend(f"  {line}" for line in text.splitlines())
    return "\n".join(parts)

"""Progress bar: a live line on a terminal or in a notebook, occasional plain lines in a pipe.

Bars are shown while a run's log is open (:class:`torchrl_llm._run_log.RunLog`) and are silent
otherwise, so any long operation may use one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torchrl_llm._run_log import in_notebook, say, terminal

_NARROWEST, _WIDEST = 8, 24
# Drawing takes half a millisecond, a step of a small model a hundred milliseconds.
_BETWEEN_DRAWINGS_S = 0.2
_LONG_S = 2.0
_BETWEEN_LINES_S = (10.0, 60.0)

_bars: list[ProgressBar] = []


class ProgressBar:
    """Progress of a long operation, with the remaining time.

    A context manager. A nested bar is shown in place of the outer one until it ends.

    Args:
        what: the counted unit, such as ``"step"``.
        total: number of units.
        done: number of units that were done before.

    Attributes:
        done: number of units that are done.
        note: text shown after the bar.

    Example:
        >>> with ProgressBar("step", 10) as bar:
        ...     bar.update(1, "reward 0.250")
        >>> bar.done
        1
    """

    def __init__(self, what: str, total: int, *, done: int = 0) -> None:
        self.what, self.total, self.done, self.note = what, total, done, ""
        self._first, self._phase = done, ""
        self._begun = self._counted = self._changed = time.monotonic()
        self._drawn = self._told = 0.0
        self._pace_s = 0.0

    def __enter__(self) -> Self:
        self._begun = self._counted = self._changed = self._told = time.monotonic()
        _bars.append(self)
        self._show(always=True)
        return self

    def __exit__(self, *exc: object) -> None:
        _bars.remove(self)
        outer = _bars[-1] if _bars else None
        if outer is not None and outer.done == outer._first:
            outer._counted = time.monotonic()  # earlier time does not count for the pace
        if not terminal.listens:
            return
        self._phase = ""
        if outer is not None:
            outer._show(always=True)
        else:
            self._draw()
            terminal.leave_line()
            if in_notebook():
                terminal.change_cell(None)

    def update(self, done: int, note: str = "") -> None:
        """Report progress.

        Args:
            done: number of units that are done in total.
            note: a few words or numbers to show.
        """
        now = time.monotonic()
        self._pace_s, self._changed = now - self._changed, now
        self.done, self.note, self._phase = done, note, ""
        self._show()
        if not terminal.listens:
            return
        elapsed, (least, most) = now - self._begun, _BETWEEN_LINES_S
        if done == self.total or now - self._told >= min(max(least, elapsed / 10), most):
            self._told = now
            tell = terminal.log_only if terminal.live or in_notebook() else say
            tell(", ".join(filter(None, (self._count(), note, self._times()))))

    def phase(self, name: str) -> None:
        """Show the current activity, for units that take long."""
        self._phase = name
        if self._pace_s >= _LONG_S or not self.done:
            self._show(always=True)

    def _show(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or self._pace_s >= _LONG_S or now - self._drawn >= _BETWEEN_DRAWINGS_S:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        if not terminal.listens:
            return
        if terminal.live is not None:
            terminal.draw(_styled(terminal.live, self._parts))
        elif in_notebook():
            terminal.change_cell("".join(text for text, _ in self._parts()).rstrip())

    def _count(self) -> str:
        chain = [*_bars[: _bars.index(self) + 1]] if self in _bars else [self]
        return ", ".join(f"{bar.what} {bar.done:,}/{bar.total:,}" for bar in chain)

    def _times(self) -> str:
        elapsed = time.monotonic() - self._begun
        if self.done == self.total:
            return clock(elapsed)
        fresh = self.done - self._first
        pace_s = (time.monotonic() - self._counted) / max(fresh, 1)
        left = clock(pace_s * (self.total - self.done)) if fresh else "?"
        return f"{clock(elapsed)} < {left}"

    def _parts(self, width: int = 84) -> list[tuple[str, str]]:
        """Texts and their styles; on a short line, first the bar is dropped, then the note."""
        count = f"{self._count()} "
        notes = "  ".join(filter(None, (f" {self._times()}", self._phase, self.note)))
        length = min(max(width - len(count) - len(notes), _NARROWEST), _WIDEST)
        full = round(length * self.done / self.total) if self.total else length
        return [
            (count, "bold"),
            ("━" * full, "green" if self.done == self.total else "cyan"),
            ("─" * (length - full), "bright_black"),
            (notes, ""),
        ]


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Hide the progress bars of transformers for weight files; they would disturb a run's bar.

    Bars of downloads, which take long, stay visible.
    """
    from transformers.utils import logging

    def hidden(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return logging.EmptyTqdm(*args, **options)  # even a disabled tqdm starts a thread

    before = logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    Args:
        seconds: not negative.

    Example:
        >>> clock(75.2), clock(3725)
        ('1:15', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@functools.lru_cache(maxsize=1)
def _console(stream: Any) -> Any:
    from rich.console import Console

    return Console(file=stream, force_terminal=True, legacy_windows=False)


def _styled(stream: Any, parts: Callable[[int], list[tuple[str, str]]]) -> str:
    """The parts on one line that fits into the terminal."""
    from rich.text import Text

    console = _console(stream)
    width = console.width - 1
    texts = parts(width)
    if not console.encoding.startswith("utf"):
        texts = [(text.replace("━", "=").replace("─", "-"), style) for text, style in texts]
    with console.capture() as drawn:
        line = Text.assemble(*texts, end="")
        console.print(line, end="", no_wrap=True, overflow="crop", width=width)
    return drawn.get()

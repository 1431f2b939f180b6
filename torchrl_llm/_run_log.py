r"""Output of a run: standard output and standard error, ``run.log`` with both, and a live line.

While a :class:`RunLog` is open, everything that Python prints is also written to its file, line by
line, and a live line (:mod:`torchrl_llm._progress`) stays below the output on the terminal. So all
printed output is part of the log: ``print``, warnings, handlers of :mod:`logging`. The streams of
loggers that were set up before are replaced while a log is open.

In a notebook or an interactive session the streams are not replaced: an interrupted cell may leave
a log open, and later output does not belong in it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torchrl_llm._masking import masked

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_COLOURS = re.compile(r"(\x1b\[[\d;]*m)")
# Marks that reverse the order of letters (such as U+202E), unusual line separators, tags.
_BIDI = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROL = dict.fromkeys((*range(32), *range(127, 160), *_BIDI, *range(0xE0000, 0xE0080)))
del _CONTROL[9], _CONTROL[10]
# Characters that are also removed from other programs' output; colours and bars are allowed there.
_UNSAFE = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[\x80-\x9f" + "".join(map(chr, _BIDI)) + "]"
)
_ERASE = "\r\x1b[2K"


def printable(text: str) -> str:
    r"""Text without characters that move the cursor, change colours or reverse letters.

    All printed texts of models, tools, files and exceptions go through it.

    Args:
        text: any text; tabs and line ends are kept.

    Example:
        >>> printable("\x1b[31mred\x1b[0m\x07\ttab\u202e")
        'red\ttab'
    """
    return _ESCAPES.sub("", text).translate(_CONTROL)


def shown(text: str) -> str:
    """A text for display: :func:`printable`, with masked passwords."""
    return "\n".join(map(masked, printable(text).split("\n")))


def rounded_repr(result: Any) -> str:
    """Like ``__repr__`` of a dataclass, with numbers rounded to three decimals."""
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.repr}
    return f"{type(result).__name__}({', '.join(f'{k}={_rounded(v)}' for k, v in values.items())})"


def _rounded(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_rounded(each)}" for key, each in value.items()) + "}"
    return f"{value:.3f}" if isinstance(value, float) else repr(value)


def display_path(path: str | Path) -> str:
    """A path for display and copying: relative if it is below the current folder."""
    full, here = Path(path).absolute(), Path.cwd()
    return str(full.relative_to(here) if here in full.parents else full)


def clean_record(record: logging.LogRecord) -> bool:
    """Filter of TorchRL's logger: applies :func:`shown` to messages and removes marks."""
    for handler in logging.getLogger(record.name).handlers:
        if type(handler.formatter).__module__ == "torchrl._utils":
            handler.setFormatter(logging.Formatter("%(message)s"))
    with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit are reported later
        record.msg, record.args = shown(record.getMessage()), ()
    return True


def show_traceback(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
    """Like ``sys.excepthook``, with :func:`shown` applied to the message."""
    sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


# Packages whose messages users cannot act on; the user's own packages may be installed next to
# them.
_LIBRARIES = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:accelerate|alembic|bitsandbytes|datasets|filelock|fsspec|"
    r"httpx|huggingface_hub|hydra|matplotlib|mlflow|numpy|omegaconf|peft|ray|sqlalchemy|"
    r"tensorboard|tensordict|torch|torchrl|trackio|transformers|triton|urllib3|vllm|wandb)[/\\]"
)


def shows_record(record: logging.LogRecord) -> bool:
    """Filter of a terminal handler: messages of libraries go to logs only, except errors."""
    clean_record(record)
    if record.levelno >= logging.ERROR or not _LIBRARIES.search(record.pathname):
        return True
    terminal.log_only(f"[{record.name}][{record.levelname}] {record.msg}")
    return False


def show_warning(
    message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any
) -> None:
    """Like ``warnings.showwarning``; warnings about a library's own code go to logs only."""
    text = warnings.formatwarning(message, category, filename, lineno).rstrip()
    (terminal.log_only if _LIBRARIES.search(filename) else say)(text)


class _Stream:
    """Standard output or standard error while a log is open."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self._stream, self._terminal = stream, terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._terminal.write(self._stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class Terminal:
    """The two streams of this process, the logs that are open, and the live line.

    There is one instance, :data:`terminal`. If the reader of a stream is gone, nothing more is
    written to the stream, so that lost output does not end a run.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._logs: list[RunLog] = []
        self._give_back: list[Any] = []
        self._screen: TextIO | None = None
        self._notebook: Any = None
        self._line, self._drawn, self._partial = "", False, False
        self._begun: dict[int, str] = {}
        self._process = 0

    # -- output -----------------------------------------------------------------------------------

    def write(self, stream: TextIO | None, text: str) -> None:
        """Write to one of the streams, above the live line, and to the logs."""
        if not self._logs or os.getpid() != self._process:
            _put(stream, text)
            return
        with self._lock:
            shared = self._screen is not None and stream is not None and stream.isatty()
            if shared and self._drawn:
                _put(self._screen, _ERASE)
                self._drawn = False
            plain = stream is None or stream.isatty() or "FORCE_COLOR" in os.environ
            _put(stream, _UNSAFE.sub("", text if plain else _ESCAPES.sub("", text)))
            self._log(stream, text)
            if shared:
                self._partial = not text.endswith("\n")
                self._draw()

    def log_only(self, text: str) -> None:
        """Write to the logs only; the terminal shows the content in a different form."""
        with self._lock:
            for log in self._logs:
                log.line(text)

    def _log(self, stream: TextIO | None, text: str) -> None:
        *lines, rest = (self._begun.pop(id(stream), "") + text).split("\n")
        if rest:
            self._begun[id(stream)] = rest
        for line in lines:
            self.log_only(line)

    # -- the live line ----------------------------------------------------------------------------

    @property
    def live(self) -> TextIO | None:
        """The terminal for a live line; ``None`` for a pipe, a file or a notebook."""
        return self._screen

    @property
    def listens(self) -> bool:
        """Whether an open log shows progress."""
        return any(log.progress for log in self._logs)

    def draw(self, line: str) -> None:
        """Show a line below everything else, replacing the previous one.

        Args:
            line: a line not longer than the width of the terminal.
        """
        with self._lock:
            if self._screen is not None and self._drawn:
                _put(self._screen, _ERASE)
            self._line, self._drawn = line, False
            self._draw()

    def _draw(self) -> None:
        if self._screen is not None and self._line and not self._partial and not self._drawn:
            _put(self._screen, self._line)
            self._drawn = True

    def leave_line(self) -> None:
        """Keep the live line in place; later output appears below it."""
        with self._lock:
            if self._drawn:
                _put(self._screen, "\n")
            self._line, self._drawn = "", False

    def change_cell(self, text: str | None) -> None:
        """Show a text in the current cell of a notebook, replacing the previous one.

        Args:
            text: the text; ``None`` to keep the current text and show the next one separately.
        """
        from IPython.display import display

        data = {"text/plain": text}
        if text is None:
            self._notebook = None
        elif self._notebook is None:
            self._notebook = display(data, raw=True, display_id=True)
        else:
            self._notebook.update(data, raw=True)

    # -- the streams ------------------------------------------------------------------------------

    def open(self, log: RunLog) -> None:
        """Also write to a log."""
        with self._lock:
            if not self._logs:
                self._take_streams()
            self._logs.append(log)

    def close(self, log: RunLog) -> None:
        """Stop writing to a log."""
        with self._lock:
            if self._logs == [log]:
                self.leave_line()
                for begun in self._begun.values():
                    log.line(begun)
                self._begun.clear()
                while self._give_back:
                    self._give_back.pop()()
            if log in self._logs:  # not after the terminal was closed at the end of the process
                self._logs.remove(log)

    def _take_streams(self) -> None:
        self._process = os.getpid()
        interactive = hasattr(sys, "ps1")
        found = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        ours = {id(stream): _Stream(stream, self) for stream in found if stream is not None}
        error = sys.stderr
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        shown = error is not None and error.isatty() and not dumb and not interactive
        self._screen = error if shown else None
        for name in () if interactive else ("stdout", "stderr"):
            if (stream := getattr(sys, name)) is not None:
                self._replace(sys, name, partial(setattr, sys, name), ours[id(stream)])
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in [h for each in loggers for h in getattr(each, "handlers", ())]:
            stream = vars(handler).get("stream")  # not a property that returns sys.stderr
            if isinstance(handler, logging.StreamHandler) and id(stream) in ours:
                self._replace(handler, "stream", handler.setStream, ours[id(stream)])

    def _replace(self, owner: Any, name: str, put: Callable[[Any], Any], ours: _Stream) -> None:
        """Put our stream in the place of another, until the last log is closed."""
        stream = getattr(owner, name)

        def give_back() -> None:
            if getattr(owner, name) is ours:
                put(stream)

        put(ours)
        self._give_back.append(give_back)


def _put(stream: TextIO | None, text: str) -> None:
    """Write to a stream at once, unless its reader is gone."""
    if stream is None:
        return
    # A signal handler may print in the middle of a write, which Python does not allow.
    with contextlib.suppress(OSError, RuntimeError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            name = stream.encoding or "ascii"
            stream.write(text.encode(name, "replace").decode(name))
        if "\n" in text or "\r" in text:
            stream.flush()


terminal = Terminal()
"""The terminal of this process."""


def say(text: str) -> None:
    """Print a notice to standard error and to the open logs.

    In a notebook it goes to standard output, because standard error looks like a failure there.

    Args:
        text: one or several lines.
    """
    _tell("stdout" if in_notebook() else "stderr", shown(text))


def show(text: str) -> None:
    """Print a result to standard output and to the open logs.

    Args:
        text: one or several lines, with colours.
    """
    parts = _COLOURS.split(text)
    _tell("stdout", "".join(p if at % 2 else shown(p) for at, p in enumerate(parts)))


def _tell(name: str, text: str) -> None:
    stream = getattr(sys, name)
    terminal.write(stream._stream if isinstance(stream, _Stream) else stream, f"{text}\n")


class RunLog:
    """``run.log`` in the folder of a run: the terminal's output while the log is open.

    A reentrant context manager. It appends, so a resumed run continues in the same file. It
    includes an error that ends the program. If the file cannot be written, the log is lost but the
    run continues.

    Args:
        folder: folder of the run; it must exist.

    Attributes:
        path: path of the file.
        progress: whether bars are shown while it is open.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).resolve() / "run.log"
        self.progress = True
        self._file: TextIO | None = None
        self._depth = 0
        self._headed = False
        self._hook: Any = None

    @classmethod
    def of(cls, folder: str | Path) -> RunLog:
        """The log of a folder: the open one, or a new one."""
        new = cls(folder)
        return next((log for log in terminal._logs if log.path == new.path), new)

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:
            with contextlib.suppress(OSError):
                self._file = self.path.open("a", buffering=1, encoding="utf-8", errors="replace")
            if not self._headed:
                self._headed = True
                command = " ".join(map(str, sys.argv))
                self.line(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {command} ({os.getpid()})")
            terminal.open(self)
            if self._hook is None:
                self._hook, sys.excepthook = sys.excepthook, self._uncaught
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        terminal.close(self)
        if error is not None and not isinstance(error, (GeneratorExit, SystemExit)):
            self._traceback(error)
        # A generator is closed before the error of its loop is shown; the error follows later.
        if not isinstance(error, GeneratorExit):
            self._unhook()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def line(self, text: str) -> None:
        """Write one line to the file, without passwords and control characters."""
        # Other programs' progress bars return to the start of the line: keep the last state.
        text = shown(text.rstrip("\r").rpartition("\r")[2])
        with contextlib.suppress(OSError, RuntimeError):
            if self._file is not None:
                self._file.write(f"{text}\n")

    def _traceback(self, error: BaseException) -> None:
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(shown("".join(traceback.format_exception(error))))

    def _uncaught(self, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        if not self._depth:  # open logs get the line when it is printed
            self._traceback(error)
        (self._hook or sys.__excepthook__)(kind, error, trace)

    def _unhook(self) -> None:
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        self._hook = None


@atexit.register
def _close_all() -> None:
    """Restore the terminal if a run ended in the middle."""
    for log in reversed(terminal._logs):
        terminal.close(log)

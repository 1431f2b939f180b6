r"""What a run says: standard output and standard error, ``run.log`` with both, and a live line.

While a :class:`RunLog` is open, what Python prints goes to its file too, line by line, and a live
line (:mod:`torchrl_llm._progress`) stays below it on the terminal. So whatever prints is part of
the log: ``print``, warnings, handlers of :mod:`logging`. Loggers that were set up before keep the
stream that they have; it is exchanged while a log is open.

In a notebook or an interactive session the streams stay as they are. There a cell that was
interrupted may leave a log open, and nobody wants what is printed later in it.
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
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torchrl_llm._masking import masked

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_COLOURS = re.compile(r"(\x1b\[[\d;]*m)")
# Marks that turn the order of letters around (U+202E and its kind), line ends that are none, tags.
_BIDI = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROL = dict.fromkeys((*range(32), *range(127, 160), *_BIDI, *range(0xE0000, 0xE0080)))
del _CONTROL[9], _CONTROL[10]
# What somebody else's print may not do either; colours and bars are its own affair.
_UNSAFE = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[\x80-\x9f" + "".join(map(chr, _BIDI)) + "]"
)
_ERASE = "\r\x1b[2K"


def printable(text: str) -> str:
    r"""Text without what would move a cursor, change colours or turn letters around.

    All that is printed of models, tools, files and exceptions goes through it.

    Args:
        text: may hold anything; tabulators and line ends stay.

    Example:
        >>> printable("\x1b[31mred\x1b[0m\x07\ttab\u202e")
        'red\ttab'
    """
    return _ESCAPES.sub("", text).translate(_CONTROL)


def shown(text: str) -> str:
    """A text as it is shown: :func:`printable`, without passwords."""
    return "\n".join(map(masked, printable(text).split("\n")))


def rounded_repr(result: Any) -> str:
    """As ``__repr__`` of a dataclass with numbers for people: they have three decimals."""
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.repr}
    return f"{type(result).__name__}({', '.join(f'{k}={_rounded(v)}' for k, v in values.items())})"


def _rounded(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_rounded(each)}" for key, each in value.items()) + "}"
    return f"{value:.3f}" if isinstance(value, float) else repr(value)


def display_path(path: str | Path) -> str:
    """A path as it is shown and copied: below the present folder it is relative."""
    full, here = Path(path).absolute(), Path.cwd()
    return str(full.relative_to(here) if here in full.parents else full)


def clean_record(record: logging.LogRecord) -> bool:
    """Filter of TorchRL's logger, whose messages become :func:`shown`, and lines without marks."""
    for handler in logging.getLogger(record.name).handlers:
        if type(handler.formatter).__module__ == "torchrl._utils":
            handler.setFormatter(logging.Formatter("%(message)s"))
    with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit are told later
        record.msg, record.args = shown(record.getMessage()), ()
    return True


def show_traceback(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
    """As ``sys.excepthook``, with a message that is :func:`shown`."""
    sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


# Packages whose messages a user can do nothing about; the user's own may be installed next to them.
_LIBRARIES = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:accelerate|alembic|bitsandbytes|datasets|filelock|fsspec|"
    r"httpx|huggingface_hub|hydra|matplotlib|mlflow|numpy|omegaconf|peft|ray|sqlalchemy|"
    r"tensorboard|tensordict|torch|torchrl|trackio|transformers|triton|urllib3|vllm|wandb)[/\\]"
)


def shows_record(record: logging.LogRecord) -> bool:
    """Filter of a handler of the terminal: what libraries log is in logs only, unless an error."""
    clean_record(record)
    if record.levelno >= logging.ERROR or not _LIBRARIES.search(record.pathname):
        return True
    terminal.log_only(f"[{record.name}][{record.levelname}] {record.msg}")
    return False


def show_warning(
    message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any
) -> None:
    """As ``warnings.showwarning``; a warning about a library's own code is in logs only."""
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

    There is one, :data:`terminal`. A stream whose reader is gone is written to no more: what cannot
    be shown is not worth a run.
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

    # -- what is said -----------------------------------------------------------------------------

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
        """Write to the logs what the terminal shows in another form."""
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
        """The terminal that can hold a live line; ``None`` for a pipe, a file or a notebook."""
        return self._screen

    @property
    def listens(self) -> bool:
        """Whether a log is open that wants to know how far the run has got."""
        return any(log.progress for log in self._logs)

    def draw(self, line: str) -> None:
        """Show a line below everything else, in place of the one before.

        Args:
            line: not longer than the terminal is wide.
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
        """Let the live line stand where it is; what follows is printed below it."""
        with self._lock:
            if self._drawn:
                _put(self._screen, "\n")
            self._line, self._drawn = "", False

    def change_cell(self, text: str | None) -> None:
        """Show a text in the present cell of a notebook, in place of the one before.

        Args:
            text: ``None`` to leave what is there, so that the next text has a place of its own.
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
        """Write to a log too."""
        with self._lock:
            if not self._logs:
                self._take_streams()
            self._logs.append(log)

    def close(self, log: RunLog) -> None:
        """Write to a log no more."""
        with self._lock:
            if self._logs == [log]:
                self.leave_line()
                for begun in self._begun.values():
                    log.line(begun)
                self._begun.clear()
                while self._give_back:
                    self._give_back.pop()()
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
                setattr(sys, name, ours[id(stream)])
                self._give_back.append(_returning(sys, name, ours[id(stream)], stream))
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in [h for each in loggers for h in getattr(each, "handlers", ())]:
            stream = vars(handler).get("stream")  # not a property that asks for sys.stderr
            if isinstance(handler, logging.StreamHandler) and id(stream) in ours:
                handler.setStream(ours[id(stream)])
                self._give_back.append(_resetting(handler, ours[id(stream)], stream))


def _returning(owner: Any, name: str, ours: _Stream, stream: TextIO) -> Any:
    def give_back() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, stream)

    return give_back


def _resetting(handler: logging.StreamHandler, ours: _Stream, stream: TextIO) -> Any:
    def give_back() -> None:
        if handler.stream is ours:
            handler.setStream(stream)

    return give_back


def _put(stream: TextIO | None, text: str) -> None:
    """Write to a stream at once, if anybody is there to read."""
    if stream is None:
        return
    # A signal may arrive in the middle of a write, and its handler say so: Python refuses that.
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
    """Tell the person who watches: a notice, on standard error and in the logs that are open.

    In a notebook it is standard output, for there standard error looks like a failure.

    Args:
        text: one line or several.
    """
    _tell("stdout" if in_notebook() else "stderr", shown(text))


def show(text: str) -> None:
    """Show a result, on standard output and in the logs that are open.

    Args:
        text: one line or several, with colours.
    """
    parts = _COLOURS.split(text)
    _tell("stdout", "".join(p if at % 2 else shown(p) for at, p in enumerate(parts)))


def _tell(name: str, text: str) -> None:
    stream = getattr(sys, name)
    terminal.write(stream._stream if isinstance(stream, _Stream) else stream, f"{text}\n")


class RunLog:
    """``run.log`` in the folder of a run: what the terminal says while it is open.

    A context manager that may be entered again, also inside itself. It appends, so a run that goes
    on goes on in the same file. An error that ends the program is in it too. A file that cannot be
    written costs the log, and not the run.

    Args:
        folder: of the run; it must exist.

    Attributes:
        path: of the file.
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
        """The log of a folder: the one that is open, or a new one."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        terminal.close(self)
        if error is not None and not isinstance(error, (GeneratorExit, SystemExit)):
            self._traceback(error)
        # A generator is closed before the error of its loop is shown, which is still to come.
        if not isinstance(error, GeneratorExit):
            self._unhook()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def line(self, text: str) -> None:
        """Write one line to the file, without passwords and control characters."""
        # Progress bars of others begin again at the start of the line: the last state counts.
        text = shown(text.rstrip("\r").rpartition("\r")[2])
        with contextlib.suppress(OSError, RuntimeError):
            if self._file is not None:
                self._file.write(f"{text}\n")

    def _traceback(self, error: BaseException) -> None:
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(shown("".join(traceback.format_exception(error))))

    def _uncaught(self, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        if not self._depth:  # what is open hears of it when it is printed
            self._traceback(error)
        (self._hook or sys.__excepthook__)(kind, error, trace)

    def _unhook(self) -> None:
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        self._hook = None


@atexit.register
def _close_all() -> None:
    """Leave the terminal as it was found, where a run was left in the middle."""
    for log in reversed(terminal._logs):
        terminal.close(log)

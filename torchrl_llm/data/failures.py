"""Logs failures of rewards, tools and environments: the first of each kind, with traceback.

A failure is stored in its row, so it does not end the run. Because nobody reads the rows during a
run, the log shows the failure too: the traceback that Python would have printed, and the row.

Next: :mod:`torchrl_llm.trainers.reward_watch` counts failures over a run.
"""

from __future__ import annotations

import site
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tensordict import TensorDictBase
from torchrl._utils import logger

from torchrl_llm._masking import masked
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.row_text import row_text
from torchrl_llm.errors import TorchRLLLMError

Frame = tuple[str, int, str]
ERROR_KEYS = ("type", "message", "place", "source", "traceback")
"""Keys of rows under ``"error"``: the fields of a :class:`Failure`, in their order."""

WORLD = "environment"
"""``Failure.source`` of failures in the environment."""

PROGRAM = "program"
"""``Failure.source`` of a program with its own loop (:mod:`torchrl_llm.gateway`)."""

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {site.getusersitepackages()}
)
_LONGEST_MESSAGE = 2000
_LONGEST_TRACEBACK = 4000
_MOST_FRAMES = 30
# A limit, so that a reward whose errors all have different names does not fill the log.
_MOST_KINDS = 100
_said: set[tuple[str, str, str]] = set()
_lock = threading.Lock()
_FATES = {
    "component": "rows that need it are not trained on, and train/invalid_{name} counts them",
    "tool": "the model reads what went wrong, and train/tool_errors counts such rows",
    WORLD: "such episodes end and are not trained on, and train/env_errors counts them",
    PROGRAM: "its rows are not trained on, and train/env_errors counts them",
}
_NO_REWARD = (
    "rows without a reward are not trained on, and train/reward_errors counts them, or "
    "eval/invalid in an evaluation"
)


class Failure(NamedTuple):
    """One failure in a row.

    Attributes:
        kind: name of the exception's type; empty if nothing failed.
        message: text of the exception, at most 2,000 characters.
        place: location where it was raised, see :func:`place_of`.
        source: the component that failed: ``"reward"``, ``"component 'NAME'"`` of a reward, ``"tool
            'NAME'"`` or ``"environment"``.
        traceback: traceback as Python prints it, without the frames of this package.
    """

    kind: str = ""
    message: str = ""
    place: str = ""
    source: str = "reward"
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, source: str = "reward") -> Failure:
        """Make the failure of an exception.

        Args:
            error: exception with its traceback.
            source: the part that raised it.

        Example:
            >>> Failure.of(ZeroDivisionError("by zero")).traceback
            'ZeroDivisionError: by zero'
        """
        try:
            message = str(error)
        except BaseException:  # ``str`` of an exception can also raise
            message = ""
        kind = type(error).__name__
        return cls(kind, _short(message), place_of(error), source, _printed(error))

    @classmethod
    def told(
        cls, kind: str, message: str, frames: Sequence[Frame] = (), source: str = "reward"
    ) -> Failure:
        """Make the failure of an exception in a different process, or without an exception.

        Args:
            kind: name of its type.
            message: its text.
            frames: file, line and function of each frame, the innermost last.
            source: the part that raised it.

        Example:
            >>> Failure.told("ToolTimeout", "No answer.", source="tool 'sql'").traceback
            'ToolTimeout: No answer.'
        """
        shown = traceback.StackSummary.from_list([(*frame, None) for frame in frames])
        shown = _of_user(shown)
        begin = ["Traceback (most recent call last):\n", *shown.format()] if shown else []
        text = _last("".join([*begin, f"{kind}: {message}"]))
        return cls(kind, _short(message), place_among(frames), source, text)

    def __str__(self) -> str:
        """Return its traceback, or its kind, message and place without one."""
        where = f" at {self.place}" if self.place else ""
        return self.traceback or f"{self.kind}: {self.message}{where}"

    @property
    def sort(self) -> tuple[str, str, str]:
        """The key of equal failures: source, type and place."""
        return self.source, self.kind, self.place


NO_FAILURE = Failure(source="")
"""The value for a row in which nothing failed."""


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, in the user's own code if possible.

    Args:
        error: with its traceback.

    Returns:
        ``"<file>:<line>, in <function>"``; empty for this package's errors about the return value
        of a user's function, which belong to no line.

    Example:
        >>> place_of(ValueError("never raised"))
        ''
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    place = place_among([frame for frame in frames if not frame[0].startswith(_OURS)])
    return place if place or isinstance(error, TorchRLLLMError) else place_among(frames)


def place_among(frames: Sequence[Frame]) -> str:
    """Return the innermost frame outside of libraries, or else the innermost frame.

    Args:
        frames: file, line and function of each, the innermost last.

    Returns:
        As :func:`place_of`; empty without frames.

    Example:
        >>> import json
        >>> place_among([("/home/me/reward.py", 3, "score"), (json.__file__, 346, "loads")])
        '/home/me/reward.py:3, in score'
    """
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<frozen"))]
    for file, line, name in reversed(own or frames):
        return f"{file}:{line}, in {name}"
    return ""


def _printed(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(error, limit=-_MOST_FRAMES)
    ours = isinstance(error, TorchRLLLMError) and not _of_user(told.stack)
    _leave_out_ours(told)
    # A long message must not push out its type or the frames above it.
    return _last("".join(map(_short, told.format(chain=not ours))).rstrip("\n"))


def _leave_out_ours(told: traceback.TracebackException) -> None:
    told.stack = _of_user(told.stack)
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _leave_out_ours(other)


def _of_user(stack: traceback.StackSummary | None) -> traceback.StackSummary | None:
    """Return the frames outside of this package; ``None`` if there are none."""
    own = [frame for frame in stack or () if not frame.filename.startswith(_OURS)]
    return traceback.StackSummary.from_list(own) if own else None


def _short(text: str) -> str:
    if len(text) > _LONGEST_MESSAGE:
        text = text[: _LONGEST_MESSAGE - 3] + "..." + "\n" * text.endswith("\n")
    return _storable(text)


def _last(text: str) -> str:
    """Return the end of a traceback, which contains the innermost frames and the exception."""
    if len(text) > _LONGEST_TRACEBACK:
        text = "..." + text[3 - _LONGEST_TRACEBACK :]
    return _storable(text)


def _storable(text: str) -> str:
    """Remove passwords, and lone surrogates (which cannot be stored), from a text."""
    return "\n".join(map(masked, text.encode("utf-8", "replace").decode().split("\n")))


def failures_of(row: TensorDictBase) -> list[Failure]:
    """Return a row's failures: of reward, environment, components of the reward, and tools.

    Args:
        row: without batch dimension.

    Returns:
        One failure of each kind.

    Example:
        >>> from tensordict import TensorDict
        >>> failures_of(TensorDict())
        []
    """
    found: list[Failure] = []
    valid = leaf(row, ("next", "reward_valid"))
    if valid is not None and not valid.all():
        found.append(_stored(row.get(("next", "error"), None)))
    parts = row.get(("next", "rewards"), None)
    for name in () if parts is None else parts.keys():
        if not parts.get((name, "valid")).all():
            found.append(_stored(parts.get((name, "failure"), None)))
    calls = row.get(("next", "tools", "calls"), None)
    told = [call.get("failure") for call in (() if calls is None else calls.data)]
    found += [Failure(**each) for each in told if each]
    return list({failure.sort: failure for failure in found if failure.kind}.values())


def _stored(node: TensorDictBase | None) -> Failure:
    if node is None:
        return Failure()
    told = set(node.keys())
    fields = zip(Failure._fields, ERROR_KEYS, strict=True)
    return Failure(**{field: node[name] for field, name in fields if name in told})


def tell_failures(
    failures: Sequence[Failure], row_of: Callable[[int], TensorDictBase], num_rows: int
) -> None:
    """Log failures of rows, each kind once per process.

    Args:
        failures: failures; those without a kind are ignored.
        row_of: function from the index of a failure to its row, without batch dimension.
        num_rows: rows of the batch.
    """
    if not any(failure.kind for failure in failures):
        return
    counts = Counter(failure.sort for failure in failures if failure.kind)
    first = {failure.sort: i for i, failure in reversed(list(enumerate(failures))) if failure.kind}
    for sort, count in counts.items():
        with _lock:
            if sort in _said or len(_said) >= _MOST_KINDS:
                continue
            _said.add(sort)
            full = len(_said) == _MOST_KINDS
        index = first[sort]
        source, _, name = sort[0].partition(" ")
        fate = _FATES.get(source, _NO_REWARD).format(name=name.strip("'"))
        text = (
            f"{sort[0]} failed {count} time{'s' * (count > 1)} in a batch of {num_rows} rows. Only "
            f"the first of each kind is shown; {fate}.\n{failures[index]}\n{_shown(row_of, index)}"
        )
        if full:
            text += f"\n{_MOST_KINDS} kinds of errors were shown; others are counted only."
        logger.warning(text)


def tell_failures_of(rows: Sequence[TensorDictBase]) -> None:
    """Log failures of collected rows in this process; collectors may run on other machines.

    Args:
        rows: each without batch dimension.
    """
    failed = [(row, failure) for row in rows for failure in failures_of(row)]
    tell_failures([failure for _, failure in failed], lambda at: failed[at][0], len(rows))


def _shown(row_of: Callable[[int], TensorDictBase], index: int) -> str:
    try:
        return row_text(row_of(index))
    except Exception as error:  # logging a failure must not cause a new one
        return f"  (the row cannot be shown: {type(error).__name__}: {error})"

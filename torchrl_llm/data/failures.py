"""Shows what failed in a reward or a world of the user: once a kind, with its place.

A failure is data, a row with a NaN reward and its error, so that no run ends by one. Nobody reads
that data while a run goes on, hence the line in the log.
"""

from __future__ import annotations

import site
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchrl._utils import logger

from torchrl_llm.errors import TorchRLLLMError

Frame = tuple[str, int, str]
ERROR_KEYS = ("type", "message", "place")
"""What rows hold under ``"error"``."""

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {site.getusersitepackages()}
)
# A reward that gives each of its errors a new name must not fill the log.
_MOST_KINDS = 100
_said: set[tuple[str, str]] = set()
_lock = threading.Lock()


def place_of(error: BaseException) -> str:
    """Where an exception was raised, in the user's own code if that was run.

    Args:
        error: with its traceback.

    Returns:
        ``"<file>:<line>, in <function>"``; empty for our own errors about what a function of the
        user's returned, which have no such place.

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
    """The innermost frame that is no library's, or the innermost of all.

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


def tell_failures(failures: Iterable[tuple[str, str, str]], num_rows: int) -> None:
    """Log failures of rows, those of a kind once in a process.

    Args:
        failures: type, message and place of each; a kind is a type and a place. Those without a
            type are none.
        num_rows: rows of the batch.
    """
    counts: Counter[tuple[str, str]] = Counter()
    messages: dict[tuple[str, str], str] = {}
    for kind, message, place in failures:
        if kind:
            counts[kind, place] += 1
            messages.setdefault((kind, place), message)
    for (kind, place), count in counts.items():
        with _lock:
            if (kind, place) in _said or len(_said) >= _MOST_KINDS:
                continue
            _said.add((kind, place))
        where = f" at {place}" if place else ""
        logger.warning(
            f"{count} of {num_rows} rows failed: {kind}: {messages[kind, place]}{where}. Rows "
            "without a reward are not trained on; train/invalid counts them, and ('next', 'error') "
            "of each says why (said once for each kind of error)"
        )

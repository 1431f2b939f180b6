"""JSON in the middle of a text, read in the time of what is read.

``json.JSONDecoder.raw_decode`` counts the lines in front of an error, so looking for values at many
places of a long text takes time that grows with its square.
"""

from __future__ import annotations

import json
from typing import Any

_DECODERS = {strict: json.JSONDecoder(strict=strict) for strict in (True, False)}
_WINDOW = 256
# No literal and no escape is longer: an error this near to the end of a window may be its end's.
_MARGIN = 16


def json_at(text: str, at: int, *, strict: bool = False) -> tuple[Any, int]:
    r"""The JSON value that begins at a place, and where it ends.

    Args:
        text: any text.
        at: index of the value's first character; no white space is skipped.
        strict: refuse line ends inside strings. JSON wants them escaped, but they are common where
            models write code.

    Raises:
        ValueError: there is no value; its place is counted from ``at``.
        RecursionError: it is nested too deeply.

    Example:
        >>> json_at('So: {"a": 1}.', 4)
        ({'a': 1}, 12)
    """
    size = _WINDOW
    while True:
        window = text[at : at + size]
        whole = at + size >= len(text)
        try:
            value, end = _DECODERS[strict].raw_decode(window)
        except json.JSONDecodeError as error:
            unended = error.msg.startswith("Unterminated") or error.pos > size - _MARGIN
            if whole or not unended:
                raise
        else:
            # A number at the end of the window may go on behind it.
            if whole or end <= size - _MARGIN:
                return value, at + end
        size *= 8

"""What a text thinks and what it says, where thoughts stand in ``<think>`` marks within it.

For templates that know nothing of reasoning; where one does, its own marks are read from the ids
(:mod:`torchrl_llm.data.formatter.respond`).
"""

from __future__ import annotations

import re

_MARKS = re.compile("<think>|</think>")


def split_thoughts(text: str) -> list[tuple[str, bool]]:
    """Cut a text into what is thought and what is said.

    A thought is ``<think>`` ... ``</think>``, or what stands in front of a first ``</think>``
    without an opening, which the prompt may have written. Neither mark opens or ends anything
    inside double quotes: there it is an argument of a call. A thought that does not end is said,
    for a model may call a tool while it thinks.

    Args:
        text: any text.

    Returns:
        The pieces in order, which make up the text, and whether each is a thought.

    Example:
        >>> split_thoughts("<think>no</think> yes")
        [('<think>no</think>', True), (' yes', False)]
    """
    pieces: list[tuple[str, bool]] = []
    at, opened = 0, -1
    seen, quoted = 0, False
    for mark in _MARKS.finditer(text):
        closes = mark[0] == "</think>"
        if opened < 0:
            quoted = _quoted(text, seen, mark.start(), quoted)
            seen = mark.start()
            if quoted:
                continue
        if opened < 0 and not closes:
            opened = mark.start()
        elif closes and (opened >= 0 or not pieces):
            pieces += [(text[at : max(opened, 0)], False)] if opened > at else []
            pieces.append((text[max(opened, at) : mark.end()], True))
            at, opened = mark.end(), -1
    return pieces + ([(text[at:], False)] if at < len(text) or not pieces else [])


def _quoted(text: str, seen: int, at: int, quoted: bool) -> bool:
    """Whether a place is inside a string in double quotes, which ends with its line at last.

    It was ``quoted`` at ``seen``; each character is counted once, whatever the number of places.
    """
    line = text.rfind("\n", seen, at) + 1
    begin = line or seen
    quotes = text.count('"', begin, at) - text.count('\\"', begin, at)
    return (quotes + (quoted and not line)) % 2 == 1

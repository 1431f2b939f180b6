"""A parser of the Python code blocks that a model wrote.

Models make mistakes with fences, so the parser accepts many forms: ``python``, ``python3`` or
``py`` in any case, followed by spaces and words; indented fences; a closing fence at the end of a
line of code; a last block without a closing fence. This module never compiles or runs the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from torchrl_llm.data.messages import spoken_text
from torchrl_llm.tools.call_parsers import Calls, Schemas, ToolParser
from torchrl_llm.tools.tool_call import ToolCall

_PYTHON = r"(?:python|py)(?:3(?:\.\d+)?)?\b"
# Every fence is tried once, from its start, so the run time is linear in the text.
_FENCE = r"(?:(?<!`)`{3,}+|(?<!~)~{3,}+)"
# A fence with a language: Python anywhere in a line, other languages at the beginning of a line.
_OPENING = re.compile(
    rf"(?P<fence>{_FENCE})[ \t]*+{_PYTHON}"
    rf"|^[ \t]*+(?P<other_fence>{_FENCE})[ \t]*+(?!{_PYTHON})[\w{{][^\n`]*+\n",
    re.IGNORECASE | re.MULTILINE,
)
_BLANK_BEGIN = re.compile(r"^[ \t]", re.MULTILINE)
_CLOSING = {mark: re.compile(rf"(?<!{mark})({mark}{{3,}}+)[ \t]*+$", re.MULTILINE) for mark in "`~"}


def python_blocks(text: str) -> list[str]:
    r"""Return the code of every Python block, in order.

    A block ends with a fence at least as long as its opening fence, alone on a line or at the end
    of a line. A block without such a fence ends with the text. Blocks in other languages are
    skipped with their contents. Common indentation is removed.

    Args:
        text: any text.

    Returns:
        The code of each block, without a newline at its end; empty blocks are left out.

    Example:
        >>> python_blocks("So:\n``` Python3 \nprint(1)```\nand ```py\nx = 2\nprint(x)")
        ['print(1)', 'x = 2\nprint(x)']
    """
    text = text.replace("\r\n", "\n") + "\n"
    blocks, at, line_end = [], 0, -1
    closings = {mark: _Closings(text, mark) for mark in "`~"}
    while found := _OPENING.search(text, at):
        if other := found["other_fence"]:
            closing = closings[other[0]].after(found.end(), len(other))
            at = closing.end() if closing else found.end()
            continue
        fence, begin = found["fence"], found.end()
        if line_end < begin:
            line_end = text.index("\n", begin)
        within = text.find(fence, begin, line_end)
        if within >= 0:  # the whole block is in one line
            code, at = text[begin:within], within + len(fence)
        else:
            closing = closings[fence[0]].after(begin, len(fence))
            code = text[line_end + 1 : closing.start() if closing else len(text)]
            at = closing.end() if closing else len(text)
        if code.strip():
            blocks.append(_dedented(code).strip("\n"))
    return blocks


class _Closings:
    """The fences of one character that may close a block; queries must have rising positions."""

    def __init__(self, text: str, mark: str) -> None:
        self._found = list(_CLOSING[mark].finditer(text))
        self._lengths = [len(found[1]) for found in self._found]
        self._longest = list(accumulate(reversed(self._lengths), max))[::-1]
        self._at = 0

    def after(self, place: int, length: int) -> re.Match[str] | None:
        """Return the first fence of at least a given length, from a position on."""
        at = self._at
        while at < len(self._found) and self._found[at].start() < place:
            at += 1
        self._at = at
        if at == len(self._found) or self._longest[at] < length:
            return None
        while self._lengths[at] < length:
            at += 1
        return self._found[at]


def _dedented(code: str) -> str:
    # Like textwrap.dedent, but without a compiled pattern, whose size grows with the indentation.
    if "\n" not in code:
        return code.lstrip(" \t")
    if not _BLANK_BEGIN.search(code):
        return code
    lines = [line if line.strip(" \t") else "" for line in code.split("\n")]
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line]
    # A prefix that the first and the last in sorted order share is shared by all.
    pairs = enumerate(zip(min(margins), max(margins), strict=False))
    margin = next((at for at, (a, b) in pairs if a != b), len(min(margins)))
    return "\n".join(line[margin:] for line in lines)


class CodeBlockParser(ToolParser):
    r"""Parses every Python code block as a call, except blocks within reasoning.

    Args:
        tool: name of the tool; it gets the code as its argument ``code``.

    Example:
        >>> message = {"role": "assistant", "content": "```python\nprint(1)\n```"}
        >>> CodeBlockParser().parse(message, {})[0].args
        {'code': 'print(1)'}
    """

    def __init__(self, tool: str = "python") -> None:
        self.tool = tool

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Return a call per block; the tag is the number of the block in the message."""
        blocks = python_blocks(spoken_text(message))
        return [
            ToolCall(self.tool, {"code": code}, tag=str(number))
            for number, code in enumerate(blocks, 1)
        ]

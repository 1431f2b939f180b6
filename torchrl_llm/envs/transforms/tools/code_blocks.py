"""Python code blocks out of what a model wrote.

Models are careless with fences, so the reading is generous: ``python``, ``python3`` or ``py`` in
any case, spaces and words behind it, indented fences, a closing fence at the end of a line of code,
a last block without one. The code is never compiled or run here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from torchrl_llm.envs.transforms.tools.call import BrokenCall, ToolCall
from torchrl_llm.envs.transforms.tools.parsers import ToolParser, spoken_text

__all__ = ["CodeBlockParser", "python_blocks"]

_PYTHON = r"(?:python|py)(?:3(?:\.\d+)?)?\b"
# Every fence is tried once, from its beginning: the time stays linear in the text.
_FENCE = r"(?:(?<!`)`{3,}+|(?<!~)~{3,}+)"
# A fence with a language: of Python anywhere in a line, of others at the beginning of one.
_OPENING = re.compile(
    rf"(?P<fence>{_FENCE})[ \t]*+{_PYTHON}(?P<rest>[^\n]*+)(?:\n|$)"
    rf"|^[ \t]*+(?P<other_fence>{_FENCE})[ \t]*+(?!{_PYTHON})[\w{{][^\n`]*+\n",
    re.IGNORECASE | re.MULTILINE,
)


def python_blocks(text: str) -> list[str]:
    r"""The code of every Python block, in order.

    A block ends with a fence of at least the length of its opening one, alone in a line or at the
    end of one; a block without such a fence ends with the text. Blocks of other languages are
    skipped with all that they hold. A common indentation is taken off.

    Args:
        text: any text.

    Returns:
        The code of each block, without a newline at its end; empty blocks are left out.

    Example:
        >>> python_blocks("So:\n``` Python3 \nprint(1)```\nand ```py\nx = 2\nprint(x)")
        ['print(1)', 'x = 2\nprint(x)']
    """
    text = text.replace("\r\n", "\n")
    blocks, at = [], 0
    never_closed: set[str] = set()
    while found := _OPENING.search(text, at):
        if other := found["other_fence"]:
            closing = None
            if other not in never_closed:
                closing = _closing(other).search(text, found.end())
                never_closed.update([] if closing else [other])
            at = closing.end() if closing else found.end()
            continue
        within = found["rest"].find(found["fence"])
        if within >= 0:  # all in one line
            code, at = found["rest"][:within], found.start("rest") + within + len(found["fence"])
        else:
            closing = _closing(found["fence"]).search(text, found.end())
            code = text[found.end() : closing.start() if closing else len(text)]
            at = closing.end() if closing else len(text)
        if code.strip():
            blocks.append(textwrap.dedent(code).strip("\n"))
    return blocks


def _closing(fence: str) -> re.Pattern[str]:
    mark = fence[0]
    return re.compile(rf"(?<!{mark}){mark}{{{len(fence)},}}+[ \t]*+$", re.MULTILINE)


class CodeBlockParser(ToolParser):
    r"""Every Python code block is a call; blocks within reasoning are not.

    Args:
        tool: name of the tool that gets the code as its argument ``code``.

    Example:
        >>> message = {"role": "assistant", "content": "```python\nprint(1)\n```"}
        >>> CodeBlockParser().parse(message, {})[0].args
        {'code': 'print(1)'}
    """

    def __init__(self, tool: str = "python") -> None:
        self.tool = tool

    def parse(
        self, message: Mapping[str, object], schemas: Mapping[str, Mapping[str, object]]
    ) -> list[ToolCall | BrokenCall]:
        """A call for each block, its number in the message as tag."""
        blocks = python_blocks(spoken_text(message))
        return [
            ToolCall(self.tool, {"code": code}, tag=str(number))
            for number, code in enumerate(blocks, 1)
        ]

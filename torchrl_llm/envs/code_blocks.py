"""Blocks of code in what a model wrote: fences as Markdown has them, forgiving about the details.

Next: :mod:`torchrl_llm.envs.reward.code` runs them against tests.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["PYTHON", "CodeBlock", "code_blocks"]

PYTHON = frozenset({"", "py", "py3", "python", "python3", "ipython"})
"""What stands behind the fence of Python; nothing may stand there too."""

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")


class CodeBlock(NamedTuple):
    """One block.

    Attributes:
        language: what stands behind its fence, in lower case; empty for nothing.
        code: its lines.
        closed: whether it has a closing fence; an answer that was cut has none.
    """

    language: str
    code: str
    closed: bool


def code_blocks(text: str) -> list[CodeBlock]:
    r"""All fenced blocks of a text, in time linear in its length.

    A fence may be indented and have blanks behind it, and the text may end before the last block
    does.

    Args:
        text: any text.

    Example:
        >>> code_blocks("First:\n```py \nx = 1\n```\nthen\n~~~\ny")
        [CodeBlock(language='py', code='x = 1\n', closed=True), \
CodeBlock(language='', code='y\n', closed=False)]
    """
    blocks: list[CodeBlock] = []
    fence, language, lines = "", "", []
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found:
                fence, language, lines = found[1], found[2].lower(), []
        elif found and found[1].startswith(fence) and not found[2]:
            blocks.append(CodeBlock(language, "".join(lines), True))
            fence = ""
        else:
            lines.append(line + "\n")
    if fence and any(line.strip() for line in lines):
        blocks.append(CodeBlock(language, "".join(lines), False))
    return blocks

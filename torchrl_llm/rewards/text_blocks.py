"""A response in parts: blocks of reasoning, answer blocks behind them, and all that is behind.

:func:`~torchrl_llm.rewards.reward_parser.extract_tags` gives the last block of each; this is for
rewards that care how many there are.
"""

from __future__ import annotations

from typing import NamedTuple


class ResponseParts(NamedTuple):
    """Parts of a response, each stripped.

    Attributes:
        think: contents of the blocks of reasoning.
        answer: contents of the answer blocks behind the last block of reasoning.
        behind: everything behind it.
    """

    think: list[str]
    answer: list[str]
    behind: str


def extract_blocks(text: str, tag: str) -> list[str]:
    """The contents of all complete ``<tag>...</tag>`` blocks, stripped.

    Args:
        text: any text; time is linear in its length, as that of a lazy pattern is not.
        tag: name of the tag.

    Example:
        >>> extract_blocks("<a>1</a> <a>2 <a> 3 </a> 4</a>", "a")
        ['1', '3']
    """
    pieces = text.split(f"</{tag}>")[:-1]
    found = (piece.rpartition(f"<{tag}>") for piece in pieces)
    return [content.strip() for _, opened, content in found if opened]


def split_response(response: str) -> ResponseParts:
    """The parts of a response.

    Args:
        response: what the model wrote; it may begin inside the reasoning, which the prompt opened.

    Example:
        >>> split_response("2+2</think>So: <answer>4</answer>")
        ResponseParts(think=['2+2'], answer=['4'], behind='So: <answer>4</answer>')
    """
    before, closed, behind = response.rpartition("</think>")
    think = extract_blocks(before + closed, "think")
    if closed and not think:
        think = [before.strip()]
    return ResponseParts(think, extract_blocks(behind, "answer"), behind.strip())

"""Shows held-out conversations that training has changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torchrl_llm._run_log import printable
from torchrl_llm.data.row_text import VERDICTS

NUM_COMPARED = 128
"""Number of held-out conversations that a run keeps for comparison."""

_MOST_BETTER = 2


def changed_conversations(before: Sequence[str], after: Sequence[str]) -> list[int]:
    r"""Choose the conversations that best show the effect of training.

    Args:
        before: conversations of the untrained model, each with a line of ``VERDICTS`` at its end.
        after: the same prompts, answered by the trained model.

    Returns:
        At most two indices of changed answers: answers that became correct come first, then answers
        with the same verdict. If an answer became wrong, the index of one such answer is added.

    Example:
        >>> was = ["1\n-> right", "2\n-> wrong", "3\n-> wrong", "4\n-> right"]
        >>> now = ["1\n-> right", "5\n-> wrong", "6\n-> right", "7\n-> wrong"]
        >>> changed_conversations(was, now)
        [2, 1, 3]
    """
    gains = {
        number: new.endswith(VERDICTS[True]) - old.endswith(VERDICTS[True])
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    }
    ordered = sorted(gains, key=lambda number: -gains[number])
    better = [number for number in ordered if gains[number] >= 0]
    return better[:_MOST_BETTER] + ordered[len(better) :][:1]


def compare_conversations(before: Sequence[str], after: Sequence[str]) -> str:
    r"""The conversations of :func:`changed_conversations`, before and after training, as text.

    Args:
        before: as for :func:`changed_conversations`.
        after: as for :func:`changed_conversations`.

    Example:
        >>> was, now = "user: 1+1\nassistant: 3\n-> wrong", "user: 1+1\nassistant: 2\n-> right"
        >>> print(compare_conversations([was], [now]))
        held-out conversation 1
          user: 1+1
          before training
            assistant: 3
            -> wrong
          after training
            assistant: 2
            -> right
    """
    if len(before) != len(after):
        return "there were other held-out prompts before training: conversations are not compared"
    parts = []
    for number in changed_conversations(before, after):
        old, new = before[number].splitlines(), after[number].splitlines()
        equal = takewhile(lambda lines: lines[0] == lines[1], zip(old, new, strict=False))
        same = len(list(equal))
        parts += [f"held-out conversation {number + 1}", *(f"  {line}" for line in old[:same])]
        for when, lines in (("before", old), ("after", new)):
            parts += [f"  {when} training", *(f"    {line}" for line in lines[same:])]
    unchanged = f"training changed none of the first {len(after)} held-out conversations"
    return "\n".join(map(printable, parts or [unchanged]))

"""Held-out conversations that training has changed: which are shown, and how."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torchrl_llm._run_log import printable

NUM_COMPARED = 128
"""Held-out conversations of a run that are kept to be compared."""

_MOST_BETTER = 2


def changed_conversations(
    before: Sequence[tuple[str, bool]], after: Sequence[tuple[str, bool]]
) -> list[int]:
    """Which conversations show best what training has changed.

    Args:
        before: text of each, and whether it was answered correctly, by the untrained model.
        after: the same prompts, answered by the trained model.

    Returns:
        At most two indices whose answer differs, those that became right first, then those that
        were and are right or wrong; and one more that became wrong, if there is one.

    Example:
        >>> was = [("1", True), ("2", False), ("3", False), ("4", True)]
        >>> changed_conversations(was, [("1", True), ("5", False), ("6", True), ("7", False)])
        [2, 1, 3]
    """
    pairs = list(zip(before, after, strict=True))
    differ = [number for number, (old, new) in enumerate(pairs) if old[0] != new[0]]
    gain = {number: pairs[number][1][1] - pairs[number][0][1] for number in differ}
    better = sorted((number for number in differ if gain[number] >= 0), key=lambda n: -gain[n])
    worse = [number for number in differ if gain[number] < 0]
    return better[:_MOST_BETTER] + worse[:1]


def compare_conversations(
    before: Sequence[tuple[str, bool]], after: Sequence[tuple[str, bool]]
) -> str:
    r"""The conversations of :func:`changed_conversations`, before and after training, as text.

    Args:
        before: as there.
        after: as there.

    Example:
        >>> was, now = ("user: 1+1\nassistant: 3", False), ("user: 1+1\nassistant: 2", True)
        >>> print(compare_conversations([was], [now]))
        held-out conversation 1
          user: 1+1
          before training, wrong
            assistant: 3
          after training, right
            assistant: 2
    """
    if len(before) != len(after):
        return "the held-out prompts are others than before training, and are not compared"
    parts = []
    for number in changed_conversations(before, after):
        (old, was_right), (new, is_right) = before[number], after[number]
        old, new = old.splitlines(), new.splitlines()
        same = [line for line, _ in takewhile(lambda two: two[0] == two[1], zip(old, new))]  # noqa: B905
        parts += [f"held-out conversation {number + 1}", *(f"  {line}" for line in same)]
        for when, lines, right in (("before", old, was_right), ("after", new, is_right)):
            parts.append(f"  {when} training, {'right' if right else 'wrong'}")
            parts += [f"    {line}" for line in lines[len(same) :]]
    if not parts:
        parts = [f"training changed none of the first {len(after)} held-out conversations"]
    return "\n".join(map(printable, parts))

"""Findings of checks, and their text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

LEVELS = ("error", "warning", "note", "ok")
_WIDTH = 100


class Finding(NamedTuple):
    """A finding of a check.

    Attributes:
        level: ``error``, the run fails or learns nothing; ``warning``, it may mislead or waste;
            ``note``, worth knowing; ``ok``, a measurement without a problem.
        key: dotted key to change, or to look at.
        text: the measurement, and the advice.
        check: name of the check.
    """

    level: Literal["error", "warning", "note", "ok"]
    key: str
    text: str
    check: str = ""


error, warning, note, ok = (partial(Finding, level) for level in LEVELS)


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by level, the worst first, each text once.

    Args:
        findings: findings of any checks.
    """
    unique: dict[tuple[str, str], Finding] = {}
    for each in findings:
        unique.setdefault((each.level, each.text), each)
    return sorted(unique.values(), key=lambda each: LEVELS.index(each.level))


def shown(findings: Sequence[Finding]) -> str:
    r"""Findings as text, with the number of findings per level.

    Args:
        findings: findings in the order of the text.

    Example:
        >>> print(shown([error("env", "It is gone.\nLook."), ok("seed", "It is 0.")]))
        error    env
            It is gone.
            Look.
        ok       seed: It is 0.
        1 error
    """
    lines: list[str] = []
    for level, key, text, check in findings:
        if level == "ok":
            lines += textwrap.wrap(f"ok       {key}: {text}", _WIDTH, subsequent_indent=" " * 9)
            continue
        lines.append(f"{level:8} {key or check}")
        for line in text.splitlines():  # code lines of a traceback keep their indentation
            indent = " " * (4 + len(line) - len(line.lstrip()))
            lines += textwrap.wrap(
                line.strip(), _WIDTH, initial_indent=indent, subsequent_indent=indent
            )
    counts = {level: sum(each.level == level for each in findings) for level in LEVELS[:3]}
    told = [f"{n} {level}{'s' * (n > 1)}" for level, n in counts.items() if n]
    return "\n".join([*lines, ", ".join(told) or "nothing was found"])

"""Finding of a check, and how findings are shown."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note", "ok"]
"""The run fails or learns nothing; it may mislead or waste; worth knowing; measured, and fine."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_WIDTH = 110


class Finding(NamedTuple):
    """What a check has to say.

    Attributes:
        level: how bad it is; ``ok`` is a measurement and no finding.
        key: dotted key to change, or to look at.
        text: what was measured, and what to do.
        check: name of the check.
    """

    level: Level
    key: str
    text: str
    check: str = ""


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of their levels, each text once.

    Args:
        findings: of any checks.

    Example:
        >>> both = [Finding("ok", "seed", "is 0"), Finding("error", "env", "is not there")]
        >>> [finding.level for finding in by_level([*both, *both])]
        ['error', 'ok']
    """
    unique = {(each.level, each.text): each for each in reversed(list(findings))}
    return sorted(reversed(unique.values()), key=lambda each: LEVELS.index(each.level))


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each level.

    Args:
        findings: each once.

    Example:
        >>> summary([Finding("error", "", ""), Finding("warning", "", ""), Finding("error", "", "")])
        '2 errors, 1 warning'
        >>> summary([Finding("ok", "", "")])
        'no errors, no warnings'
    """
    counts = {level: sum(each.level == level for each in findings) for level in LEVELS[:3]}
    shown = [f"{n} {level}{'s' * (n > 1)}" for level, n in counts.items() if n]
    return ", ".join(shown) or "no errors, no warnings"


def table(findings: Sequence[Finding]) -> str:
    """Findings as a table whose texts are folded to the width of the terminal.

    Args:
        findings: in the order in which they are shown.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for ratio in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
        drawn.add_column(**ratio)
    for level, key, text, _ in findings:
        drawn.add_row(Text(level, _COLOURS[level]), Text(key, "bold"), Text(text))
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = min(Console().width, _WIDTH) if terminal else _WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    with console.capture() as shown:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())

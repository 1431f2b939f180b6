"""Tables of results for people: names with values, or figures side by side."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence

import torch

from torchrl_llm._run_log import printable
from torchrl_llm.functional import wilson_interval


def text_table(
    rows: Iterable[Sequence[str]], *, header: Sequence[str] = (), num_names: int = 1
) -> str:
    """A table without vertical borders, so that no window width can break it.

    Args:
        rows: the texts of each row. The first text is the name of the row.
        header: titles of the columns, whose values are then numbers; none for names with values.
        num_names: columns at the left that hold names, not values.

    Returns:
        Text of several lines, in colours if standard output is a terminal.

    Example:
        >>> print(text_table([["steps", "100 in 0:14"], ["curve", "outputs/reward.png"]]))
        steps  100 in 0:14
        curve  outputs/reward.png
        >>> print(text_table([["accuracy", "0.863"], ["reward", "0.9"]], header=["", "sums"]))
                   sums
        accuracy  0.863
        reward      0.9
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(header or rows[0]):
        right = "right" if header and number >= num_names else "left"
        table.add_column(Text(title if header else ""), justify=right, no_wrap=True)
    for name, *values in rows:
        table.add_row(Text(printable(name), "bold"), *(Text(printable(v)) for v in values))
    terminal = sys.stdout is not None and sys.stdout.isatty()
    # Without a limit of the width: a wrapped path cannot be copied.
    console = Console(file=io.StringIO(), width=10_000, force_terminal=terminal)
    with console.capture() as drawn:
        console.print(table)
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def share_text(share: float, count: float) -> str:
    """A share with its 95 % confidence interval (Wilson's).

    Args:
        share: share of successes among independent trials.
        count: number of trials.

    Example:
        >>> share_text(0.9, 10)
        '0.900 (0.596 to 0.982)'
    """
    low, high = wilson_interval(torch.tensor(round(share * count)), torch.tensor(count))
    return f"{share:.3f} ({low.item():.3f} to {high.item():.3f})"

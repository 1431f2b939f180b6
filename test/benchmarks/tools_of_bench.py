"""The tools of ``bench_tools.py``, where its processes can import them."""

from __future__ import annotations

import time


def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "done"


def compute(rounds: int) -> int:
    """Keep the interpreter busy.

    Args:
        rounds: for how long.
    """
    total = 0
    for number in range(rounds):
        total = (total * 31 + number) % 1_000_003
    return total


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b

"""Hostile programs in tables, and what each must end as.

An entry has ``code``, perhaps ``limits``, and of the result: the ``status`` (one of these),
``stdout`` as a whole, its ``words`` or its ``length``, what is ``absent`` from it, what ``stderr``
holds, attributes that it ``equals``, and seconds (``from_s``, ``below_s``). What is ``full`` takes
long.
"""

from __future__ import annotations

import math

import pytest


def named(programs):
    """The names of programs, as parameters of a test."""
    slow = {name for name, program in programs.items() if program.get("full")}
    return [pytest.param(n, marks=[pytest.mark.full] if n in slow else []) for n in programs]


def check(attack, program, before=""):
    """Run a program behind some lines of code, and look at what it has come to."""
    result = attack(before + program["code"], **program.get("limits", {}))
    assert result.status in program.get("status", [result.status])
    assert result.stdout == program.get("stdout", result.stdout)
    assert result.stdout.split() == program.get("words", result.stdout.split())
    assert len(result.stdout) == program.get("length", len(result.stdout))
    assert not [text for text in program.get("absent", ()) if text in result.stdout]
    assert program.get("stderr", "") in result.stderr
    assert vars(result) == vars(result) | program.get("equals", {})
    assert program.get("from_s", 0) <= result.seconds < program.get("below_s", math.inf)

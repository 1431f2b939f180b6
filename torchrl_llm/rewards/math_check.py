"""Decides whether two answers are mathematically equal; runs in a separate process.

The module imports nothing from torchrl_llm, so the process loads neither torch nor TorchRL. The
process calls :func:`load_library` for its other imports before the first time limit starts. A
comparison may run forever or need too much memory: :mod:`torchrl_llm.rewards.math_reward` sets the
limits.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

# Decimals that differ before this digit are different numbers: 0.333333 is not 1/3.
_DECIMALS = 12


@cache
def load_library() -> ModuleType:
    """Import ``math_verify`` and SymPy before any time limit starts; this takes a second."""
    import math_verify

    # The package warns about a missing time limit; the process has a time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def same_mathematics(answer: str, truth: str) -> bool:
    """Whether an answer is mathematically equal to the reference.

    Args:
        answer: LaTeX or plain text, without an answer mark around it.
        truth: the reference, in the same form; the comparison is not symmetric (``5`` is an answer
            to ``x = 5``).

    Raises:
        MemoryError: when the memory limit was reached.
    """
    library = load_library()
    latex = library.LatexExtractionConfig(boxed_match_priority=0)
    what = (latex, library.ExprExtractionConfig())
    found, wanted = (
        [
            _with_imaginary_unit(each)
            for each in library.parse(f"\\boxed{{{text}}}", what, parsing_timeout=None)
        ]
        for text in (answer, truth)
    )
    return any(_equal(one, other) for one in wanted for other in found)


def _with_imaginary_unit(parsed: Any) -> Any:
    """Replace the variable ``i`` of an expression by the imaginary unit."""
    import sympy

    if not isinstance(parsed, sympy.Expr):
        return parsed
    named = {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.subs(named) if named else parsed


def _as_union(parsed: Any, other: Any) -> Any:
    """Convert ``x < 1 or x > 2`` to a set, if the other side is a set."""
    import sympy

    relations = parsed.args if isinstance(parsed, sympy.FiniteSet) else ()
    wanted = isinstance(other, (sympy.Interval, sympy.Union))
    if (
        wanted
        and relations
        and all(isinstance(each, sympy.core.relational.Relational) for each in relations)
    ):
        return sympy.Union(*(each.as_set() for each in relations))
    return parsed


def _equal(truth: Any, answer: Any) -> bool:
    try:
        truth, answer = _as_union(truth, answer), _as_union(answer, truth)
        return load_library().verify(
            [truth],
            [answer],
            float_rounding=_DECIMALS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # incomparable objects, such as a matrix and a number, are not equal
        return False

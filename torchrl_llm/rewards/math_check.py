"""Whether two answers are the same mathematics; runs in a process of its own.

It imports nothing of this package, so that such a process loads neither torch nor TorchRL, and what
it needs of others in :func:`load_library`, which the process calls before anything is timed. It may
run without end or without enough memory: :mod:`torchrl_llm.rewards.math_reward` sets the limits.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

# Decimals that differ before this place are different numbers: 0.333333 is not 1/3.
_DECIMALS = 12


@cache
def load_library() -> ModuleType:
    """Import ``math_verify``, and SymPy with it: a second that no answer's time limit pays for."""
    import math_verify

    # It warns that it has no time limit; the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def same_mathematics(answer: str, truth: str) -> bool:
    """Whether an answer is equal to the truth.

    Args:
        answer: LaTeX or plain text, without the mark of an answer around it.
        truth: the same; the comparison is not symmetric (``5`` is an answer to ``x = 5``).

    Raises:
        MemoryError: neither could be told within the memory that there is.
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
    """An expression in which ``i`` is the imaginary unit, and not a real variable."""
    import sympy

    if not isinstance(parsed, sympy.Expr):
        return parsed
    named = {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.subs(named) if named else parsed


def _as_union(parsed: Any, other: Any) -> Any:
    """``x < 1 or x > 2`` as the set that it describes, where it is compared with one."""
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
    except Exception:  # things that cannot be compared, a matrix and a number, are not equal
        return False

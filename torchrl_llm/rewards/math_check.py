"""Whether two answers are the same mathematics; runs in a process of its own.

It imports nothing of this package, so that such a process loads neither torch nor TorchRL. It may
run without end or without enough memory: :mod:`torchrl_llm.rewards.math_reward` sets the limits.
"""

from __future__ import annotations

import logging
from typing import Any


def _library() -> tuple[Any, ...]:
    """What is used of the packages, imported when the process starts, before anything is timed."""
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns that it has no time limit; the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    what = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return sympy, parse, verify, what


_sympy, _parse, _verify, _WHAT = _library()
# Decimals that differ before this place are different numbers: 0.333333 is not 1/3.
_DECIMALS = 12


def same_mathematics(answer: str, truth: str) -> bool:
    """Whether an answer is equal to the truth.

    Args:
        answer: LaTeX or plain text, without the mark of an answer around it.
        truth: the same; the comparison is not symmetric (``5`` is an answer to ``x = 5``).

    Raises:
        MemoryError: neither could be told within the memory that there is.
    """
    found, wanted = (
        [
            _with_imaginary_unit(each)
            for each in _parse(f"\\boxed{{{text}}}", _WHAT, parsing_timeout=None)
        ]
        for text in (answer, truth)
    )
    return any(_equal(one, other) for one in wanted for other in found)


def _with_imaginary_unit(parsed: Any) -> Any:
    """An expression in which ``i`` is the imaginary unit, and not a real variable."""
    if not isinstance(parsed, _sympy.Expr):
        return parsed
    named = {symbol: _sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.subs(named) if named else parsed


def _as_union(parsed: Any, other: Any) -> Any:
    """``x < 1 or x > 2`` as the set that it describes, where it is compared with one."""
    relations = parsed.args if isinstance(parsed, _sympy.FiniteSet) else ()
    wanted = isinstance(other, (_sympy.Interval, _sympy.Union))
    if (
        wanted
        and relations
        and all(isinstance(each, _sympy.core.relational.Relational) for each in relations)
    ):
        return _sympy.Union(*(each.as_set() for each in relations))
    return parsed


def _equal(truth: Any, answer: Any) -> bool:
    try:
        truth, answer = _as_union(truth, answer), _as_union(answer, truth)
        return _verify(
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

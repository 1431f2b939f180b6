"""Whether two answers are the same mathematics; runs in a process of its own.

It imports nothing of this package, so that such a process loads neither torch nor TorchRL. It may
run without end or without enough memory: :mod:`torchrl_llm.rewards.math_reward` sets the limits.
"""

from __future__ import annotations

import logging
from typing import Any


def _library() -> tuple[Any, ...]:
    """What is used of the package, imported when the process starts, before anything is timed."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns that it has no time limit; the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    what = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return parse, verify, what


_parse, _verify, _WHAT = _library()


def same_mathematics(answer: str, truth: str) -> bool:
    """Whether an answer is equal to the truth.

    Args:
        answer: LaTeX or plain text, without the mark of an answer around it.
        truth: the same; the comparison is not symmetric (``5`` is an answer to ``x = 5``).

    Raises:
        MemoryError: neither could be told within the memory that there is.
    """
    found, wanted = (
        _parse(f"\\boxed{{{text}}}", _WHAT, parsing_timeout=None) for text in (answer, truth)
    )
    return any(_equal(one, other) for one in wanted for other in found)


def _equal(truth: object, answer: object) -> bool:
    try:
        return _verify([truth], [answer], timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # things that cannot be compared, a matrix and a number, are not equal
        return False

"""Figures of an evaluation besides those that each has: one function each, found by its name.

A function of the answers to one prompt (records as of
:func:`~torchrl_llm.evaluation.answer_record`) gives the prompt's value: a bool, a number, or
``None`` where it has none. The figure is the mean over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm._registry import register


@register("figures", "pass^k")
def all_right(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all answers to a prompt are right (arXiv:2406.12045).

    Args:
        answers: of one prompt.

    Example:
        >>> all_right([{"success": True, "valid": True}, {"success": False, "valid": True}])
        False
    """
    return all(answer["success"] and answer["valid"] for answer in answers)

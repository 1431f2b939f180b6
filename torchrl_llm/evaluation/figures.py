"""Additional figures of an evaluation: one function each, registered by name.

Each function takes the answers to one prompt (records of
:func:`~torchrl_llm.evaluation.answer_record`) and returns the prompt's value: a bool, a number, or
``None`` for no value. The figure is the mean over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm._registry import register


@register("figures", "pass^k")
def all_right(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all answers to a prompt are correct (arXiv:2406.12045).

    Args:
        answers: records of one prompt.

    Example:
        >>> all_right([{"success": True, "valid": True}, {"success": False, "valid": True}])
        False
    """
    return all(answer["success"] and answer["valid"] for answer in answers)

"""Instruction following that a program can check (IFEval, arXiv:2311.07911).

All 25 instructions of the paper are functions of one file; importing this package registers
them. The names are those of the dataset, so its rows are scored as they are, with the verdicts of
the program that published accuracies are by. A policy can learn what that program lets pass:
``<<>> >>`` is a title, ``---`` a bullet, and what is of no language is of every language.
"""

from torchrl_llm.rewards.ifeval import paper_instructions  # noqa: F401
from torchrl_llm.rewards.ifeval.ifeval_scorer import (
    IFEvalData,
    IFEvalExample,
    IFEvalScoreData,
    IfEvalScorer,
)
from torchrl_llm.rewards.ifeval.instructions import (
    INSTRUCTIONS,
    Instruction,
    Verdict,
    check,
    instruction,
    loose_forms,
    verify,
)

__all__ = [
    "INSTRUCTIONS",
    "IFEvalData",
    "IFEvalExample",
    "IFEvalScoreData",
    "IfEvalScorer",
    "Instruction",
    "Verdict",
    "check",
    "instruction",
    "loose_forms",
    "verify",
]

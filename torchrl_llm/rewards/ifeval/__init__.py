"""Instruction following that a program can check (IFEval, arXiv:2311.07911).

All 25 instructions of the paper are functions of one file; importing this package registers
them. The names are those of the dataset, so its rows are scored as they are. There are two
checkers. ``"published"`` gives the verdicts of the program that published accuracies are by
(``published_instructions``): use it to compare. ``"strict"`` is the
better reward, for where the words of an instruction and that program part, the words win:

- bullets need white space behind their mark, so ``---`` and ``*emphasis*`` are none;
- ``***so***`` is one highlight, ``[]`` no placeholder, ``NaN`` no JSON, and an Arabic or a Chinese
  comma is a comma;
- capitals and lower case are looked at in English of six words or more, fewer are taken as English
  if they are ASCII; a response without letters is in no language;
- the number of a list is no sentence, and abbreviations end none.
"""

from torchrl_llm.rewards.ifeval import paper_instructions, published_instructions  # noqa: F401
from torchrl_llm.rewards.ifeval.ifeval_scorer import (
    IFEvalData,
    IFEvalExample,
    IFEvalScoreData,
    IfEvalScorer,
)
from torchrl_llm.rewards.ifeval.instructions import (
    INSTRUCTIONS,
    PUBLISHED,
    Instruction,
    Verdict,
    check,
    instruction,
    loose_forms,
    verify,
)

# The five families were files of their own.
content = keywords = language = length = markup = paper_instructions

__all__ = [
    "INSTRUCTIONS",
    "PUBLISHED",
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

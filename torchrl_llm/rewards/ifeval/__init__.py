"""Instruction following that a program can check (IFEval, arXiv:2311.07911).

All 25 instructions of the paper are functions of one file; importing this package registers them.
They have the names of the dataset, so rows of the dataset can be scored directly. The verdicts
equal those of the program that computed the published accuracies. A policy can exploit the gaps of
that program: ``<<>> >>`` is a title, ``---`` is a bullet, and a text without a detected language
matches every language.
"""

from torchrl_llm._imports import lazy
from torchrl_llm.rewards.ifeval import paper_instructions  # noqa: F401

lazy(__name__)

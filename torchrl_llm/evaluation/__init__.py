"""Evaluation of policies on held-out prompts."""

from __future__ import annotations

from torchrl_llm.evaluation.evaluate import Evaluation, Outcome, answer_record, evaluate, pass_at_k

__all__ = ["Evaluation", "Outcome", "answer_record", "evaluate", "pass_at_k"]

"""Evaluation of policies: accuracy on held-out prompts, and conversations with a person."""

from __future__ import annotations

from torchrl_llm.evaluation.conversation import Conversation
from torchrl_llm.evaluation.evaluate import Evaluation, Outcome, answer_record, evaluate, pass_at_k

__all__ = ["Conversation", "Evaluation", "Outcome", "answer_record", "evaluate", "pass_at_k"]

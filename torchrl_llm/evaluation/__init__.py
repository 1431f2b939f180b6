"""Evaluation: accuracy on held-out prompts, loss on held-out answers, and conversations."""

from __future__ import annotations

from torchrl_llm.evaluation.conversation import Conversation
from torchrl_llm.evaluation.evaluate import Evaluation, Outcome, answer_record, evaluate, pass_at_k
from torchrl_llm.evaluation.held_out_loss import HeldOutLoss, held_out_loss

__all__ = [
    "Conversation",
    "Evaluation",
    "HeldOutLoss",
    "Outcome",
    "answer_record",
    "evaluate",
    "held_out_loss",
    "pass_at_k",
]

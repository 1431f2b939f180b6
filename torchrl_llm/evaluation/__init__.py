"""Evaluation of policies on held-out prompts, and of their predictions of held-out answers."""

from __future__ import annotations

from torchrl_llm.evaluation.evaluate import Evaluation, Outcome, answer_record, evaluate, pass_at_k
from torchrl_llm.evaluation.held_out_loss import HeldOutLoss, held_out_loss

__all__ = [
    "Evaluation",
    "HeldOutLoss",
    "Outcome",
    "answer_record",
    "evaluate",
    "held_out_loss",
    "pass_at_k",
]

"""Evaluation of policies on held-out prompts."""

from __future__ import annotations

from torchrl_llm.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]

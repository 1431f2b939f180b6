"""Evaluation: accuracy on held-out prompts, loss on held-out answers, and conversations."""

from torchrl_llm._imports import lazy

lazy(__name__)

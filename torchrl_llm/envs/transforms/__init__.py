"""Transforms of chat environments: data, versions, turns, tokens, reference log-probs."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Agents: frozen records that define how a model acts in any environment."""

from torchrl_llm._imports import lazy

lazy(__name__)

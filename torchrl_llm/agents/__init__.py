"""Agents: frozen records that say how a model acts, and bring that into any environment."""

from torchrl_llm._imports import lazy

lazy(__name__)

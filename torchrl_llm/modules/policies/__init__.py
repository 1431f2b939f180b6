"""Policies: rows of a tensordict through a backend and back."""

from torchrl_llm._imports import lazy

lazy(__name__)

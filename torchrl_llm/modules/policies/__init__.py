"""Policies: send rows of a tensordict to a backend, and write its answers into the rows."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Backends: models that take and return token ids."""

from torchrl_llm._imports import lazy

lazy(__name__)

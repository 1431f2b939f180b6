"""Policies over language models, and the backends that run them."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Channels from collecting processes to the training process."""

from torchrl_llm._imports import lazy

lazy(__name__)

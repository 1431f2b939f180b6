"""Transports: how rows get from the processes that collect to the one that trains."""

from torchrl_llm._imports import lazy

lazy(__name__)

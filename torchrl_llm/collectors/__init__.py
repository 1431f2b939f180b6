"""Collectors: they roll out a policy in an environment, into batches or a buffer."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Collectors: an environment and a policy, turned into batches or into rows of a buffer."""

from torchrl_llm._imports import lazy

lazy(__name__)

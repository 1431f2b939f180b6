"""Advantage estimators: inverse transforms of a replay buffer that turn rewards into advantages."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Rewards: a base class that turns failures into data, parsers per task, and components."""

from torchrl_llm._imports import lazy

lazy(__name__)

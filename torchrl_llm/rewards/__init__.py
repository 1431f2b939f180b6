"""Rewards: a base class that records failures as data, parsers for tasks, and components."""

from torchrl_llm._imports import lazy

lazy(__name__)

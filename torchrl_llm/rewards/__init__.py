"""Rewards: a base that makes failures data, one parser per task, and components to add up."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Rollouts for people: a page that a browser opens, and one row in a terminal."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Shows rollouts in an HTML page, and a single row in the terminal."""

from torchrl_llm._imports import lazy

lazy(__name__)

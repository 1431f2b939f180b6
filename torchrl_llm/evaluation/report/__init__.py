"""Shows rollouts: an HTML page for a browser, and a row in the terminal."""

from torchrl_llm._imports import lazy

lazy(__name__)

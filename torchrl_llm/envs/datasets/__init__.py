"""Tasks over datasets, and the loading that they share."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Weight updates from the trainer to the sampling policy."""

from torchrl_llm._imports import lazy

lazy(__name__)

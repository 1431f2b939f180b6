"""Weight updates: from the trainer's weights to the policy that samples."""

from torchrl_llm._imports import lazy

lazy(__name__)

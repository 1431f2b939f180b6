"""Tools: what a model can call, how it writes a call, and how the answer comes back."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Data: conversations, tokens with their record, and the parts of replay buffers."""

from torchrl_llm._imports import lazy

lazy(__name__)

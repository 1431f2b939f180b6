"""Data: conversations, records of tokens, views of batches, and replay buffers."""

from torchrl_llm._imports import lazy

lazy(__name__)

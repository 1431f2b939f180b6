"""Replay buffers of rows: the buffer, joined turns, and the queues of grouping transforms."""

from torchrl_llm._imports import lazy

lazy(__name__)

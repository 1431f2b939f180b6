"""Protocols of the gateway: OpenAI's chat, completions and responses, and Anthropic's messages."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Gateway: an HTTP endpoint for any policy; each program session becomes a row."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Environments of other projects, driven through their own interfaces."""

from torchrl_llm._imports import lazy

lazy(__name__)

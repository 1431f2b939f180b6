"""Environments: chats, tasks, games, remote worlds and transforms."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Tools: callable functions and services, parsers of calls, and execution."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Games: rules as pure functions, and environments in which language models play them."""

from torchrl_llm._imports import lazy

lazy(__name__)

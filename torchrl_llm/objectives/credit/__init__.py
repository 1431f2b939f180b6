"""Credit: from rewards to advantages, as inverse transforms of a replay buffer."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Pure tensor functions: the mathematics of post-training. They need torch and nothing else.

Every function takes tensors and returns tensors; shapes, units (nats) and papers are in the
docstrings. Classes that read tensordicts and call models live in :mod:`torchrl_llm.objectives`.
"""

from torchrl_llm._imports import lazy

lazy(__name__)

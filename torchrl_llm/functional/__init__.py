"""Pure tensor functions: the mathematics of post-training. They need only torch.

Every function takes tensors and returns tensors. The docstrings give shapes, units (nats) and
papers. Classes that read tensordicts and call models are in :mod:`torchrl_llm.objectives`.
"""

from torchrl_llm._imports import lazy

lazy(__name__)

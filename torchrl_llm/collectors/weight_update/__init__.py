"""TorchRL's names of weight updaters; :mod:`torchrl_llm.weights` implements them."""

from torchrl_llm._imports import lazy

lazy(__name__)

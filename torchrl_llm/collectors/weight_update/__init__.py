"""TorchRL's names of weight updaters; the machinery is :mod:`torchrl_llm.weights`."""

from torchrl_llm._imports import lazy

lazy(__name__)

"""Builds device, problems, environments and policy from a recipe's configuration.

Each function reads the groups that it needs (``env``, ``model``, ``train``, ...) of
``TrainedConfig`` or ``SampledConfig``, so that a recipe with additional groups can share them; see
``sota-implementations/expert-iteration``.
"""

from torchrl_llm._imports import lazy

lazy(__name__)

"""What recipes build of a configuration: device, problems, environments and policy.

Each function reads the groups that it needs (``env``, ``model``, ``train``, ...) of
``TrainedConfig`` or ``SampledConfig``, so that a recipe with
other groups besides can share them; see ``sota-implementations/expert-iteration``.
"""

from torchrl_llm._imports import lazy

lazy(__name__)

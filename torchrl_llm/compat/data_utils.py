"""The same names as in TorchRL's ``data.llm.utils``; see the modules that they come from."""

from __future__ import annotations

from torchrl_llm.compat.rollout_from_model import RolloutFromModel
from torchrl_llm.data.kl_controllers import AdaptiveKLController, ConstantKLController

__all__ = ["AdaptiveKLController", "ConstantKLController", "RolloutFromModel"]

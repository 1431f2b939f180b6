"""The same names as in TorchRL's ``data.llm.utils``; see the modules that they come from."""

from __future__ import annotations

from torchrl_llm.data.kl_controllers import AdaptiveKLController, ConstantKLController
from torchrl_llm.data.rollout_from_model import RolloutFromModel

__all__ = ["AdaptiveKLController", "ConstantKLController", "RolloutFromModel"]

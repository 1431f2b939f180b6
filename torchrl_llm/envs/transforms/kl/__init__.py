"""Divergence from a reference policy: measured beside the rows, penalised in the reward."""

from torchrl_llm.envs.transforms.kl.computation import KLComputation
from torchrl_llm.envs.transforms.kl.kl_reward import KLRewardTransform
from torchrl_llm.envs.transforms.kl.kl_transform import KLTransform
from torchrl_llm.envs.transforms.kl.retrieve import RetrieveKL
from torchrl_llm.envs.transforms.retrieve_log_prob import RetrieveLogProb

__all__ = [
    "KLComputation",
    "KLRewardTransform",
    "KLTransform",
    "RetrieveKL",
    "RetrieveLogProb",
]

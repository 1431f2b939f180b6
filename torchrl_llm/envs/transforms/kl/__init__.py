"""Divergence from a reference policy: measured per row, penalised in the reward."""

from torchrl_llm.envs.transforms.kl.kl_penalty import (
    KLComputation,
    KLRewardTransform,
    KLTransform,
    RetrieveKL,
)
from torchrl_llm.envs.transforms.kl.ray_kl import RayKLRewardTransform, RayRetrieveKL
from torchrl_llm.envs.transforms.retrieve_scores import RetrieveLogProb

__all__ = [
    "KLComputation",
    "KLRewardTransform",
    "KLTransform",
    "RayKLRewardTransform",
    "RayRetrieveKL",
    "RetrieveKL",
    "RetrieveLogProb",
]

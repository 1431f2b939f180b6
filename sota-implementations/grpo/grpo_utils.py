"""Parts of the GRPO recipes: the buffer, the curriculum and metrics.

:mod:`torchrl_llm.recipes.builders` builds policy, environments and evaluation, as for every recipe;
:mod:`torchrl_llm.recipes.algorithm_parts` builds the algorithm.
"""

from __future__ import annotations

from typing import Any

from torchrl_llm.algorithms import Algorithm
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs.transforms import DataLoadingPrimer, KLComputation
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import GRPOConfig, GRPOGroups
from torchrl_llm.recipes.algorithm_parts import make_algorithm as make_algorithm
from torchrl_llm.recipes.builders import make_step_buffer
from torchrl_llm.trainers.curriculum import Curriculum
from torchrl_llm.trainers.ranks import ALONE, Ranks


def make_buffer(config: GRPOConfig, algorithm: Algorithm) -> ReplayBuffer:
    """A buffer for the training rows of one step."""
    return algorithm.append_to(make_step_buffer(config))


def make_curriculum(
    config: GRPOGroups, algorithm: Algorithm, primer: DataLoadingPrimer | None, ranks: Ranks = ALONE
) -> Curriculum:
    """Make the object that reports results to the order of the prompts, if it depends on them.

    Args:
        config: configuration with ``curriculum``.
        algorithm: its advantage estimator may track success rates.
        primer: draws the prompts.
        ranks: the processes that train together.
    """
    follows = config.curriculum.follows_results
    return Curriculum(primer if follows else None, algorithm.credit, ranks)


def parts_of(policy: TransformersWrapper) -> dict[str, Any]:
    """Parts of the policy in a checkpoint besides its model."""
    return {} if policy.value_head is None else {"value_head": policy.value_head}


def algorithm_metrics(algorithm: Algorithm) -> dict[str, float]:
    """The current weight of the divergence in the reward, if there is one."""
    for transform in algorithm.transforms:
        if isinstance(transform, KLComputation):
            return {"train/kl_coeff": transform.coeff}
    return {}

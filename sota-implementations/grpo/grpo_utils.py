"""Parts of the GRPO recipes: the algorithm, with the transforms that it needs, and the buffer.

Policy, environments and evaluation are built by :mod:`torchrl_llm.recipes.builders`, as those of
every recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrl.envs import Transform

from torchrl_llm.algorithms import Algorithm
from torchrl_llm.data.kl_controllers import AdaptiveKLController
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms import (
    DataLoadingPrimer,
    KLComputation,
    OverlongPenalty,
    RetrieveLogProb,
    RetrieveValues,
)
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import SPOAdvantage
from torchrl_llm.recipes import GRPOConfig, GRPOGroups
from torchrl_llm.recipes.builders import make_reference, make_step_buffer
from torchrl_llm.rewards import TokenRewards
from torchrl_llm.trainers.curriculum import Curriculum
from torchrl_llm.trainers.ranks import ALONE, Ranks


def make_algorithm(
    config: GRPOConfig, policy: TransformersWrapper, learner: TransformersWrapper | None = None
) -> Algorithm:
    """The configured credit and loss, and the transforms that write what they read.

    Scores are those of ``policy``; ``learner``, by default the same, is what the loss trains.
    """
    reference = make_reference(config, policy) if config.needs_reference else None
    credit = config.build_credit()
    if isinstance(credit, SPOAdvantage):
        credit.watch(policy)  # what it knows fades as the policy moves
    return Algorithm(
        name=f"{config.loss.type} with {config.advantage.type}",
        loss=config.build_loss(policy if learner is None else learner),
        credit=credit,
        transforms=tuple(read_by_credit(config, policy, reference)),
        scorers=tuple(read_by_the_loss(config, policy, reference)),
    )


def read_by_credit(
    config: GRPOConfig, policy: TransformersWrapper, reference: TokenScorer | None
) -> Iterator[Transform]:
    """Transforms that change the reward, or write values."""
    reward = config.reward
    if reward.per_token and config.advantage.reads_tokens:
        yield TokenRewards()
    if reward.overlong_cache is not None:
        yield OverlongPenalty(config.inference_model.max_tokens, reward.overlong_cache)
    if reward.kl_coeff:
        coeff: float | AdaptiveKLController = reward.kl_coeff
        if reward.kl_target is not None:
            coeff = AdaptiveKLController(
                init_kl_coef=coeff, target=reward.kl_target, horizon=reward.kl_horizon
            )
        yield RetrieveLogProb(reference, token_budget=config.train.micro_token_budget)
        yield KLComputation(coeff=coeff, reduction=reward.kl_reduction)
    if config.advantage.type == "gae":
        yield RetrieveValues(policy, token_budget=config.train.micro_token_budget)


def read_by_the_loss(
    config: GRPOConfig, policy: TransformersWrapper, reference: TokenScorer | None
) -> Iterator[Transform]:
    """Transforms that score the rows that are trained, before their first update."""
    budget = config.train.micro_token_budget
    if config.train.kl_to_ref_coeff and not config.reward.kl_coeff:  # which has scored them already
        yield RetrieveLogProb(reference, token_budget=budget)
    if config.stores_proximal:
        yield RetrieveLogProb(
            policy, log_probs_full_key=("prox_log_probs", "full"), root=True, token_budget=budget
        )


def make_buffer(config: GRPOConfig, algorithm: Algorithm) -> ReplayBuffer:
    """A buffer of one step's rows, which reach it as rows to train on."""
    return algorithm.append_to(make_step_buffer(config))


def make_curriculum(
    config: GRPOGroups,
    algorithm: Algorithm,
    primer: DataLoadingPrimer | None,
    ranks: Ranks = ALONE,
) -> Curriculum:
    """What tells results to the order of the prompts; nothing, where that does not follow them.

    Args:
        config: its ``curriculum``.
        algorithm: whose credit may know success rates.
        primer: draws the prompts.
        ranks: the processes that train together.
    """
    follows = config.curriculum.follows_results
    return Curriculum(primer if follows else None, algorithm.credit, ranks)


def parts_of(policy: TransformersWrapper) -> dict[str, Any]:
    """What a checkpoint holds of the policy besides its model."""
    return {} if policy.value_head is None else {"value_head": policy.value_head}


def algorithm_metrics(algorithm: Algorithm) -> dict[str, float]:
    """The present weight of the divergence in the reward, where there is one."""
    for transform in algorithm.transforms:
        if isinstance(transform, KLComputation):
            return {"train/kl_coeff": transform.coeff}
    return {}

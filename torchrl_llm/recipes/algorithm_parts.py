"""Algorithm of a GRPO-like configuration, with the transforms that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from torchrl.envs import Transform

from torchrl_llm.algorithms import Algorithm
from torchrl_llm.data.kl_controllers import AdaptiveKLController
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms import (
    KLComputation,
    OverlongPenalty,
    RetrieveLogProb,
    RetrieveValues,
)
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import SPOAdvantage
from torchrl_llm.recipes.builders import make_reference
from torchrl_llm.recipes.grpo_config import GRPOConfig
from torchrl_llm.rewards import TokenRewards


def make_algorithm(
    config: GRPOConfig, policy: TransformersWrapper, learner: TransformersWrapper | None = None
) -> Algorithm:
    """Build the configured advantage estimator and loss, and the transforms for their inputs.

    Args:
        config: configuration of the recipe.
        policy: scores the rows.
        learner: module that the loss trains; ``policy`` by default.
    """
    reference = make_reference(config, policy) if config.needs_reference else None
    credit = config.build_credit()
    if isinstance(credit, SPOAdvantage):
        credit.watch(policy)  # the estimator's values decay as the policy changes
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
    """Return the transforms that run before the estimator: they change the reward or write values.

    Args:
        config: configuration of the recipe.
        policy: computes the values if the estimator reads them.
        reference: reference of the divergence.
    """
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
    """Return the transforms that score the training rows before their first update.

    Args:
        config: configuration of the recipe.
        policy: scores the rows.
        reference: reference of the divergence.
    """
    budget = config.train.micro_token_budget
    reads = config.train.kl_to_ref_coeff or config.loss.compares_pairs
    if reads and not config.reward.kl_coeff:  # has already scored them
        yield RetrieveLogProb(reference, token_budget=budget)
    if config.stores_proximal:
        yield RetrieveLogProb(
            policy, log_probs_full_key=("prox_log_probs", "full"), root=True, token_budget=budget
        )

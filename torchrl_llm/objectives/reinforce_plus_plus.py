"""REINFORCE++: PPO's clipped surrogate, with advantages normalised over the batch."""

from __future__ import annotations

from typing import Unpack

from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.grpo import GRPOLoss


@register("losses", "reinforce_plus_plus")
class ReinforcePlusPlusLoss(GRPOLoss):
    """The loss of REINFORCE++: PPO's clipped surrogate, a mean over each response's tokens.

    arXiv:2501.03262, the objective of section 3. REINFORCE++ differs from PPO in the advantage. The
    advantage needs no critic, is normalised over the whole batch
    (:class:`~torchrl_llm.objectives.credit.BatchNormalizedReturn`), and has the KL to the reference
    in the reward. The variant with a baseline subtracts the group's mean first and has the KL in
    the loss, as ``k2``: ``kl_to_ref_coeff=..., kl_estimator="k2"``.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.GRPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> ReinforcePlusPlusLoss(CausalScorer(Qwen2ForCausalLM(config))).aggregation
        'sequence_mean'
    """

    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        aggregation: base.Aggregation = "sequence_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(
            actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, **settings
        )

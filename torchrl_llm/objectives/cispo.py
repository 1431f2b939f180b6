"""CISPO: clips the importance weight, which is a constant, so every token keeps its gradient."""

from __future__ import annotations

from typing import Unpack

from torchrl_llm import functional as F
from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.grpo import GRPOLoss


class CISPOLossOutput(base.PolicyLossOutput):
    """Output of :class:`CISPOLoss`; ``clip_fraction`` is the share of clipped weights."""


@register("losses", "cispo")
class CISPOLoss(base.PolicyGradientLoss):
    r"""The CISPO loss, :math:`-\mathrm{sg}[\min(r, 1 + h)] A \log \pi` per token.

    arXiv:2506.13585 equations 4 and 5, a mean over tokens. The weight is a constant for autograd,
    so no token loses its gradient. The paper has no lower bound and does not publish its upper
    bound. The default of 0.2 is Ludic's. Ludic's ScaleRL preset uses 0.28. TRL proposes 4.0 (it
    writes the bound itself, ``epsilon_high=5.0``).

    Ludic averages over each sample's tokens first: ``aggregation="sequence_mean"``. TorchRL's
    ``CISPOLoss`` differentiates through the clip, so clipped tokens have no gradient. The method
    was made to avoid this.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, the weight is in ``[1 - low, 1 + high]``; ``low=None`` for no
            lower bound; a single number sets both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> CISPOLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (None, 0.2)
    """

    output_type = CISPOLossOutput
    clip_epsilon = base.Bounds(max_low=1.0, open_low=True)
    clip_epsilon_low = GRPOLoss.clip_epsilon_low
    clip_epsilon_high = GRPOLoss.clip_epsilon_high

    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float | None, float] = (None, 0.2),
        aggregation: base.Aggregation = "token_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.cispo`."""
        return base.Surrogate(
            *F.cispo(tokens.log_probs, tokens.log_ratio, tokens.advantage, *self.clip_epsilon)
        )

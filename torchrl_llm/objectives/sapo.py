"""SAPO: a soft gate on each token's ratio instead of a clip."""

from __future__ import annotations

from typing import Annotated, Unpack

import torch

from torchrl_llm import functional as F
from torchrl_llm._checked import Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base


@register("losses", "sapo")
class SAPOLoss(base.PolicyGradientLoss):
    r"""The SAPO loss, :math:`-\frac{4}{\tau} \sigma(\tau (r - 1)) A` per token.

    arXiv:2511.20347 section 3, a mean over each sequence's tokens and then over sequences. The
    temperature :math:`\tau` is ``tau_pos`` for a positive advantage and ``tau_neg`` otherwise.
    ``tau_neg`` is larger, because a lower probability of one token raises the probability of many
    unlikely tokens. At ratio one, the gradient equals the gradient of REINFORCE; it becomes smaller
    smoothly on both sides. ``clip_fraction`` is always 0.

    Ludic sums over a sequence's tokens: ``aggregation="sequence_sum"``. TRL's
    ``loss_type="sapo"`` is this loss.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        tau_pos: temperature where the advantage is positive.
        tau_neg: temperature of the other tokens.
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
        >>> SAPOLoss(CausalScorer(Qwen2ForCausalLM(config))).tau_neg
        1.05
    """

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        tau_pos: Annotated[float, Gt(0)] = 1.0,
        tau_neg: Annotated[float, Gt(0)] = 1.05,
        aggregation: base.Aggregation = "sequence_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.tau_pos, self.tau_neg = float(tau_pos), float(tau_neg)

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.sapo`."""
        loss = F.sapo(tokens.log_ratio, tokens.advantage, self.tau_pos, self.tau_neg)
        return base.Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))

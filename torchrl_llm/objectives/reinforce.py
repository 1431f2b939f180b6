"""REINFORCE: the score-function loss with an importance weight."""

from __future__ import annotations

from typing import Annotated, Literal, Unpack

from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm._checked import Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import policy_loss as base

# The largest weight, 5e8: an infinite weight times an advantage of 0 would be NaN.
_MAX_WEIGHT = 2.0**29


@register("losses", "reinforce")
class ReinforceLoss(base.PolicyGradientLoss):
    r"""The score-function loss :math:`-\mathrm{sg}[w] A \log \pi` with an importance weight ``w``.

    Williams (1992), with a weight that makes it correct for rows of an older policy. The gradient
    is summed over a sequence's tokens and averaged over sequences. On rows of the current policy
    all weights are one, and the gradient equals the gradient of every clipped loss in torchrl_llm.

    Ludic's preset has ``level="sequence"``: the product of a sequence's ratios. This weight is
    unbiased but unbounded on long responses, so set a ``truncation``. RLOO (arXiv:2402.14740) is
    this loss with leave-one-out advantages.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        level: the weight: ``"token"``, the token's ratio of current to sampled probability;
            ``"sequence"``, the product of the ratios of its row; ``"none"``, no weight.
        truncation: largest weight; ``None`` for no bound.
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
        >>> loss = ReinforceLoss(CausalScorer(Qwen2ForCausalLM(config)), truncation=2.0)
        >>> loss.level, loss.aggregation
        ('token', 'sequence_sum')
    """

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        level: Literal["token", "sequence", "none"] = "token",
        truncation: Annotated[float, Gt(0)] | None = None,
        aggregation: base.Aggregation = "sequence_sum",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        if level == "none" and truncation is not None:
            raise ConfigError("truncation has no effect with level='none': there is no weight")
        self.level, self.truncation = level, truncation

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.reinforce`."""
        weights = self._weights(tokens)
        maximum = _MAX_WEIGHT if self.truncation is None else self.truncation
        loss = F.reinforce(tokens.log_probs, tokens.advantage, weights.clamp(max=maximum))
        return base.Surrogate(loss, weights > maximum)

    def _weights(self, tokens: base.PolicyTokens) -> Tensor:
        if self.level == "token":
            return F.truncated_weights(tokens.log_ratio, _MAX_WEIGHT)
        if self.level == "sequence":
            return F.sequence_weights(tokens.log_ratio, tokens.row, tokens.num_rows)
        return tokens.log_ratio.new_ones(tokens.log_ratio.shape)

"""GSPO: clips the ratio of a whole sequence; the token variant has a gradient per token."""

from __future__ import annotations

from typing import Literal, Unpack

from torchrl_llm import functional as F
from torchrl_llm._checked import checked
from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base


@register("losses", "gspo")
class GSPOLoss(base.PolicyGradientLoss):
    r"""The GSPO loss, :math:`-\min(s A, \mathrm{clip}(s, 1 - l, 1 + h) A)` per sequence.

    arXiv:2507.18071 equation 5, a mean over sequences, with the ratio of equation 7, :math:`s =
    \exp(\frac{1}{n} \sum_t \log r_t)`, and the bounds of section 5.1. The bounds are much narrower
    than GRPO's, because a mean of log-ratios varies much less than a single log-ratio. Many more
    tokens are clipped than with GRPO.

    A row is a sequence: in a conversation whose turns were joined, all sampled tokens share one
    ratio. If the tokens of a row have different advantages (an estimator with a distillation term),
    each token has :math:`\min(s A_t, \mathrm{clip}(s) A_t)`.

    If a ``correction`` has a weight per token, the weight of a sequence is the mean of its tokens'
    weights. The levels ``"sequence"`` and ``"geometric"`` suit this loss.

    Ludic's preset is this loss. By default, Ludic's class does not divide the log-ratio by the
    length; this is ``level="sequence"``, which needs different bounds. TRL has the paper's loss as
    ``importance_sampling_level="sequence"`` with ``loss_type="grpo"``.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        level: ``"geometric"``, the paper's :math:`s`; ``"sequence"``, the product of the ratios.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`; each token has the
            loss of its sequence, so ``"sequence_mean"`` is the paper's average.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> loss = GSPOLoss(CausalScorer(Qwen2ForCausalLM(config)))
        >>> loss.clip_epsilon, loss.aggregation
        ((0.0003, 0.0004), 'sequence_mean')
    """

    clip_epsilon = base.Bounds(max_low=1.0)
    formula = staticmethod(F.gspo)

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        level: Literal["geometric", "sequence"] = "geometric",
        aggregation: base.Aggregation = "sequence_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon
        self.level = level

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.gspo`."""
        return base.Surrogate(*self.formula(*tokens.of_rows, *self.clip_epsilon, level=self.level))


@register("losses", "gspo_token")
class GSPOTokenLoss(GSPOLoss):
    """GSPO's token variant: value and clip are per sequence, the gradient is per token.

    arXiv:2507.18071 equations 13 and 14. With one advantage per row, value and gradient equal those
    of :class:`GSPOLoss`. With an advantage per token, each token uses its own advantage. The
    arguments are the same as for :class:`GSPOLoss`.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> GSPOTokenLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (0.0003, 0.0004)
    """

    formula = staticmethod(F.gspo_token)

"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

from typing import Unpack

from torchrl_llm import functional as F
from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base


@register("losses", "gmpo")
class GMPOLoss(base.PolicyGradientLoss):
    r"""The GMPO loss, :math:`-A \exp(\frac{1}{n} \sum_t c_t)` per sequence.

    arXiv:2507.20673, the objective with token-level clipping of section 3: :math:`c_t` is the
    token's log-ratio, at most :math:`h` for a positive advantage and at least :math:`-l` for a
    negative one. A clipped token has no gradient; the others share the gradient of the sequence.
    The default range :math:`(e^{-0.4}, e^{0.4})` is the paper's.

    If a ``correction`` has a weight per token, the weight of a sequence is the mean of its tokens'
    weights. The levels ``"sequence"`` and ``"geometric"`` suit this loss.

    In Ludic's code the lower bound has no effect: the upper bound acts on both signs, like
    ``low=high`` here. The docstring of Ludic writes the bounds as :math:`1 \pm \epsilon`. TRL's
    code follows the paper. For advantages that differ between the tokens of a row, see
    :func:`~torchrl_llm.functional.gmpo`.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        clip_epsilon: ``(low, high)`` in nats, or one number for both. May be assigned between
            steps.
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
        >>> GMPOLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (0.4, 0.4)
    """

    clip_epsilon = base.Bounds()

    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float, float] = 0.4,
        aggregation: base.Aggregation = "sequence_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.gmpo`."""
        return base.Surrogate(*F.gmpo(*tokens.of_rows, *self.clip_epsilon))

"""TOPR: bounds a sequence's ratio; the bounds depend on the sign of the advantage."""

from __future__ import annotations

from typing import Annotated, Unpack

from torchrl_llm import functional as F
from torchrl_llm._checked import Pair, checked
from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base

Weights = Annotated[tuple[float, float], Pair("[0, inf]", equal=True)]


@register("losses", "topr")
class TOPRLoss(base.PolicyGradientLoss):
    r"""The TOPR loss, :math:`-\mathrm{sg}[\rho]_a^b A \log \pi`, summed over a sequence.

    arXiv:2503.14286, the gradient of section 3, with the ratio :math:`\rho` of the whole sequence.
    Rows with a positive advantage have weight one, as in supervised learning. The weight of rows
    with a negative advantage is their ratio, at most one. It falls as the rows become unlikely. The
    loss needs no KL term and stays stable on rows of much older policies. The sign of the advantage
    selects the bounds, so the baseline of the advantage estimator defines which rows are good (see
    the paper's section on baselines).

    ``clip_fraction`` is the share of tokens whose weight is not the ratio itself.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        positive_bounds: ``(a, b)`` for the weight of rows whose advantage is at least 0.
        negative_bounds: ``(a, b)`` for the weight of the other rows. With ``(0, 1)`` for both
            arguments, the loss is truncated importance sampling.
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
        >>> TOPRLoss(CausalScorer(Qwen2ForCausalLM(config))).negative_bounds
        (0.0, 1.0)
    """

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        positive_bounds: Weights = (1.0, 1.0),
        negative_bounds: Weights = (0.0, 1.0),
        aggregation: base.Aggregation = "sequence_sum",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.positive_bounds = tuple(map(float, positive_bounds))
        self.negative_bounds = tuple(map(float, negative_bounds))

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.topr`."""
        bounds = self.positive_bounds, self.negative_bounds
        return base.Surrogate(*F.topr(tokens.log_probs, *tokens.of_rows, *bounds))

"""Dr. GRPO: GRPO that divides by a constant instead of the length of each response."""

from __future__ import annotations

from typing import Unpack

from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.grpo import GRPOLoss


@register("losses", "dr_grpo")
class DrGRPOLoss(GRPOLoss):
    r"""GRPO done right: :math:`-\frac{1}{S L} \sum_i \sum_t \min(r A, \mathrm{clip}(r) A)`.

    arXiv:2503.20783 section 3.2 (and the code of its appendix for :math:`L`). Dividing each
    response by its own length favours short correct and long wrong answers. Dr. GRPO divides all
    ``S`` sequences by the same :math:`L`, the generation budget. Use it with
    ``MCAdvantage(normalize="none")``, because the other half of the method is an advantage without
    the standard deviation.

    Ludic does not divide by :math:`L`, like ``aggregation="sequence_sum"``. Its gradients are
    therefore ``L`` times as large, which matters if the gradient norm is clipped. TRL's
    ``"dr_grpo"`` is this loss with ``constant_length=max_completion_length``.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        constant_length: ``L``, in tokens; use the ``max_new_tokens`` of sampling.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.GRPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect; without a
            ``constant_length``.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> loss = DrGRPOLoss(CausalScorer(Qwen2ForCausalLM(config)), constant_length=512)
        >>> loss.aggregation, loss.constant_length
        ('constant', 512)
    """

    def __init__(
        self,
        actor_network: base.Actor,
        *,
        constant_length: int | None = None,
        clip_epsilon: float | tuple[float, float] = 0.2,
        aggregation: base.Aggregation = "constant",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(
            actor_network,
            clip_epsilon=clip_epsilon,
            aggregation=aggregation,
            constant_length=constant_length,
            **settings,
        )

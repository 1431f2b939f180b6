"""DAPO: GRPO with a wider upper bound, and a mean over all tokens."""

from __future__ import annotations

from typing import Unpack

from torchrl_llm._registry import register
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.grpo import GRPOLoss


class DAPOLossOutput(base.PolicyLossOutput):
    """Output of :class:`DAPO`, with the fields of ``PolicyLossOutput``."""


@register("losses", "dapo")
class DAPO(GRPOLoss):
    r"""The loss of DAPO: :math:`-\min(r A, \mathrm{clip}(r, 0.8, 1.28) A)`, averaged over tokens.

    arXiv:2503.14476 equation 8: *clip-higher* (the upper bound is wider, so that unlikely tokens
    can still grow) and the *token-level* loss (the weight of a response is proportional to its
    length). DAPO has no KL term. The other two parts of the algorithm are outside the loss: dynamic
    sampling is ``MCAdvantage(keep_return_bounds=...)`` on the buffer, and the soft penalty for
    overlong responses is :class:`~torchrl_llm.envs.transforms.OverlongPenalty`.

    The paper averages over the tokens of each prompt's group and then over prompts:
    ``aggregation="prompt_mean"``, which needs group ids. The default is the token mean over the
    batch, as in TRL and in the authors' code.

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
        >>> loss = DAPO(CausalScorer(Qwen2ForCausalLM(config)))
        >>> loss.clip_epsilon, loss.aggregation
        ((0.2, 0.28), 'token_mean')
    """

    output_type = DAPOLossOutput

    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **settings)

"""GRPO: PPO's clip of each token's ratio, with group advantages.

The loss itself does not read groups. :class:`~torchrl_llm.objectives.credit.MCAdvantage` writes the
group advantages.
"""

from __future__ import annotations

import math
from typing import Annotated, Unpack

from torchrl_llm._checked import Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.functional import ppo_clip
from torchrl_llm.objectives import policy_loss as base


class GRPOLossOutput(base.PolicyLossOutput):
    """Output of :class:`GRPOLoss`, with the fields of ``PolicyLossOutput``."""


@register("losses", "grpo")
class GRPOLoss(base.PolicyGradientLoss):
    r"""The GRPO loss, :math:`-\min(r A, \mathrm{clip}(r, 1 - l, 1 + h) A)` per token.

    arXiv:2402.03300 equation 3, with TorchRL's names and defaults: a mean over tokens, and a clip
    of 0.2. For the paper's average use ``aggregation="sequence_mean"``. :math:`r` is the ratio of
    the current to the *sampled* probability, so it is one in the first pass over fresh rows. With a
    ``correction``, :math:`r` is the ratio to the probability under the trainer's policy before the
    update. KL terms are averaged in the same way as the objective.

    Differences from TorchRL: the entropy is a metric, and becomes a bonus only on request; means
    are over the tokens that count; ``clip_fraction`` counts the tokens whose gradient the clip
    removes.

    Ludic's GRPO sums a row's tokens (``aggregation="sequence_sum"``). TRL's ``loss_type="grpo"`` is
    ``aggregation="sequence_mean"``, and its default ``"dapo"`` is ``aggregation="token_mean"``.
    TRL's ``"bnpo"``, a token mean per micro-batch, is not available because it depends on how the
    batch is split.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        clip_epsilon: a number, or ``(low, high)`` as in DAPO. May be assigned between steps.
        ratio_cap: larger ratios are set to this cap before the clip, for both signs of the
            advantage, and have no gradient. This is Ludic's ``ratio_clip`` and TRL's ``delta``. For
            a negative advantage, the cap bounds the loss like the dual clip of arXiv:1912.09729.
            For an importance correction use ``correction``.
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``),
            ``"prompt_mean"`` (token mean within each ``group_id``), ``"sequence_sum"``,
            ``"constant"`` or ``"none"``.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`:
            entropy bonus, divergences, correction, mask.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import write_rows
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> rows = TensorDict(advantage=torch.tensor([[1.0], [-1.0]]), batch_size=[2])
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> write_rows(rows, ("tokens", "full"), ids)
        >>> write_rows(rows, ("tokens", "prompt"), [x[:1] for x in ids])
        >>> write_rows(rows, ("log_probs", "full"), [torch.full(x.shape, -3.4) for x in ids])
        >>> loss = GRPOLoss(CausalScorer(Qwen2ForCausalLM(config)))
        >>> output = loss(rows)
        >>> output.total_loss().backward()
        >>> output.clip_fraction
        tensor(0.)
    """

    output_type = GRPOLossOutput
    clip_epsilon = base.Bounds(max_low=1.0)
    clip_epsilon_low = property(lambda loss: loss.clip_epsilon[0], doc="The lower bound.")
    clip_epsilon_high = property(lambda loss: loss.clip_epsilon[1], doc="The upper bound.")

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        ratio_cap: Annotated[float, Gt(1)] | None = None,
        aggregation: base.Aggregation = "token_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon
        self.ratio_cap = ratio_cap

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.ppo_clip`."""
        log_ratio = tokens.log_ratio
        if self.ratio_cap is None:
            return base.Surrogate(*ppo_clip(log_ratio, tokens.advantage, *self.clip_epsilon))
        limit = math.log(self.ratio_cap)
        capped = log_ratio.clamp(max=limit)
        loss, clipped = ppo_clip(capped, tokens.advantage, *self.clip_epsilon)
        return base.Surrogate(loss, clipped | (log_ratio > limit))

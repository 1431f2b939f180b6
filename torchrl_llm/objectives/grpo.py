"""Losses of GRPO, DAPO and Dr. GRPO: one clipped surrogate, with the defaults of each paper.

They know nothing of groups, which are in the advantages that
:class:`~torchrl_llm.objectives.credit.MCAdvantage` writes.
"""

from __future__ import annotations

import math
from typing import Literal, Unpack

from torch import nn

from torchrl_llm._registry import register
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import ppo_clip
from torchrl_llm.objectives.policy_loss import (
    Aggregation,
    Bounds,
    PolicyGradientLoss,
    PolicyLossOutput,
    PolicyLossSettings,
    PolicyTokens,
    Surrogate,
)


class GRPOLossOutput(PolicyLossOutput):
    """Output of :class:`GRPOLoss`; the fields are those of ``PolicyLossOutput``."""


@register("losses", "grpo")
class GRPOLoss(PolicyGradientLoss):
    r"""The GRPO loss, :math:`-\min(r A, \mathrm{clip}(r, 1 - l, 1 + h) A)` per token.

    arXiv:2402.03300 equation 3, with TorchRL's names and defaults: token mean, clip 0.2. The
    paper's own average is ``aggregation="sequence_mean"``. :math:`r` is the ratio of current to
    *sampled* probability, so the first pass over fresh rows has ratio one; with a ``correction``,
    to the probability under the trainer's own policy before the update. Divergences are averaged as
    the objective.

    Differences from TorchRL: the entropy is a metric and no bonus unless asked for; means are over
    tokens that count; ``clip_fraction`` counts the tokens whose gradient the clip cuts;
    ``gamma``, ``clip_value`` and ``samples_mc_entropy`` are refused, because nothing reads them.

    Ludic's GRPO sums a row's tokens (``aggregation="sequence_sum"``). TRL's ``loss_type="grpo"`` is
    ``aggregation="sequence_mean"``, its default ``"dapo"`` is the token mean here, and its
    ``"bnpo"``, a token mean of each micro-batch by itself, is not offered: it depends on the cut.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        clip_epsilon: a number, or ``(low, high)`` as in DAPO. May be assigned between steps.
        ratio_cap: ratios above it count as the cap, before the clip and whatever the sign of the
            advantage, and have no gradient: Ludic's ``ratio_clip``, TRL's ``delta``. With a
            negative advantage it bounds the loss as the dual clip of arXiv:1912.09729 does; it is
            no importance correction, which is ``correction``.
        reduction: ``None`` or ``"mean"``: as ``aggregation`` says; ``"none"``: as
            ``aggregation="none"``.
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (what TorchRL calls ``"prompt_mean"``),
            ``"prompt_mean"`` (token mean within each ``group_id``), ``"sequence_sum"``,
            ``"constant"`` or ``"none"``.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`:
            entropy bonus, divergences, correction, mask.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        TypeError: for arguments that do not exist.

    Example:
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
    clip_epsilon = Bounds(max_low=1.0)

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        ratio_cap: float | None = None,
        reduction: Literal["mean", "none"] | None = None,
        aggregation: Aggregation = "token_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        if reduction not in (None, "mean", "none"):
            raise ConfigError(
                f"reduction must be mean or none, got {reduction!r}; sums are "
                "aggregation='sequence_sum'"
            )
        if reduction == "none":
            aggregation = "none"
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon
        if ratio_cap is not None and not ratio_cap > 1.0:
            raise ConfigError(f"ratio_cap must be above 1, got {ratio_cap}")
        self.ratio_cap = ratio_cap

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.ppo_clip`."""
        log_ratio = tokens.log_ratio
        if self.ratio_cap is None:
            return Surrogate(*ppo_clip(log_ratio, tokens.advantage, *self.clip_epsilon))
        limit = math.log(self.ratio_cap)
        capped = log_ratio.clamp(max=limit)
        loss, clipped = ppo_clip(capped, tokens.advantage, *self.clip_epsilon)
        return Surrogate(loss, clipped | (log_ratio > limit))


class DAPOLossOutput(PolicyLossOutput):
    """Output of :class:`DAPO`; the fields are those of ``PolicyLossOutput``."""


@register("losses", "dapo")
class DAPO(GRPOLoss):
    r"""The loss of DAPO: :math:`-\min(r A, \mathrm{clip}(r, 0.8, 1.28) A)`, averaged over tokens.

    arXiv:2503.14476 equation 8: *clip-higher* (the upper bound is wider, so that unlikely tokens
    can still grow) and the *token-level* loss (a long response weighs by its length). It has no
    divergence term. The other two parts of the algorithm are not in the loss: dynamic sampling is
    ``MCAdvantage(keep_return_bounds=...)`` on the buffer, and the soft punishment of overlong
    responses is :class:`~torchrl_llm.envs.transforms.OverlongPenalty`.

    The paper's expectation is over prompts and its token mean within the group of one prompt:
    ``aggregation="prompt_mean"``, which needs group ids. The default is the token mean over the
    batch, as in TRL's and the authors' code.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.GRPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
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
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **settings)


@register("losses", "dr_grpo")
class DrGRPOLoss(GRPOLoss):
    r"""GRPO done right: :math:`-\frac{1}{S L} \sum_i \sum_t \min(r A, \mathrm{clip}(r) A)`.

    arXiv:2503.20783 section 3.2 (and the code of its appendix for :math:`L`). Dividing each
    response by its own length favours short right and long wrong answers; Dr. GRPO divides all of
    the ``S`` sequences by the same :math:`L`, the generation budget. Its other half is in the
    advantages: ``MCAdvantage`` without the standard deviation.

    Ludic leaves the divisor out, which is ``aggregation="sequence_sum"`` (and gradients ``L`` times
    as long, visible to a clip of the gradient's norm). TRL's ``"dr_grpo"`` is the same as this with
    ``constant_length=max_completion_length``.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        constant_length: ``L``, tokens; the ``max_new_tokens`` of sampling.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.GRPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect; without a
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
        actor_network: nn.Module | TokenScorer,
        *,
        constant_length: int | None = None,
        clip_epsilon: float | tuple[float, float] = 0.2,
        aggregation: Aggregation = "constant",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(
            actor_network,
            clip_epsilon=clip_epsilon,
            aggregation=aggregation,
            constant_length=constant_length,
            **settings,
        )

"""PPO with a critic.

Advantages and value targets are in the rows: :class:`~torchrl_llm.objectives.credit.GAEAdvantage`
computes them from the values that :class:`~torchrl_llm.envs.transforms.RetrieveValues` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Unpack

from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import value_loss
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.grpo import GRPOLoss
from torchrl_llm.objectives.loss_rows import TokenRows


class PPOLossOutput(base.PolicyLossOutput):
    """Output of :class:`PPOLoss`: the fields of ``PolicyLossOutput``, plus the critic's.

    Attributes:
        loss_value: the weighted value loss, averaged like the objective.
        value: mean value.
        value_target: mean target of the critic.
        value_error: mean of ``(value - target) ** 2``.
        value_clip_fraction: share of tokens whose value is clipped.
    """

    loss_value: Tensor | None = None
    value: Tensor | None = None
    value_target: Tensor | None = None
    value_error: Tensor | None = None
    value_clip_fraction: Tensor | None = None


@register("losses", "ppo")
class PPOLoss(GRPOLoss):
    r"""PPO: :math:`-\min(r A, \mathrm{clip}(r, 1 - l, 1 + h) A) + c\, (V - R)^2 / 2` per token.

    arXiv:1707.06347 equation 9 (with its entropy bonus as ``entropy_coeff``). The values come from
    the same forward as the log-probs, if the actor has a :class:`~torchrl_llm.modules.ValueHead`,
    or from a separate critic. Rows need ``advantage`` and ``("value_target", "full")``, both
    written by :class:`~torchrl_llm.objectives.credit.GAEAdvantage`.

    The value loss is averaged like the objective. ``value_clip`` is not in the paper but in
    OpenAI's code (0.2), see :func:`~torchrl_llm.functional.value_loss`; it is off by default. TRL
    1.16 and Ludic have no PPO loss.

    Args:
        actor_network: model that scores tokens, and also computes values if there is no critic.
        critic_network: a scorer with a value head that computes the values instead; its parameters
            become parameters of the loss.
        clip_epsilon: a number, or ``(low, high)``. May be assigned between steps.
        value_coeff: weight ``c`` of the value loss.
        value_clip: how far a value may move from the stored one, ``("values", "full")``; ``None``
            for no bound.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.GRPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import write_rows
        >>> from torchrl_llm.modules import ValueHead
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> rows = TensorDict(advantage=torch.tensor([[1.0], [-1.0]]), batch_size=[2])
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> write_rows(rows, ("tokens", "full"), ids)
        >>> write_rows(rows, ("tokens", "prompt"), [x[:1] for x in ids])
        >>> write_rows(rows, ("log_probs", "full"), [torch.full(x.shape, -3.4) for x in ids])
        >>> write_rows(rows, ("value_target", "full"), [torch.ones(x.shape) for x in ids])
        >>> loss = PPOLoss(CausalScorer(Qwen2ForCausalLM(config), value_head=ValueHead(16)))
        >>> output = loss(rows)
        >>> output.total_loss().backward()
        >>> output.loss_value
        tensor(0.2500, grad_fn=<MulBackward0>)
    """

    @dataclass
    class _AcceptedKeys(base.PolicyGradientLoss._AcceptedKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        value: NestedKey = ("values", "full")
        value_target: NestedKey = ("value_target", "full")

    default_keys = _AcceptedKeys
    output_type = PPOLossOutput

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        critic_network: base.Actor | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        value_coeff: Annotated[float, Ge(0)] = 0.5,
        value_clip: Annotated[float, Gt(0)] | None = None,
        aggregation: base.Aggregation = "token_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        if critic_network is not None and not isinstance(critic_network, TokenScorer):
            raise ConfigError(
                f"critic_network must be a TokenScorer with a value head, got "
                f"{type(critic_network).__name__}"
            )
        self.value_clip = value_clip
        super().__init__(
            actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, **settings
        )
        self.critic_network = critic_network
        self.value_coeff = float(value_coeff)

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        super().check(tensordict, rows)
        self._value_columns(tensordict, rows)

    def extras(self, tensordict: Any, rows: TokenRows) -> ScoreExtras | None:
        """Request also values, if there is no separate critic."""
        extras = super().extras(tensordict, rows)
        if self.critic_network is not None:
            return extras
        return replace(extras or ScoreExtras(), values=True)

    def further_terms(
        self,
        tensordict: Any,
        rows: TokenRows,
        tokens: base.PolicyTokens,
        scores: TokenScores,
        reduce: Callable[[Tensor], Tensor],
        share: float,
    ) -> dict[str, Tensor]:
        """Return the value loss and the metrics of the critic."""
        device = tokens.log_probs.device
        values = self._values(rows, scores).to(device)
        targets, old = (
            None if column is None else sent(column, device)
            for column in self._value_columns(tensordict, rows)
        )
        loss, clipped = value_loss(values, targets, old, self.value_clip)
        now = values.detach()
        return {
            "loss_value": self.value_coeff * reduce(loss),
            "value": now.sum() * share,
            "value_target": targets.sum() * share,
            "value_error": (now - targets).square().sum() * share,
            "value_clip_fraction": clipped.sum() * share,
        }

    def _values(self, rows: TokenRows, scores: TokenScores) -> Tensor:
        values = scores.values
        if self.critic_network is not None:
            asked = ScoreExtras(values=True, log_probs=False)
            values = self.critic_network.token_scores(
                rows.sequences, rows.select, extras=asked
            ).values
        count = rows.row.shape[0]
        if values is None or values.shape != (count,):
            got = None if values is None else tuple(values.shape)
            raise DataError(f"the critic must value the {count} selected tokens, got {got}")
        # On a GPU this check is deferred, as for the log-probs: see check_scores.
        if values.device.type == "cpu" and not bool(values.detach().isfinite().all()):
            raise DataError("the critic's values are NaN or infinite: its weights have diverged")
        return values

    def _value_columns(self, tensordict: Any, rows: TokenRows) -> tuple[Tensor, Tensor | None]:
        """Return the value targets, and the old values if the clip needs them."""
        targets = self.column(tensordict, rows, "value_target")
        if self.value_clip is None:
            return targets, None
        return targets, self.column(tensordict, rows, "value")

    def _forward_value_estimator_keys(self, **options: Any) -> None:
        super()._forward_value_estimator_keys(**options)
        self.in_keys.append(self.tensor_keys.value_target)
        if self.value_clip is not None:
            self.in_keys.append(self.tensor_keys.value)

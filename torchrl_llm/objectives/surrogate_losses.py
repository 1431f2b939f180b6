"""Losses whose surrogate is not PPO's clip of each token: CISPO, SAPO, GSPO, GMPO, TOPR, REINFORCE.

Each is a call of its function in :mod:`torchrl_llm.functional.policy_surrogates` and the defaults
of its paper. The losses with PPO's clip are in :mod:`torchrl_llm.objectives.clipped_losses`.
"""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from torchrl_llm import functional as F
from torchrl_llm._registry import register
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.argument_checks import check_choice, check_positive
from torchrl_llm.objectives.clipped_losses import GRPOLoss
from torchrl_llm.objectives.policy_loss import (
    Aggregation,
    Bounds,
    PolicyGradientLoss,
    PolicyLossOutput,
    PolicyLossSettings,
    PolicyTokens,
    Surrogate,
)


class CISPOLossOutput(PolicyLossOutput):
    """Output of :class:`CISPOLoss`; ``clip_fraction`` is the share of weights that are cut."""


@register("losses", "cispo")
class CISPOLoss(PolicyGradientLoss):
    r"""The CISPO loss, :math:`-\mathrm{sg}[\min(r, 1 + h)] A \log \pi` per token.

    arXiv:2506.13585 equations 4 and 5, a mean over tokens. The weight is a constant for autograd,
    so no token loses its gradient. The paper has no lower bound and does not say which upper one it
    used: the default is Ludic's 0.2; ScaleRL's preset of Ludic has 0.28, TRL proposes 4.0 (as the
    bound itself, ``epsilon_high=5.0``).

    Ludic averages over each sample's tokens first: ``aggregation="sequence_mean"``. TorchRL's
    ``CISPOLoss`` differentiates through the clip, so that clipped tokens have no gradient at all,
    which is what the method is there to avoid.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, the weight is in ``[1 - low, 1 + high]``; ``low=None`` for no
            lower bound; one number stands for both. May be assigned between steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> CISPOLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (None, 0.2)
    """

    output_type = CISPOLossOutput
    clip_epsilon = Bounds(max_low=1.0, open_low=True)
    clip_epsilon_low = GRPOLoss.clip_epsilon_low
    clip_epsilon_high = GRPOLoss.clip_epsilon_high

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float | None, float] = (None, 0.2),
        aggregation: Aggregation = "token_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.cispo`."""
        return Surrogate(
            *F.cispo(tokens.log_probs, tokens.log_ratio, tokens.advantage, *self.clip_epsilon)
        )


@register("losses", "sapo")
class SAPOLoss(PolicyGradientLoss):
    r"""The SAPO loss, :math:`-\frac{4}{\tau} \sigma(\tau (r - 1)) A` per token.

    arXiv:2511.20347 section 3, a mean over each sequence's tokens and then over sequences. The
    temperature :math:`\tau` is ``tau_pos`` for a positive advantage and ``tau_neg`` else, larger
    because pushing a token down raises many unlikely others. At ratio one the gradient is that of
    REINFORCE, and it fades smoothly on both sides. ``clip_fraction`` is always 0.

    Ludic sums over a sequence's tokens: ``aggregation="sequence_sum"``. TRL's
    ``loss_type="sapo"`` is this loss.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        tau_pos: temperature where the advantage is positive.
        tau_neg: temperature of the other tokens.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> SAPOLoss(CausalScorer(Qwen2ForCausalLM(config))).tau_neg
        1.05
    """

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        aggregation: Aggregation = "sequence_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
        self.tau_pos, self.tau_neg = float(tau_pos), float(tau_neg)

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.sapo`."""
        loss = F.sapo(tokens.log_ratio, tokens.advantage, self.tau_pos, self.tau_neg)
        return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


@register("losses", "gspo")
class GSPOLoss(PolicyGradientLoss):
    r"""The GSPO loss, :math:`-\min(s A, \mathrm{clip}(s, 1 - l, 1 + h) A)` per sequence.

    arXiv:2507.18071 equation 5, a mean over sequences, with the ratio of equation 7,
    :math:`s = \exp(\frac{1}{n} \sum_t \log r_t)`, and the bounds of section 5.1. They are far
    narrower than GRPO's, because a mean of log-ratios moves far less than one of them, and far more
    tokens are clipped.

    A row is the sequence: of a conversation whose turns were joined, all sampled tokens have one
    ratio. Where the tokens of a row have different advantages (an advantage estimator with a
    distillation term), each has :math:`\min(s A_t, \mathrm{clip}(s) A_t)`.

    A ``correction`` whose weights are those of tokens gives the sequence their mean; its levels
    ``"sequence"`` and ``"geometric"`` fit this loss.

    Ludic's preset is this loss; its class by default does not divide the log-ratio by the length,
    which is ``level="sequence"`` and needs other bounds. TRL has the paper's as
    ``importance_sampling_level="sequence"`` with ``loss_type="grpo"``.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        clip_epsilon: ``(low, high)``, or one number for both. May be assigned between steps.
        level: ``"geometric"``, the paper's :math:`s`; ``"sequence"``, the product of the ratios.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`; each token carries the
            loss of its sequence, so ``"sequence_mean"`` is the paper's.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
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

    clip_epsilon = Bounds(max_low=1.0)
    formula = staticmethod(F.gspo)

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        level: Literal["geometric", "sequence"] = "geometric",
        aggregation: Aggregation = "sequence_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon
        check_choice("level", level, ("geometric", "sequence"))
        self.level = level

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.gspo`."""
        return Surrogate(*self.formula(*tokens.of_rows, *self.clip_epsilon, level=self.level))


@register("losses", "gspo_token")
class GSPOTokenLoss(GSPOLoss):
    """GSPO's token variant: the value and clip of the sequence, the gradient of each token.

    arXiv:2507.18071 equations 13 and 14. With one advantage per row it is :class:`GSPOLoss` in
    value and gradient; with an advantage per token, each token is moved by its own. The arguments
    are those of :class:`GSPOLoss`.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> GSPOTokenLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (0.0003, 0.0004)
    """

    formula = staticmethod(F.gspo_token)


@register("losses", "gmpo")
class GMPOLoss(PolicyGradientLoss):
    r"""The GMPO loss, :math:`-A \exp(\frac{1}{n} \sum_t c_t)` per sequence.

    arXiv:2507.20673, the objective with token-level clipping of section 3: :math:`c_t` is the
    token's log-ratio, at most :math:`h` for a positive advantage and at least :math:`-l` for a
    negative one. A token that is cut has no gradient, the others share that of the sequence. The
    range :math:`(e^{-0.4}, e^{0.4})` is the paper's.

    A ``correction`` whose weights are those of tokens gives the sequence their mean; its levels
    ``"sequence"`` and ``"geometric"`` fit this loss.

    In Ludic's code the lower bound has no effect (its upper one acts on both signs, as ``low=high``
    does here), and its docstring writes the bounds as :math:`1 \pm \epsilon`. TRL's agrees with the
    paper. For advantages that differ between the tokens of a row see
    :func:`~torchrl_llm.functional.gmpo`.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        clip_epsilon: ``(low, high)`` in nats, or one number for both. May be assigned between
            steps.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`; each token carries the
            loss of its sequence, so ``"sequence_mean"`` is the paper's.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> GMPOLoss(CausalScorer(Qwen2ForCausalLM(config))).clip_epsilon
        (0.4, 0.4)
    """

    clip_epsilon = Bounds()

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float, float] = 0.4,
        aggregation: Aggregation = "sequence_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.clip_epsilon = clip_epsilon

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.gmpo`."""
        return Surrogate(*F.gmpo(*tokens.of_rows, *self.clip_epsilon))


@register("losses", "topr")
class TOPRLoss(PolicyGradientLoss):
    r"""The TOPR loss, :math:`-\mathrm{sg}[\rho]_a^b A \log \pi`, summed over a sequence.

    arXiv:2503.14286, the gradient of section 3, with the ratio :math:`\rho` of the whole sequence.
    Rows with a positive advantage have weight one, as in supervised learning; rows with a negative
    one have their ratio, at most one, which fades as they become unlikely. It needs no divergence
    term and holds on rows of much older policies. The sign of the advantage decides, so the
    baseline of the advantage estimator says which rows are good (the paper's section on it).

    ``clip_fraction`` is the share of tokens whose weight is not the ratio itself.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        positive_bounds: ``(a, b)`` for the weight of rows whose advantage is at least 0.
        negative_bounds: ``(a, b)`` for that of the others. ``(0, 1)`` for both is truncated
            importance sampling.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> TOPRLoss(CausalScorer(Qwen2ForCausalLM(config))).negative_bounds
        (0.0, 1.0)
    """

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        positive_bounds: tuple[float, float] = (1.0, 1.0),
        negative_bounds: tuple[float, float] = (0.0, 1.0),
        aggregation: Aggregation = "sequence_sum",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        self.positive_bounds = _checked("positive_bounds", positive_bounds)
        self.negative_bounds = _checked("negative_bounds", negative_bounds)

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.topr`."""
        bounds = self.positive_bounds, self.negative_bounds
        return Surrogate(*F.topr(tokens.log_probs, *tokens.of_rows, *bounds))


def _checked(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{name} must be (a, b) with 0 <= a <= b, got {bounds!r}")
    return float(bounds[0]), float(bounds[1])


# Larger weights count as this one, 5e8: an infinite weight times an advantage of 0 is NaN.
_MAX_WEIGHT = 2.0**29


@register("losses", "reinforce")
class ReinforceLoss(PolicyGradientLoss):
    r"""The score-function loss :math:`-\mathrm{sg}[w] A \log \pi` with an importance weight ``w``.

    Williams (1992), with the weight that makes it right for rows of an older policy. The gradient
    is the sum over a sequence's tokens, averaged over sequences. On rows of the current policy all
    weights are one, and so is the loss's gradient that of every clipped loss of this package.

    Ludic's preset has ``level="sequence"``: the product of a sequence's ratios, unbiased, and
    beyond all bounds on long responses; give it a ``truncation``. RLOO (arXiv:2402.14740) is this
    loss on leave-one-out advantages.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        level: whose ratio of current to sampled probability is the weight: ``"token"``, the
            token's; ``"sequence"``, its row's, a product; ``"none"``, no weight.
        truncation: largest weight; ``None`` for no bound.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
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

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        level: Literal["token", "sequence", "none"] = "token",
        truncation: float | None = None,
        aggregation: Aggregation = "sequence_sum",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(actor_network, aggregation=aggregation, **settings)
        check_choice("level", level, ("token", "sequence", "none"))
        check_positive(truncation=truncation)
        if level == "none" and truncation is not None:
            raise ConfigError("truncation has no effect with level='none': there is no weight")
        self.level, self.truncation = level, truncation

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """See :func:`~torchrl_llm.functional.reinforce`."""
        weights = self._weights(tokens)
        maximum = _MAX_WEIGHT if self.truncation is None else self.truncation
        loss = F.reinforce(tokens.log_probs, tokens.advantage, weights.clamp(max=maximum))
        return Surrogate(loss, weights > maximum)

    def _weights(self, tokens: PolicyTokens) -> Tensor:
        if self.level == "token":
            return F.truncated_weights(tokens.log_ratio, _MAX_WEIGHT)
        if self.level == "sequence":
            return F.sequence_weights(tokens.log_ratio, tokens.row, tokens.num_rows)
        return tokens.log_ratio.new_ones(tokens.log_ratio.shape)


@register("losses", "reinforce_plus_plus")
class ReinforcePlusPlusLoss(GRPOLoss):
    """The loss of REINFORCE++: PPO's clipped surrogate, a mean over each response's tokens.

    arXiv:2501.03262, the objective of section 3. What sets REINFORCE++ apart is its advantage: no
    critic, normalised over the whole batch and not over a group
    (:class:`~torchrl_llm.objectives.credit.BatchNormalizedReturn`), with the divergence from the
    reference in the reward. Its variant with a baseline takes the group's mean off first and has
    the divergence in the loss, as ``k2``: ``kl_to_ref_coeff=..., kl_estimator="k2"``.

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
        >>> ReinforcePlusPlusLoss(CausalScorer(Qwen2ForCausalLM(config))).aggregation
        'sequence_mean'
    """

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        aggregation: Aggregation = "sequence_mean",
        **settings: Unpack[PolicyLossSettings],
    ) -> None:
        super().__init__(
            actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, **settings
        )

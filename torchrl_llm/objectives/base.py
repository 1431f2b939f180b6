"""What every policy-gradient loss shares: scoring, ratios, KL terms, averages, checks.

A loss reads rows (:mod:`torchrl_llm.objectives.rows`), asks a
:class:`~torchrl_llm.data.scoring.TokenScorer` for the log-probs of the tokens that count, and
averages what its ``surrogate`` says about each. A new loss is a subclass with a ``surrogate``; its
mathematics belongs into :mod:`torchrl_llm.functional`.

The modules stay as they are: no parameters are moved, ``state_dict`` is the actor's.

Shape legend: ``B`` rows, ``T`` tokens of a row, ``N`` tokens that count.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import Normalizer, effective_sample_size, k3, token_weights
from torchrl_llm.objectives.rows import MaskingStrategy, RowKeys, TokenRows, read_token_rows

__all__ = [
    "LLMLossOutput",
    "PolicyGradientLoss",
    "PolicyLossOutput",
    "PolicyTokens",
    "Surrogate",
    "check_scores",
]

Aggregation = Literal[
    "token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant", "none"
]
# TorchRL's "prompt_mean" is a mean over each sample's tokens and then over samples.
_MODES = {"prompt_mean": "sequence_mean"}
_AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant", "none")


class LLMLossOutput:
    """What the outputs of all losses can do; a mixin of tensorclasses of named scalars.

    Fields whose name begins with ``loss_`` are terms of the objective, all others are metrics
    without gradient. Outputs of micro-batches that were computed with the whole batch's normalizer
    add up to the output of the whole batch.
    """

    def total_loss(self) -> Tensor:
        """The sum of the ``loss_*`` terms and of nothing else: what to call ``backward`` on."""
        terms = [value for key, value in self.items() if key.startswith("loss_")]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def metrics(self) -> dict[str, Tensor]:
        """Every field that is there, loss terms included, without gradient."""
        return {key: value.detach() for key, value in self.items()}


class PolicyLossOutput(TensorClass["nocast"], LLMLossOutput):
    """Output of a policy-gradient loss; all fields are float32 scalars.

    Attributes:
        loss_objective: the surrogate, averaged as the loss's ``aggregation`` says; ``[B, T]`` per
            token when that is ``"none"``.
        clip_fraction: share of tokens whose gradient is cut by a bound.
        kl_approx: mean of sampled minus current log-prob, nats.
        ESS: effective sample size of the ratios as a share; for a micro-batch its own value times
            its share of the tokens.
        entropy: mean entropy, nats.
        loss_entropy: the entropy bonus, where asked for.
        loss_kl_to_ref: weighted divergence from the reference, where asked for.
        kl_to_ref: its mean, nats.
        loss_kl_to_inference: weighted divergence from the sampler, where asked for.
        kl_to_inference: its mean, nats.
    """

    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    ESS: Tensor
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None


class PolicyTokens(NamedTuple):
    """The tokens that count, flat, as a surrogate sees them.

    Attributes:
        log_probs: float32 ``[N]`` under the current policy, with gradients, nats.
        log_ratio: float32 ``[N]``, current minus sampled log-prob, with gradients, nats.
        advantage: float32 ``[N]``.
        row: int64 ``[N]``, the row of each token.
        num_rows: ``B``.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantage: Tensor
    row: Tensor
    num_rows: int


class Surrogate(NamedTuple):
    """What a surrogate says about each token.

    Attributes:
        loss: float32 ``[N]``.
        clipped: bool ``[N]``, where a bound cuts the gradient.
    """

    loss: Tensor
    clipped: Tensor


class PolicyGradientLoss(LossModule):
    """Base of the policy-gradient losses over rows of sampled tokens.

    Subclasses define :meth:`surrogate`. Which tokens count is said by ``masking_strategy``:
    ``"sft"``, those after the row's prompt; ``"rlhf"``, those of the assistant mask; ``"generic"``,
    all that have a prefix. Where a row has a ``trace``, only sampled tokens whose mask reason is
    ``TRAINED`` count.

    Every mean is over tokens that count, divided by a
    :class:`~torchrl_llm.functional.Normalizer`. With that of the whole batch
    (:meth:`normalizer`) the outputs of its micro-batches add up.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``.
        aggregation: how the tokens' losses are averaged. ``"token_mean"``; ``"sequence_mean"``,
            which TorchRL calls ``"prompt_mean"`` (both are accepted); ``"sequence_sum"``;
            ``"constant"``, as the former but divided by ``constant_length``; ``"none"``, a padded
            ``[B, T]`` loss.
        constant_length: tokens that ``"constant"`` divides by.
        kl_mask_threshold: tokens with ``log_ratio ** 2 / 2`` above it add nothing to the objective.
            They still count in the denominators, which have to be known before the forward.
        entropy_bonus: subtract ``entropy_coeff`` times the entropy from the loss. By default only
            when an ``entropy_coeff`` is given; the entropy is a metric either way.
        entropy_coeff: weight of the bonus, 0.01 when ``entropy_bonus=True`` comes without it.
        kl_to_ref_coeff: weight of the divergence from the reference policy; ``None`` or 0 for none.
        kl_to_inference_coeff: weight of the divergence from the sampler; ``None`` or 0 for none.
        masking_strategy: see above.
        device: where the loss is computed from the log-probs; theirs by default. The actor is not
            moved.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
    """

    @dataclass
    class _AcceptedKeys(RowKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        advantage: NestedKey = "advantage"
        sample_log_prob: NestedKey = ("log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")

    default_keys = _AcceptedKeys
    default_value_estimator = None
    output_type: type = PolicyLossOutput

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        aggregation: Aggregation = "token_mean",
        constant_length: int | None = None,
        kl_mask_threshold: float | None = None,
        entropy_bonus: bool | None = None,
        entropy_coeff: float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        masking_strategy: MaskingStrategy = "sft",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(actor_network, TokenScorer):
            raise ConfigError(
                f"actor_network must be a TokenScorer (a policy wrapper or a CausalScorer), got "
                f"{type(actor_network).__name__}"
            )
        if aggregation not in _AGGREGATIONS:
            raise ConfigError(
                f"aggregation must be one of {', '.join(_AGGREGATIONS)}, got {aggregation!r}"
            )
        if (aggregation == "constant") != (constant_length is not None):
            raise ConfigError(
                "constant_length belongs to aggregation='constant', and is needed there"
            )
        if masking_strategy not in ("sft", "rlhf", "generic"):
            raise ConfigError(
                f"masking_strategy must be sft, rlhf or generic, got {masking_strategy!r}"
            )
        if kl_mask_threshold is not None and not kl_mask_threshold > 0:
            raise ConfigError(f"kl_mask_threshold must be positive, got {kl_mask_threshold}")
        self.actor_network = actor_network
        self.aggregation = aggregation
        self.constant_length = constant_length
        self.kl_mask_threshold = kl_mask_threshold
        self.entropy_coeff = _entropy_coeff(entropy_bonus, entropy_coeff)
        self.kl_to_ref_coeff = _coefficient("kl_to_ref_coeff", kl_to_ref_coeff)
        self.kl_to_inference_coeff = _coefficient("kl_to_inference_coeff", kl_to_inference_coeff)
        self.masking_strategy = masking_strategy
        self.device = None if device is None else torch.device(device)
        self._forward_value_estimator_keys()

    @property
    def functional(self) -> bool:
        """False: the actor's parameters stay in the actor."""
        return False

    @abstractmethod
    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """Loss of each token, unreduced.

        Args:
            tokens: the ``N`` tokens that count.
        """

    def normalizer(self, tensordict: Any) -> Normalizer:
        """Counts of a whole batch, for the ``normalizer`` argument of its micro-batches.

        Args:
            tensordict: the rows of the whole batch.

        Raises:
            DataError: when no token counts.
        """
        return self._rows(tensordict).normalizer()

    def forward(self, tensordict: Any, *, normalizer: Normalizer | None = None) -> Any:
        """The loss of a batch, or of a micro-batch of it.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.
            normalizer: counts of the whole batch when these rows are a part of it.

        Returns:
            An instance of ``output_type``.

        Raises:
            DataError: when a column is missing or misaligned, a value that counts is not finite, no
                token counts, or a row's distribution was truncated without its support.
        """
        keys = self.tensor_keys
        rows = self._rows(tensordict)
        # A piece of a batch may be without tokens that count; it then adds nothing.
        normalizer = normalizer or rows.normalizer()
        rows.refuse_truncated_support(tensordict, keys.truncated_support)
        advantage = rows.advantage(tensordict, keys.advantage)
        sampled = rows.column(
            tensordict, keys.sample_log_prob, "generate with a policy that returns log-probs"
        )
        reference = None
        if self.kl_to_ref_coeff:
            reference = rows.column(
                tensordict,
                keys.ref_log_probs,
                "RetrieveLogProb with the reference policy writes it",
            )
        scores = self.actor_network.token_scores(
            rows.sequences,
            rows.select,
            temperature=rows.temperature(tensordict, keys.temperature),
            entropy=True,
        )
        log_probs = check_scores(scores.log_probs, rows)
        device = self.device or log_probs.device
        log_probs, sampled, advantage = (x.to(device) for x in (log_probs, sampled, advantage))
        tokens = PolicyTokens(
            log_probs, log_probs - sampled, advantage, rows.row.to(device), len(rows.counts)
        )
        return self._output(
            rows,
            tokens,
            scores.entropy.to(device),
            None if reference is None else reference.to(device),
            normalizer,
        )

    def _output(
        self,
        rows: TokenRows,
        tokens: PolicyTokens,
        entropy: Tensor,
        reference: Tensor | None,
        normalizer: Normalizer,
    ) -> Any:
        share = 1.0 / normalizer.num_tokens
        reduce = self._reducer(rows, normalizer, tokens.log_probs.device)
        loss, clipped = self.surrogate(tokens)
        log_ratio = tokens.log_ratio.detach()
        if self.kl_mask_threshold is not None:
            loss = loss.where(log_ratio.square() / 2 <= self.kl_mask_threshold, 0.0)
        fields = {
            "loss_objective": reduce(loss),
            "clip_fraction": clipped.sum() * share,
            "kl_approx": -log_ratio.sum() * share,
            "ESS": _summed_ess(log_ratio) * share,
            "entropy": entropy.detach().sum() * share,
        }
        if self.entropy_coeff:
            fields["loss_entropy"] = -self.entropy_coeff * reduce(entropy)
        to_inference = k3(-tokens.log_ratio if self.kl_to_inference_coeff else -log_ratio)
        fields["kl_to_inference"] = to_inference.detach().sum() * share
        if self.kl_to_inference_coeff:
            fields["loss_kl_to_inference"] = self.kl_to_inference_coeff * reduce(to_inference)
        if reference is not None:
            to_reference = k3(reference - tokens.log_probs)
            fields["kl_to_ref"] = to_reference.detach().sum() * share
            fields["loss_kl_to_ref"] = self.kl_to_ref_coeff * reduce(to_reference)
        return self.output_type(**fields)

    def _reducer(self, rows: TokenRows, normalizer: Normalizer, device: torch.device):
        if self.aggregation == "none":
            return rows.scatter
        mode = _MODES.get(self.aggregation, self.aggregation)
        lengths = None
        if mode == "sequence_mean":
            lengths = torch.tensor(rows.counts, device=device)[rows.row.to(device)]
        weights = token_weights(lengths, mode, normalizer, constant_length=self.constant_length)
        if isinstance(weights, float):
            return lambda values: values.sum() * weights
        return lambda values: (values * weights).sum()

    def _rows(self, tensordict: Any) -> TokenRows:
        return read_token_rows(tensordict, self.tensor_keys, self.masking_strategy)

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Called by ``set_keys``; there is no value estimator, only ``in_keys`` to renew."""
        keys = self.tensor_keys
        self.in_keys = [keys.action, keys.sample_log_prob, keys.advantage]
        if self.kl_to_ref_coeff:
            self.in_keys.append(keys.ref_log_probs)
        self.out_keys = list(self.output_type.__dataclass_fields__)


def _summed_ess(log_ratio_N: Tensor) -> Tensor:
    """Effective number of samples; 0 of none."""
    if not log_ratio_N.numel():
        return log_ratio_N.new_zeros(())
    return effective_sample_size(log_ratio_N) * log_ratio_N.shape[0]


def _coefficient(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not value >= 0:
        raise ConfigError(f"{name} must not be negative, got {value}")
    return float(value)


def _entropy_coeff(bonus: bool | None, coefficient: float | None) -> float:
    value = _coefficient("entropy_coeff", coefficient)
    if bonus is False and value:
        raise ConfigError(f"entropy_coeff={value} has no effect with entropy_bonus=False")
    return 0.01 if bonus and coefficient is None else value


def check_scores(log_probs: Tensor, rows: TokenRows) -> Tensor:
    """Refuse log-probs of the current policy that are of the wrong number or not finite.

    Args:
        log_probs: what the actor returned, to be float32 ``[N]``.
        rows: the rows that it scored.

    Returns:
        The log-probs as given.

    Raises:
        DataError: when they are not ``N`` or not finite.
    """
    count = rows.row.shape[0]
    if log_probs.shape != (count,):
        raise DataError(
            f"the actor must score the {count} selected tokens, got {tuple(log_probs.shape)}"
        )
    if not bool(log_probs.detach().isfinite().all()):
        raise DataError(
            "the current policy's log-probs are NaN or infinite: its weights have diverged, or a "
            "sampled token has probability zero under it"
        )
    return log_probs

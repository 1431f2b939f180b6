"""Base class of the policy-gradient losses: ratios, corrections, KL terms, averages, checks.

A loss reads rows (``torchrl_llm.objectives.loss_rows``), gets the log-probs of the tokens that
count from a :class:`~torchrl_llm.data.scoring.TokenScorer`, and averages the values of its
``surrogate``. A new loss is a subclass with a ``surrogate``; put its mathematics into
:mod:`torchrl_llm.functional`. The subclass takes ``**settings: Unpack[PolicyLossSettings]`` for the
arguments that it only passes on. A mistyped name still raises an error. The method ``extras``
requests more than log-probs from the forward, and the method ``further_terms`` adds terms to the
objective.

Shape legend: ``B`` rows, ``T`` tokens of a row, ``N`` tokens that count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl._utils import logger

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._log import tell_once
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import (
    Normalizer,
    ess_from_moments,
    ess_moments,
    k1,
    k3,
    token_weights,
    weighted_k3,
)
from torchrl_llm.functional.kl import KL_ESTIMATORS
from torchrl_llm.functional.kl import LossKLEstimator as KLEstimator
from torchrl_llm.objectives.correction import Correction
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import (
    MaskingStrategy,
    RowKeys,
    TokenRows,
    read_support,
    read_token_rows,
)
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss, check_scores


class PolicyLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of a policy-gradient loss; fields are float32 scalars.

    Attributes:
        loss_objective: the surrogate, averaged according to ``aggregation``; per token, ``[B, T,
            1]``, with ``aggregation="none"``.
        clip_fraction: share of tokens whose gradient a bound removes.
        kl_approx: mean of the sampled minus the current log-prob, nats; with a correction, of the
            proximal minus the current log-prob.
        ess_moments: ``[3]``, sums from which ``ESS`` is computed.
        entropy: mean entropy, nats.
        loss_entropy: the entropy bonus; ``None`` if off.
        loss_kl_to_ref: weighted KL to the reference; ``None`` if off.
        kl_to_ref: mean KL to the reference, nats.
        loss_kl_to_inference: weighted KL to the sampler; ``None`` if off.
        kl_to_inference: mean KL to the sampler, nats.
        correction_masked: share of tokens whose correction weight is zero.
        mismatch_k1: mean of sampled minus proximal log-prob, nats: the divergence of the proximal
            policy from the sampler.
        mismatch_k3: estimate of the same divergence that is never negative.
    """

    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    ess_moments: Tensor
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    correction_masked: Tensor | None = None
    mismatch_k1: Tensor | None = None
    mismatch_k3: Tensor | None = None

    @property
    def ESS(self) -> Tensor:
        """Effective sample size of the ratios current / sampled, as a share.

        It is also exact for the sum of the outputs of micro-batches.
        """
        return ess_from_moments(self.ess_moments.detach())

    def metrics(self) -> dict[str, Tensor]:
        """Return all scalars, including loss terms and ``ESS``, without gradient."""
        metrics = LLMLossOutput.metrics(self)
        del metrics["ess_moments"]
        return {**metrics, "ESS": self.ESS}


class PolicyTokens(NamedTuple):
    """The counted tokens of all rows, concatenated: the input of a surrogate.

    Attributes:
        log_probs: float32 ``[N]``, log-prob under the current policy, with gradients, nats.
        log_ratio: float32 ``[N]``, current minus proximal log-prob, with gradients, nats. The
            proximal policy is the sampler, or the policy that the correction defines.
        advantage: float32 ``[N]``.
        row: int64 ``[N]``, the row of each token.
        num_rows: ``B``.
        sample_log_probs: float32 ``[N]``, log-prob under the sampler, nats.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantage: Tensor
    row: Tensor
    num_rows: int
    sample_log_probs: Tensor

    @property
    def of_rows(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Arguments of a surrogate of whole rows (log-ratios, advantages, row indices, ``B``)."""
        return self.log_ratio, self.advantage, self.row, self.num_rows


class Surrogate(NamedTuple):
    """Output of a surrogate.

    Attributes:
        loss: float32 ``[N]``.
        clipped: bool ``[N]``, true where a bound removes the gradient.
    """

    loss: Tensor
    clipped: Tensor


Actor = nn.Module | TokenScorer
Aggregation = Literal[
    "token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant", "none"
]
SUMS = "sums are aggregation='sequence_sum'"


class PolicyGradientLoss(TokenLoss):
    """Base class of the policy-gradient losses over rows of sampled tokens.

    Subclasses define :meth:`surrogate`. ``masking_strategy`` selects the tokens that count:
    ``"sft"``, tokens after the row's prompt; ``"rlhf"``, tokens of the assistant mask;
    ``"generic"``, all tokens that have a prefix. If a row has a ``trace``, only sampled tokens with
    mask reason ``TRAINED`` count.

    Every mean is over counted tokens, divided by a :class:`~torchrl_llm.functional.Normalizer`.
    With the normalizer of the whole batch (:meth:`normalizer`), the outputs of its micro-batches
    add up to the output of the batch.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        reduction: ``None`` or ``"mean"``: according to ``aggregation``; ``"none"``: like
            ``aggregation="none"``.
        aggregation: how the tokens' losses are averaged. ``"token_mean"``; ``"sequence_mean"``, a
            mean over each row's tokens and then over rows (TorchRL's ``"prompt_mean"``);
            ``"prompt_mean"``, a mean over the tokens of all rows of a prompt and then over
            prompts, which needs ``"group_id"``; ``"sequence_sum"``, a sum over each row's tokens
            and a mean over rows; ``"constant"``, like ``"sequence_sum"`` but divided by
            ``constant_length``; ``"none"``, a padded ``[B, T, 1]`` loss.
        constant_length: divisor in tokens for ``"constant"``.
        count_empty_rows: count fully masked rows (stale, overlong, filtered) as sequences in the
            denominator, as Ludic and TRL do. By default they do not count, so that masking a row
            equals leaving it out. (With ``"prompt_mean"``, prompts whose rows are all empty also
            count.) With ``"token_mean"`` this raises an error, because that divides by tokens, also
            in TRL.
        correction: correction for a sampler that differs from the policy before the update. With
            ``None``, ratios are current over sampled probability.
        kl_mask_threshold: tokens whose ``log_ratio ** 2 / 2`` (current over sampled) is above this
            threshold add nothing to the objective. They still count in the denominators, because
            these must be known before the forward.
        entropy_bonus: subtract ``entropy_coeff`` times the entropy from the loss. By default only
            if ``entropy_coeff`` is given; the entropy is always a metric.
        entropy_coeff: weight of the bonus; 0.01 if ``entropy_bonus=True`` is given without it.
        kl_to_ref_coeff: weight of the KL to the reference policy; ``None`` or 0 for none.
        kl_to_inference_coeff: weight of the KL to the sampler; ``None`` or 0 for none.
        kl_estimator: how both KL terms are estimated, see :mod:`torchrl_llm.functional.kl`. As a
            loss, ``"k1"`` is useless and logs a warning: on samples of the current policy its
            gradient has mean zero for every other policy. Put the KL into the reward instead.
            ``"weighted_k3"`` (TRL's default) is multiplied by the ratio to the sampler, so value
            and gradient are also correct for rows of an older policy. (With a ``correction``, TRL
            multiplies by the ratio to the proximal policy.)
        masking_strategy: ``"sft"``, ``"rlhf"`` or ``"generic"``, see above.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs. The actor is not moved.
        gamma: no effect, as in TorchRL: the advantage estimator discounts.
        clip_value: no effect, as in TorchRL: the loss has no critic.
        samples_mc_entropy: no effect: the entropy of tokens is exact.
        ref_log_prob_padding_side: no effect: log-probs are aligned with their tokens.
        ref_log_prob_padding_value: no effect: log-probs are aligned with their tokens.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
    """

    @dataclass
    class _AcceptedKeys(RowKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        advantage: NestedKey = "advantage"
        sample_log_prob: NestedKey = ("log_probs", "full")
        prox_log_prob: NestedKey = ("prox_log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")

    default_keys = _AcceptedKeys
    needs_entropy = True
    output_type: type = PolicyLossOutput

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        reduction: Annotated[Literal["mean", "none"], SUMS] | None = None,
        aggregation: Aggregation = "token_mean",
        constant_length: Annotated[int, Ge(1)] | None = None,
        count_empty_rows: bool = False,
        correction: Correction | None = None,
        kl_mask_threshold: Annotated[float, Gt(0)] | None = None,
        entropy_bonus: bool | None = None,
        entropy_coeff: Annotated[float, Ge(0)] | None = None,
        kl_to_ref_coeff: Annotated[float, Ge(0)] | None = None,
        kl_to_inference_coeff: Annotated[float, Ge(0)] | None = None,
        kl_estimator: KLEstimator = "k3",
        masking_strategy: MaskingStrategy = "sft",
        device: torch.device | str | None = None,
        gamma: float | None = None,
        clip_value: bool | float | None = None,
        samples_mc_entropy: int = 1,
        ref_log_prob_padding_side: Literal["left", "right"] = "left",
        ref_log_prob_padding_value: float = 0.0,
    ) -> None:
        super().__init__(actor_network, device=device)
        self.samples_mc_entropy = samples_mc_entropy
        self.ref_log_prob_padding_side = ref_log_prob_padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        _tell_of(
            gamma=gamma is not None,
            clip_value=bool(clip_value),
            samples_mc_entropy=samples_mc_entropy != 1,
            ref_log_prob_padding_side=ref_log_prob_padding_side != "left",
            ref_log_prob_padding_value=ref_log_prob_padding_value != 0,
            entropy_coeff=entropy_bonus is False and bool(entropy_coeff),
        )
        aggregation = "none" if reduction == "none" else aggregation
        if aggregation == "constant" and constant_length is None:
            raise ConfigError(
                "aggregation='constant' needs constant_length, the tokens that the sum over each "
                "response is divided by: the limit of sampling (max_new_tokens)"
            )
        if aggregation != "constant" and constant_length is not None:
            raise ConfigError(
                f"constant_length belongs to aggregation='constant', got {aggregation!r}"
            )
        if count_empty_rows and aggregation in ("token_mean", "none"):
            raise ConfigError(
                f"count_empty_rows has no effect with aggregation={aggregation!r}, which divides "
                "by no number of rows"
            )
        if correction is not None and not isinstance(correction, Correction):
            raise ConfigError(f"correction must be a Correction, got {correction!r}")
        self.aggregation = aggregation
        self.constant_length = constant_length
        self.count_empty_rows = count_empty_rows
        self.correction = correction
        self.kl_mask_threshold = kl_mask_threshold
        default = 0.01 if entropy_bonus else 0.0
        entropy_coeff = default if entropy_coeff is None else float(entropy_coeff)
        self.entropy_coeff = 0.0 if entropy_bonus is False else entropy_coeff
        self.kl_to_ref_coeff = float(kl_to_ref_coeff or 0.0)
        self.kl_to_inference_coeff = float(kl_to_inference_coeff or 0.0)
        self.kl_estimator = kl_estimator
        if kl_estimator == "k1" and (self.kl_to_ref_coeff or self.kl_to_inference_coeff):
            logger.warning(
                f"{type(self).__name__}: the gradient of k1 has mean zero and ignores the other "
                "policy; as a loss take k2 or k3, or put the divergence into the reward"
            )
        self.masking_strategy = masking_strategy
        if aggregation == "prompt_mean":
            tell_once(
                "aggregation='prompt_mean' is a mean over the tokens of all rows of a prompt, and "
                "then over prompts; what TorchRL calls so is aggregation='sequence_mean'"
            )
        self._forward_value_estimator_keys()

    @property
    def reduction(self) -> str:
        """``"none"`` if the loss is per token, otherwise ``"mean"``."""
        return "none" if self.aggregation == "none" else "mean"

    @property
    def entropy_bonus(self) -> bool:
        """Whether the entropy is part of the loss (``entropy_coeff`` is not 0)."""
        return bool(self.entropy_coeff)

    @abstractmethod
    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """Return the loss of each token, not averaged.

        Args:
            tokens: the ``N`` tokens that count.
        """

    def further_terms(
        self,
        tensordict: Any,
        rows: TokenRows,
        tokens: PolicyTokens,
        scores: TokenScores,
        reduce: Callable[[Tensor], Tensor],
        share: float,
    ) -> dict[str, Tensor]:
        """Return further terms and metrics, named as fields of ``output_type``.

        Args:
            tensordict: the rows.
            rows: their tokens; ``rows.column`` reads the columns.
            tokens: the ``N`` tokens that count.
            scores: output of the actor, including extras, on its device.
            reduce: averages ``[N]`` values in the same way as the objective; for ``loss_*`` terms.
            share: 1 / tokens of the whole batch; for metrics, ``values.sum() * share``.

        Returns:
            Fields; none by default.
        """
        return {}

    def advantage(self, tensordict: Any, rows: TokenRows) -> Tensor:
        """Return the advantage for :meth:`surrogate`: by default the advantage column of the rows.

        Args:
            tensordict: the rows.
            rows: their tokens.

        Returns:
            ``[N]``, constants.

        Raises:
            DataError: when the advantage is missing, has a wrong shape or is not finite.
        """
        return rows.advantage(tensordict, self.tensor_keys.advantage)

    def extras(self, tensordict: Any, rows: TokenRows) -> ScoreExtras | None:
        """Request the support of truncated sampling, if the rows recorded it.

        A subclass extends this with its own requests.

        Args:
            tensordict: the rows.
            rows: their tokens.

        Raises:
            DataError: when the kept ids do not belong to the tokens.
        """
        support = read_support(tensordict, rows, self.tensor_keys.support)
        return None if support is None else ScoreExtras(support=support)

    def select(self, tensordict: Any) -> TokenRows:
        """See :meth:`TokenLoss.select`."""
        return read_token_rows(tensordict, self.tensor_keys, self.masking_strategy)

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`.

        Raises:
            DataError: also when a row was sampled with truncation and has no support.
        """
        rows.refuse_truncated_support(tensordict, self.tensor_keys.truncated_support)
        self._columns(tensordict, rows)
        if self.kl_to_ref_coeff:
            self.refuse_unscored(tensordict, rows, "ref_log_probs")
        if self.aggregation == "prompt_mean":
            rows.groups(tensordict, self.tensor_keys.group_id)

    def refuse_unscored(self, tensordict: Any, rows: TokenRows, name: str) -> None:
        """See ``TokenRows.refuse_unscored``, for the column that a key names.

        Args:
            tensordict: the rows.
            rows: their tokens.
            name: name of the key.
        """
        if self.masking_strategy == "generic":
            keys = self.tensor_keys
            rows.refuse_unscored(tensordict, getattr(keys, name), keys.assistant_mask)

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """See :meth:`TokenLoss.count`."""
        groups = None
        if self.aggregation == "prompt_mean":
            groups = rows.groups(tensordict, self.tensor_keys.group_id)
        return rows.normalizer(groups, count_empty=self.count_empty_rows)

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> Any:
        """See :meth:`TokenLoss.from_scores`.

        Returns:
            An instance of ``output_type``.
        """
        normalizer = normalizer or self.count(tensordict, rows)
        log_probs = check_scores(scores.log_probs, rows)
        device = self.device or log_probs.device
        log_probs = log_probs.to(device)
        columns = {k: sent(v, device) for k, v in self._columns(tensordict, rows).items()}
        sampled = columns["sampled"]
        proximal = columns.get("proximal", sampled)
        if self.correction is not None and self.correction.proximal == "current":
            proximal = log_probs.detach()
        tokens = PolicyTokens(
            log_probs,
            log_probs - proximal,
            columns["advantage"],
            sent(rows.row, device),
            len(rows.counts),
            sampled,
        )
        reduce = self._reducer(tensordict, rows, normalizer, log_probs)
        share = 1.0 / normalizer.num_tokens
        fields = self._objective(tokens, proximal, reduce, share)
        fields |= self._entropy(scores.entropy.to(device), reduce, share)
        fields |= self._divergences(tokens, columns.get("reference"), reduce, share)
        fields |= self.further_terms(tensordict, rows, tokens, scores, reduce, share)
        return self.output_type(**fields)

    def _columns(self, tensordict: Any, rows: TokenRows) -> dict[str, Tensor]:
        columns = {
            "advantage": self.advantage(tensordict, rows),
            "sampled": self.column(tensordict, rows, "sample_log_prob"),
        }
        if self.correction is not None and self.correction.proximal == "stored":
            columns["proximal"] = self.column(tensordict, rows, "prox_log_prob")
        if self.kl_to_ref_coeff:
            columns["reference"] = self.column(tensordict, rows, "ref_log_probs")
        return columns

    def _objective(
        self, tokens: PolicyTokens, proximal: Tensor, reduce: Callable, share: float
    ) -> dict[str, Tensor]:
        loss, clipped = self.surrogate(tokens)
        log_ratio = tokens.log_ratio.detach()
        if self.kl_mask_threshold is not None:
            from_sampler = (tokens.log_probs - tokens.sample_log_probs).detach()
            loss = loss.where(from_sampler.square() / 2 <= self.kl_mask_threshold, 0.0)
        fields = {}
        if self.correction is not None:
            mismatch = proximal - tokens.sample_log_probs
            weights = self.correction.weights(mismatch, tokens.row, tokens.num_rows)
            loss = loss * weights
            fields = {
                "correction_masked": (weights == 0).sum() * share,
                "mismatch_k1": k1(mismatch).sum() * share,
                "mismatch_k3": k3(mismatch).sum() * share,
            }
        return fields | {
            "loss_objective": reduce(loss),
            "clip_fraction": clipped.sum() * share,
            "kl_approx": -log_ratio.sum() * share,
            "ess_moments": ess_moments(tokens.log_probs - tokens.sample_log_probs),
        }

    def _entropy(self, entropy: Tensor, reduce: Callable, share: float) -> dict[str, Tensor]:
        fields = {"entropy": entropy.detach().sum() * share}
        if self.entropy_coeff:
            fields["loss_entropy"] = -self.entropy_coeff * reduce(entropy)
        return fields

    def _divergences(
        self, tokens: PolicyTokens, reference: Tensor | None, reduce: Callable, share: float
    ) -> dict[str, Tensor]:
        coefficient = self.kl_to_inference_coeff
        current = tokens.log_probs if coefficient else tokens.log_probs.detach()
        to_inference = self._estimate(tokens.sample_log_probs - current, tokens)
        fields = {"kl_to_inference": to_inference.detach().sum() * share}
        if coefficient:
            fields["loss_kl_to_inference"] = coefficient * reduce(to_inference)
        if reference is not None:
            to_reference = self._estimate(reference - tokens.log_probs, tokens)
            fields["kl_to_ref"] = to_reference.detach().sum() * share
            fields["loss_kl_to_ref"] = self.kl_to_ref_coeff * reduce(to_reference)
        return fields

    def _estimate(self, log_ratio: Tensor, tokens: PolicyTokens) -> Tensor:
        if self.kl_estimator == "weighted_k3":
            # The sampler drew the tokens, even if a correction compares with a different policy.
            return weighted_k3(log_ratio, tokens.log_probs - tokens.sample_log_probs)
        return KL_ESTIMATORS[self.kl_estimator](log_ratio)

    def _reducer(
        self, tensordict: Any, rows: TokenRows, normalizer: Normalizer, like: Tensor
    ) -> Callable[[Tensor], Tensor]:
        mode = self.aggregation
        if mode == "none":
            return lambda values: rows.scatter(values).unsqueeze(-1)
        lengths = None
        if mode == "sequence_mean":
            lengths = rows.counts
        elif mode == "prompt_mean":
            groups = rows.groups(tensordict, self.tensor_keys.group_id).tolist()
            tokens = normalizer.group_tokens or {}
            strange = {g for g, n in zip(groups, rows.counts, strict=True) if n and g not in tokens}
            if strange:
                raise DataError(
                    f"the normalizer does not count the prompt groups {sorted(strange)[:8]}: it "
                    "must be loss.normalizer(...) of the whole batch that these rows are a part of"
                )
            lengths = [tokens.get(group, 0) for group in groups]
        if lengths is not None:
            lengths = sent(torch.tensor(lengths, dtype=like.dtype)[rows.row], like.device)
        weights = token_weights(lengths, mode, normalizer, constant_length=self.constant_length)
        # In rows of 100,000 tokens, float32 loses sums that nearly cancel.
        if isinstance(weights, float):
            return lambda values: (values.sum(dtype=torch.float64) * weights).to(values.dtype)
        return lambda values: (values * weights).sum(dtype=torch.float64).to(values.dtype)

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Called by ``set_keys`` to update ``in_keys``; there is no value estimator."""
        keys = self.tensor_keys
        self.in_keys = [keys.action, keys.sample_log_prob, keys.advantage]
        if self.correction is not None and self.correction.proximal == "stored":
            self.in_keys.append(keys.prox_log_prob)
        if self.kl_to_ref_coeff:
            self.in_keys.append(keys.ref_log_probs)
        if self.aggregation == "prompt_mean":
            self.in_keys.append(keys.group_id)
        fields = self.output_type.__dataclass_fields__
        self.out_keys = ["ESS" if name == "ess_moments" else name for name in fields]


def _tell_of(**without_effect: bool) -> None:
    """Log once which given arguments have no effect."""
    for name, given in without_effect.items():
        if given:
            tell_once(f"{name} has no effect here: nothing of a policy loss reads it")


class PolicyLossSettings(TypedDict, total=False):
    """Arguments that all policy-gradient losses share, without the aggregation.

    :class:`~torchrl_llm.objectives.PolicyGradientLoss` documents them.
    """

    constant_length: int | None
    count_empty_rows: bool
    correction: Correction | None
    device: torch.device | str | None
    entropy_bonus: bool | None
    entropy_coeff: float | None
    kl_estimator: KLEstimator
    kl_mask_threshold: float | None
    kl_to_inference_coeff: float | None
    kl_to_ref_coeff: float | None
    masking_strategy: MaskingStrategy
    reduction: Literal["mean", "none"] | None
    gamma: float | None
    clip_value: bool | float | None
    samples_mc_entropy: int
    ref_log_prob_padding_side: Literal["left", "right"]
    ref_log_prob_padding_value: float


class Bounds:
    """An attribute ``(low, high)`` of a loss that may be assigned between steps.

    A single number sets both bounds.

    Args:
        max_low: ``low`` may be at most this; ``None`` for no limit.
        open_low: whether ``low=None``, no lower bound, is allowed.

    Raises:
        ConfigError: on assignment of bounds that are negative or above the limit.

    Example:
        >>> class Loss:
        ...     clip_epsilon = Bounds(max_low=1.0)
        >>> loss = Loss()
        >>> loss.clip_epsilon = 0.2
        >>> loss.clip_epsilon
        (0.2, 0.2)
    """

    def __init__(self, *, max_low: float | None = None, open_low: bool = False) -> None:
        self.max_low, self.open_low = max_low, open_low

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the name of the attribute."""
        self.name = name

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        """Return the pair ``(low, high)``."""
        return self if loss is None else loss.__dict__[f"_{self.name}"]

    def __set__(self, loss: Any, value: float | tuple[float | None, float]) -> None:
        """Check the bounds and store them."""
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if not (len(pair) == 2 and self._low(pair[0]) and _at_least_zero(pair[1])):
            limit = "" if self.max_low is None else f" <= {self.max_low}"
            raise ConfigError(
                f"{self.name} must be a number or (low, high) with 0 <= low{limit} and 0 <= high, "
                f"got {value!r}"
            )
        low = None if pair[0] is None else float(pair[0])
        loss.__dict__[f"_{self.name}"] = (low, float(pair[1]))

    def _low(self, value: float | None) -> bool:
        if value is None:
            return self.open_low
        return _at_least_zero(value) and (self.max_low is None or value <= self.max_low)


def _at_least_zero(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0

"""Groups of a recipe's keys that make the algorithm: loss, advantage, correction, reward, filter.

``loss`` and ``advantage`` are :class:`~torchrl_llm.recipes.strict_config.Component` groups: their
keys are the arguments of the class that ``type`` names. Any loss can be combined with any advantage
estimator.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torchrl_llm._checked import Ge, Gt
from torchrl_llm._registry import absolute_path, find
from torchrl_llm._settings import Count, Group, ensure, naming, own
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.objectives import Correction, PairLoss, SFTLoss
from torchrl_llm.objectives.credit import BestWorst, ComparingCredit, GAEAdvantage
from torchrl_llm.recipes.groups import RefModelConfig
from torchrl_llm.recipes.reward_config import check_components, check_function, has_token_rewards
from torchrl_llm.recipes.strict_config import Component, Variants, variant


class LossConfig(Component):
    """The objective. ``type`` names its class; the keys are the arguments of its constructor.

    Arguments set by the recipe are not keys of this group: the actor, the correction (group
    ``correction``), the weight of the reference (``train.kl_to_ref_coeff``), and which tokens
    count.
    """

    default = "grpo"

    @property
    def compares_pairs(self) -> bool:
        """Whether it reads pairs instead of advantages."""
        return isinstance(self.target, type) and issubclass(self.target, PairLoss)


class AdvantageConfig(Component):
    """The advantage estimator. ``type`` names its class; the keys are its constructor's arguments.

    Arguments set by the recipe are not keys of this group: the size of a group (``env.repeats``),
    the keys of the rows, and the filters (group ``filter``).
    """

    default = "group"

    @property
    def compares_group(self) -> bool:
        """Whether the responses to one prompt are compared with one another."""
        comparing = issubclass(self.target, ComparingCredit)
        return comparing and self.options.get("baseline") != "none"

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads per-token rewards if rows have them."""
        return getattr(self.target, "reads_tokens", False)

    @property
    def makes_pairs(self) -> bool:
        """Whether it marks pairs and drops the other rows of a group."""
        return isinstance(self.target, type) and issubclass(self.target, BestWorst)


_LOSS_GIVEN = (
    "actor_network",
    "correction",
    "critic_network",  # the actor has a value head
    "device",
    "entropy_bonus",  # set by entropy_coeff
    "kl_to_ref_coeff",
    "masking_strategy",
    "reduction",  # set by aggregation
    "sft_tokens",  # only sampled tokens are trained
    # TorchRL's, without effect.
    "clip_value",
    "gamma",
    "ref_log_prob_padding_side",
    "ref_log_prob_padding_value",
    "samples_mc_entropy",
)
_CREDIT_GIVEN = (
    "counts",
    "group_size",
    "grpo_size",
    "max_queued_groups",
    "selectors",  # set by the group `filter`
    "keep_return_bounds",
    "keep_zero_variance",
    "candidate_group_size",  # env.repeats is sampled, and all of it trained
    "candidate_selection_min_size",
    "candidate_selector",
    "verbose",
    # The return of a trajectory is the sum of its turns; a cut trajectory counts unchanged.
    "trajectory_return",
    "truncated",
    # Keys in the rows of the recipe.
    "advantage_key",
    "done_key",
    "fallback_key",
    "final_value_key",
    "kl_key",
    "prompt_key",
    "rewards_key",
    "value_key",
    "value_target_key",
    "values_key",
)


def _loss(name: str) -> type[Component]:
    return variant(LossConfig, name, find("losses", name), given=_LOSS_GIVEN)


def _credit(name: str) -> type[Component]:
    target = find("advantages", name)
    # Also the discount per turn; GAE's discount is per token.
    given = _CREDIT_GIVEN if target is GAEAdvantage else (*_CREDIT_GIVEN, "gamma")
    return variant(AdvantageConfig, name, target, given=given)


class PreferenceLossConfig(Component):
    """The loss for compared answers. ``type`` names it; the keys are its arguments."""

    default = "dpo"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probs of a reference."""
        return self.target.needs_reference


def _preference_loss(name: str) -> type[Component]:
    given = ("actor_network", "device")
    return variant(PreferenceLossConfig, name, find("preference_losses", name), given=given)


LossConfig.variants = Variants("losses", _loss)
PreferenceLossConfig.variants = Variants("preference_losses", _preference_loss)
AdvantageConfig.variants = Variants("advantages", _credit)


class SFTLossConfig(Group, key="loss"):
    """How answers are imitated, see :class:`~torchrl_llm.objectives.SFTLoss`.

    Attributes:
        function: ``sft``; or ``minor_sft``, which weighs an answer less, the more probable it
            already is compared to the reference (arXiv:2408.10642).
        beta: slope of ``minor_sft``; ``None`` for 0.1, and for ``sft``, which has none.
        reduction: ``mean`` over rows of the mean over their tokens, or ``token_mean`` over all
            tokens.
    """

    function: Literal["sft", "minor_sft"] = "sft"
    beta: Annotated[float, Gt(0)] | None = None
    reduction: Literal["mean", "token_mean"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only("beta", self.function == "minor_sft", "with loss.function=sft")
        ensure(
            not (self.function == "minor_sft" and self.reduction == "token_mean"),
            "minor_sft looks at whole answers: no loss.reduction=token_mean",
        )

    def needs_reference(self, kl_to_ref_coeff: float) -> bool:
        """Whether the loss reads the log-probs of a reference.

        Args:
            kl_to_ref_coeff: ``train.kl_to_ref_coeff``.
        """
        return self.function == "minor_sft" or kl_to_ref_coeff > 0

    def check_reference(self, kl_to_ref_coeff: float, ref_model: RefModelConfig) -> None:
        """Reject a reference that is not used, or used twice.

        Args:
            kl_to_ref_coeff: ``train.kl_to_ref_coeff``.
            ref_model: the reference.

        Raises:
            ConfigError: a key would have no effect.
        """
        ensure(
            ref_model == RefModelConfig() or self.needs_reference(kl_to_ref_coeff),
            "ref_model.name has no effect without loss.function=minor_sft or "
            "train.kl_to_ref_coeff above 0",
        )
        ensure(
            not (self.function == "minor_sft" and kl_to_ref_coeff),
            "minor_sft holds the policy to the reference already: no train.kl_to_ref_coeff",
        )

    def build(self, actor: TokenScorer, kl_to_ref_coeff: float) -> SFTLoss:
        """The loss.

        Args:
            actor: the policy.
            kl_to_ref_coeff: ``train.kl_to_ref_coeff``.
        """
        return SFTLoss(
            actor,
            reduction=self.reduction,
            loss_function=self.function,
            beta=self.beta,
            kl_to_ref_coeff=kl_to_ref_coeff or None,
        )


class CorrectionConfig(Group, key="correction"):
    """Importance weights for a sampler that differs from the trainer.

    With a correction, the ratio in the loss is the current policy divided by the trainer's policy
    before the update. Each token's loss is multiplied by a bounded weight: the trainer's policy
    before the update, divided by the sampler's policy. See
    :class:`~torchrl_llm.objectives.Correction`.

    Attributes:
        type: ``none``: no correction; ``tis``: weights are clipped to the bounds; ``mis``: weights
            outside of the bounds become zero; ``icepop``: as ``mis``, per token with two bounds.
        level: ratio from which the weight is computed: of each token, the product over the row
            (``sequence``), or the geometric mean over the row.
        bounds: ``[low, high]`` of the weight; ``None`` for the defaults of the type.
        sequence_bounds: ``[low, high]``: rows whose geometric mean ratio is outside are masked,
            with every type.
    """

    type: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    bounds: tuple[float, float] | None = None
    sequence_bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming("correction"):
            self.build(stored=False)

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected."""
        return self.type != "none" or self.sequence_bounds is not None

    def build(self, *, stored: bool) -> Correction | None:
        """The correction of a loss; ``None`` without a correction.

        Args:
            stored: whether to read the trainer's own log-probs from the rows. Otherwise the
                log-probs of the current policy are used, which are the same if a batch is used for
                only one update.
        """
        correction = Correction(**vars(self), proximal="stored" if stored else "current")
        return correction if self.enabled else None


class RewardComponentsConfig(Group, key="reward"):
    """Components of the reward of a step, in training and in evaluation.

    Attributes:
        components: components of the reward in addition to the task's own, by name; each has the
            keys that :mod:`torchrl_llm.recipes.reward_config` reads: ``weight`` and the other terms
            of a :class:`~torchrl_llm.rewards.Component`; ``type`` (``format``, ``length``,
            ``judge`` or ``model``, by default the name) or ``_target_``; and the arguments of the
            scorer. ``task.weight`` weighs the task's own reward. The task decides what counts as a
            success.
        function: replaces the task's own reward: name of a registered reward, or ``file.py:name``
            or ``module:name`` of a function of ``(response, answer)`` or ``(response, row)``.
            ``reward=NAME`` does the same; ``None`` keeps the task's own reward.
        on_all_invalid: effect of a step in which no answer has a valid reward: ``error`` saves and
            ends the run; ``continue`` continues it.
    """

    components: dict[str, dict[str, Any]] = own()
    function: str | None = None
    on_all_invalid: Literal["error", "continue"] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.components = check_components(self.components)
        self.function = absolute_path(self.function)
        if self.function is not None:
            check_function(self.function)

    @property
    def changes_the_reward(self) -> bool:
        """Whether a component changes the reward, and is not only recorded."""
        return any(part.get("weight", 1.0) != 0 for part in self.components.values())

    @property
    def per_token(self) -> bool:
        """Whether a component rewards each token of a response."""
        return has_token_rewards(self.components)


class RewardConfig(RewardComponentsConfig):
    """The reward of a step, and penalties added before the advantages are computed.

    ``train/reward`` includes these penalties, ``train/success`` does not depend on them.

    Attributes:
        cut_penalty: number that is subtracted from the reward of an answer that
            ``inference_model.max_tokens`` has cut.
        overlong_cache: number of tokens before ``inference_model.max_tokens`` over which a penalty
            falls from 0 to -1 (DAPO, arXiv:2503.14476, equation 13); ``None`` for no penalty.
        kl_coeff: weight with which the divergence from ``ref_model`` is subtracted from the reward;
            0 for none. ``train.kl_to_ref_coeff`` puts it into the loss instead.
        kl_reduction: subtract the ``sum`` or the ``mean`` over the response's tokens; or, with
            ``token``, subtract from each token its own divergence, which makes per-token rewards.
        kl_target: target divergence of the adaptive weight (arXiv:1909.08593, section 2.2), nats
            per response, or per token with ``kl_reduction=mean``; ``None`` keeps the weight
            constant.
        kl_horizon: number of responses over which the weight fully reacts to a deviation of the
            divergence.
    """

    cut_penalty: Annotated[float, Ge(0)] = 0.0
    overlong_cache: Count | None = None
    kl_coeff: Annotated[float, Ge(0)] = 0.0
    kl_reduction: Literal["sum", "mean", "token"] = "sum"
    kl_target: Annotated[float, Gt(0)] | None = None
    kl_horizon: Count = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "without reward.kl_coeff above 0"
        self.only("kl_reduction", self.kl_coeff > 0, where)
        self.only("kl_target", self.kl_coeff > 0, f"{where}, where it starts")
        self.only("kl_horizon", self.kl_target is not None, "without reward.kl_target")


class FilterConfig(Group, key="filter"):
    """Rows that are not trained on; the token ledger counts their tokens.

    Attributes:
        zero_variance: treatment of groups whose rewards are all equal (``keep``: they count in the
            denominator of the loss; ``drop``: they are removed; ``resample``: they are removed, and
            further prompts are collected until the batch is full).
        return_bounds: exclusive ``[low, high]`` bounds on the mean return of a group; groups
            outside are treated like groups with equal rewards (dynamic sampling, arXiv:2503.14476);
            ``None`` for no bounds.
        truncated: treatment of responses cut by ``inference_model.max_tokens``, and of rows cut by
            ``train.max_seq_len`` (``keep``: they are trained; ``mask``: they are not trained, but
            count in their group's mean; ``drop``: they are not trained and do not count in the
            mean).
        max_resamples: maximum number of batches that ``resample`` may add.
    """

    zero_variance: Literal["keep", "drop", "resample"] = "keep"
    return_bounds: tuple[float, float] | None = None
    truncated: Literal["keep", "mask", "drop"] = "keep"
    max_resamples: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        resamples = self.zero_variance == "resample"
        self.only("max_resamples", resamples, "without filter.zero_variance=resample")

    @property
    def resamples(self) -> int:
        """Additional batches that a step may collect."""
        return self.max_resamples if self.zero_variance == "resample" else 0

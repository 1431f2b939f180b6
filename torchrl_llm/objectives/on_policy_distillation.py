"""Distillation on the student's own samples: the teacher grades every token.

The expected gradient of each estimator is the gradient of the reverse divergence.

Shape legend: ``N`` tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Unpack

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm.data import scoring
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import group_value
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import k2, ppo_clip, truncated_weights
from torchrl_llm.objectives import policy_loss as base
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows

# Larger weights would overflow.
_MAX_WEIGHT = 1e8

Estimator = Literal["advantage", "k2", "full_vocabulary"]


class OnPolicyDistillationLossOutput(base.PolicyLossOutput):
    """Output of :class:`OnPolicyDistillationLoss`: ``PolicyLossOutput`` plus the teacher's terms.

    Attributes:
        loss_distill: the divergence as a separate term; absent with ``estimator="advantage"``,
            where it is part of ``loss_objective``.
        kl_to_teacher: mean divergence of the student from its teacher, nats: over the vocabulary
            with ``"full_vocabulary"``, otherwise the mean of student minus teacher log-prob.
    """

    loss_distill: Tensor | None = None
    kl_to_teacher: Tensor | None = None


class OnPolicyDistillationLoss(base.PolicyGradientLoss):
    r"""Reverse divergence from a teacher on the student's own samples.

    Minimises :math:`\mathrm{KL}(\pi \| \pi_T)` over the tokens that the student visits
    (arXiv:2306.13649 with :math:`\lambda = 1`, arXiv:2306.08543). There are three estimators. The
    expected gradient of each is the gradient of the divergence at each visited state:

    - ``"advantage"``: :math:`A_t = \log \pi_T - \log \pi_{old}`, a constant, with the importance
      ratio: :math:`-r_t A_t` (Thinking Machines, *On-Policy Distillation*, 2025; with a clip where
      ``clip_epsilon`` is given). :math:`\pi_{old}` is the sampler.
    - ``"k2"``: :math:`\tfrac12 (\log \pi - \log \pi_T)^2`, differentiated, weighted by the ratio as
      a constant (1 on fresh samples).
    - ``"full_vocabulary"``: the divergence itself, summed over the vocabulary at each visited
      state. It has no noise from the sampled token, but needs one more forward of the teacher. Its
      ``divergence`` may also be ``"forward"``.

    Ludic's OPD differentiates :math:`\log \pi - \log \pi_T` on samples (``k1`` as a loss). This
    gives :math:`\nabla \log \pi`, which has mean zero and does not depend on the teacher.

    As in the papers, none of the estimators credits a token for its effect on later tokens (the
    discount is 0).

    **Teachers.** ``"advantage"`` and ``"k2"`` read the teacher's log-probs from the rows.
    :class:`~torchrl_llm.envs.transforms.RetrieveTeacherLogProb` writes them, with a single teacher
    or with the teacher that each row names (multi-teacher distillation, MOPD).
    ``"full_vocabulary"`` calls the teacher in the loss: a single teacher, or the teacher that the
    row's ``teacher_key`` names. Teachers are frozen and not parameters of the loss; :meth:`to` does
    not move them.

    **Outcomes.** ``outcome_coeff`` adds the rows' own advantage: :math:`A = A_{distill} + \alpha
    A_{outcome}` (MOPD of arXiv:2601.02780 with several teachers and a ``correction`` of type
    ``"mis"`` for the sampler). With ``"k2"`` and ``"full_vocabulary"``, the outcome is a separate
    policy-gradient term. To combine a teacher with any loss and advantage estimator, see
    :class:`~torchrl_llm.objectives.credit.TeacherKL`.

    Args:
        actor_network: the student: a policy wrapper, or a ``CausalScorer``.
        estimator: ``"advantage"``, ``"k2"`` or ``"full_vocabulary"``, see above.
        teachers: one scorer, or scorers by name, for ``"full_vocabulary"``. A teacher with a
            different vocabulary is rejected.
        divergence: ``"reverse"`` or, for ``"full_vocabulary"``, ``"forward"``.
        coeff: weight of the distillation.
        outcome_coeff: weight of the rows' advantage; with 0 it is not read.
        clip_epsilon: bounds of the ratio as in PPO; ``None`` for no clip.
        aggregation: see :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PolicyGradientLoss`,
            including a ``correction`` for a sampler that differs from the trainer. The correction
            weights only the policy-gradient term.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
        TypeError: for arguments that do not exist.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import write_rows
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> rows = TensorDict(batch_size=[2])
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> write_rows(rows, ("tokens", "full"), ids)
        >>> write_rows(rows, ("tokens", "prompt"), [x[:1] for x in ids])
        >>> write_rows(rows, ("log_probs", "full"), [torch.full(x.shape, -3.4) for x in ids])
        >>> student, teacher = (CausalScorer(Qwen2ForCausalLM(config)) for _ in range(2))
        >>> loss = OnPolicyDistillationLoss(student, estimator="full_vocabulary", teachers=teacher)
        >>> output = loss(rows)
        >>> output.total_loss().backward()
        >>> bool(output.kl_to_teacher > 0)
        True
    """

    @dataclass
    class _AcceptedKeys(base.PolicyGradientLoss._AcceptedKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        teacher_log_prob: NestedKey = ("next", "teacher_log_probs", "full")
        teacher: NestedKey = "domain"

    default_keys = _AcceptedKeys
    output_type = OnPolicyDistillationLossOutput
    clip_epsilon = base.Bounds(max_low=1.0)

    @checked
    def __init__(
        self,
        actor_network: base.Actor,
        *,
        estimator: Estimator = "advantage",
        teachers: scoring.TokenScorer | Mapping[str, scoring.TokenScorer] | None = None,
        divergence: Literal["reverse", "forward"] = "reverse",
        coeff: Annotated[float, Gt(0)] = 1.0,
        outcome_coeff: Annotated[float, Ge(0)] = 0.0,
        clip_epsilon: float | tuple[float, float] | None = None,
        aggregation: base.Aggregation = "token_mean",
        **settings: Unpack[base.PolicyLossSettings],
    ) -> None:
        _check_together(estimator, teachers, divergence, outcome_coeff, clip_epsilon)
        self.estimator, self.divergence = estimator, divergence
        self.coeff, self.outcome_coeff = float(coeff), float(outcome_coeff)
        # Without a clip the ratio is unbounded on both sides.
        self.clip_epsilon = (1.0, float("inf")) if clip_epsilon is None else clip_epsilon
        super().__init__(actor_network, aggregation=aggregation, **settings)
        named = {} if teachers is None else teachers
        self._one_teacher = isinstance(teachers, scoring.TokenScorer)
        # A plain dictionary, so that nn.Module does not register its values.
        self._teachers = {"the teacher": teachers} if self._one_teacher else dict(named)
        for name, teacher in self._teachers.items():
            scoring.check_same_vocabulary(self.scorer, teacher, names=("the student", name))

    @property
    def teachers(self) -> dict[str, scoring.TokenScorer]:
        """The teachers by name; empty if their log-probs are read from the rows."""
        return dict(self._teachers)

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        super().check(tensordict, rows)
        if self.estimator != "full_vocabulary":
            self.column(tensordict, rows, "teacher_log_prob")
            self.refuse_unscored(tensordict, rows, "teacher_log_prob")
        elif not self._one_teacher:
            self._names(tensordict)

    def advantage(self, tensordict: Any, rows: TokenRows) -> Tensor:
        """Return the advantage of each token, from the teacher, the outcome or both."""
        sampled = self.column(tensordict, rows, "sample_log_prob")
        advantage = torch.zeros_like(sampled)
        if self.estimator == "advantage":
            advantage = self.coeff * (self.column(tensordict, rows, "teacher_log_prob") - sampled)
        if self.outcome_coeff:
            outcome = rows.advantage(tensordict, self.tensor_keys.advantage)
            advantage = advantage + self.outcome_coeff * outcome
        return advantage

    def surrogate(self, tokens: base.PolicyTokens) -> base.Surrogate:
        """See :func:`~torchrl_llm.functional.ppo_clip`."""
        return base.Surrogate(*ppo_clip(tokens.log_ratio, tokens.advantage, *self.clip_epsilon))

    def extras(self, tensordict: Any, rows: TokenRows) -> scoring.ScoreExtras | None:
        """Request the teachers' distributions, if the divergence is over the vocabulary."""
        extras = super().extras(tensordict, rows)
        if self.estimator != "full_vocabulary":
            return extras
        states, index = self._states(tensordict, rows)
        return replace(
            extras or scoring.ScoreExtras(),
            teachers=states,
            teacher_index=index,
            divergence=self.divergence,
            detach_log_probs=not self._reads_log_probs,
        )

    @property
    def _reads_log_probs(self) -> bool:
        """Whether any term other than the divergence has a gradient."""
        divergences = (self.kl_to_ref_coeff, self.kl_to_inference_coeff)
        return any((self.outcome_coeff, self.entropy_coeff, *divergences))

    def further_terms(
        self,
        tensordict: Any,
        rows: TokenRows,
        tokens: base.PolicyTokens,
        scores: scoring.TokenScores,
        reduce: Callable[[Tensor], Tensor],
        share: float,
    ) -> dict[str, Tensor]:
        """Return the divergence as a separate term, unless it is the advantage."""
        if self.estimator == "full_vocabulary":
            divergence = scores.divergence.to(tokens.log_probs.device)
            kl = divergence.detach()
        else:
            teacher = self.column(tensordict, rows, "teacher_log_prob")
            teacher = sent(teacher, tokens.log_probs.device)
            gap = teacher - tokens.log_probs
            kl = -gap.detach()
            from_sampler = tokens.log_probs - tokens.sample_log_probs
            divergence = k2(gap) * truncated_weights(from_sampler, _MAX_WEIGHT)
        fields = {"kl_to_teacher": kl.sum() * share}
        if self.estimator != "advantage":
            fields["loss_distill"] = self.coeff * reduce(divergence)
        return fields

    def _names(self, tensordict: Any) -> list[str]:
        """Return the name of each row's teacher."""
        key = self.tensor_keys.teacher
        values = read_rows(tensordict, key, None)
        if values is None:
            raise DataError(f"with several teachers each row names its own, and {key!r} is missing")
        names = [group_value(value) for value in values]
        unknown = [name for name in names if name not in self._teachers]
        if unknown:
            raise DataError(
                f"rows name the teacher {unknown[0]!r} at {key!r}, and there are "
                f"{', '.join(self._teachers)}"
            )
        return names

    def _states(
        self, tensordict: Any, rows: TokenRows
    ) -> tuple[tuple[scoring.HeadStates, ...], Tensor | None]:
        """Return the hidden states of each teacher for its tokens, and each token's teacher."""
        if self._one_teacher:
            (teacher,) = self._teachers.values()
            return (_states_of(teacher, rows.sequences, rows.select),), None
        names = self._names(tensordict)
        present = [name for name in self._teachers if name in names]
        states = []
        for name in present:
            own = [row for row, of in enumerate(names) if of == name]
            sequences, select = ([x[row] for row in own] for x in (rows.sequences, rows.select))
            states.append(_states_of(self._teachers[name], sequences, select))
        number = torch.tensor([present.index(name) for name in names])
        return tuple(states), number[rows.row]

    def _forward_value_estimator_keys(self, **options: Any) -> None:
        super()._forward_value_estimator_keys(**options)
        keys = self.tensor_keys
        if not self.outcome_coeff:
            self.in_keys.remove(keys.advantage)
        if self.estimator != "full_vocabulary":
            self.in_keys.append(keys.teacher_log_prob)


def _states_of(
    teacher: scoring.TokenScorer, sequences: list[Tensor], select: list[Tensor]
) -> scoring.HeadStates:
    asked = scoring.ScoreExtras(states=True, log_probs=False)
    with torch.no_grad():
        states = teacher.token_scores(sequences, select, extras=asked).states
    if states is None:
        raise ConfigError(
            f"{type(teacher).__name__} does not show its states; full_vocabulary needs a teacher "
            "in this process, such as a TransformersWrapper"
        )
    return states


def _check_together(
    estimator: str, teachers: Any, divergence: str, outcome_coeff: float, clip_epsilon: Any
) -> None:
    if (estimator == "full_vocabulary") != (teachers is not None):
        raise ConfigError(
            "teachers belong to estimator='full_vocabulary', and are needed there; for the others "
            "RetrieveTeacherLogProb writes their log-probs into the rows"
        )
    if teachers is not None and not isinstance(teachers, scoring.TokenScorer):
        if not isinstance(teachers, Mapping) or not teachers:
            raise ConfigError(f"teachers must be a TokenScorer or some by name, got {teachers!r}")
        wrong = [name for name, one in teachers.items() if not isinstance(one, scoring.TokenScorer)]
        if wrong:
            raise ConfigError(f"the teachers {wrong} are not TokenScorers")
    if divergence == "forward" and estimator != "full_vocabulary":
        raise ConfigError(
            "divergence='forward' needs estimator='full_vocabulary': a sampled token estimates the "
            "reverse one"
        )
    if clip_epsilon is not None and estimator != "advantage" and not outcome_coeff:
        raise ConfigError(
            f"clip_epsilon bounds the ratio of a policy gradient, and estimator={estimator!r} "
            "without outcome_coeff has none"
        )

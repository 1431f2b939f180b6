"""Presets that learn from a teacher on the student's own samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

from torchrl_llm.algorithms.algorithm import Algorithm
from torchrl_llm.algorithms.presets import PRESETS, Actor
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms import RetrieveTeacherLogProb
from torchrl_llm.objectives import MCAdvantage, PolicyLossSettings

Estimator = Literal["advantage", "k2", "full_vocabulary"]


def make_opd(
    actor: Actor,
    teacher: TokenScorer,
    *,
    estimator: Estimator = "advantage",
    coeff: float = 1.0,
    **settings: Unpack[PolicyLossSettings],
) -> Algorithm:
    """On-policy distillation: the reverse divergence from a teacher where the student goes.

    Thinking Machines, *On-Policy Distillation*, 2025. Rewards are not read. By default the
    advantage of a token is how much likelier the teacher finds it. Ludic's preset differentiates
    that difference instead, whose expected gradient does not see the teacher; it is not offered.

    Args:
        actor: the student.
        teacher: scores the student's tokens; of the same vocabulary.
        estimator: how the divergence is estimated, see
            :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.
        coeff: weight of the divergence.
        **settings: further arguments of the loss.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> student, teacher = (CausalScorer(Qwen2ForCausalLM(config)) for _ in range(2))
        >>> [type(scorer).__name__ for scorer in make_opd(student, teacher).scorers]
        ['RetrieveTeacherLogProb']
    """
    return _distilled("opd", actor, teacher, estimator=estimator, coeff=coeff, **settings)


def make_mopd(
    actor: Actor,
    teachers: Mapping[str, TokenScorer],
    *,
    group_size: int = 8,
    estimator: Estimator = "advantage",
    coeff: float = 1.0,
    outcome_coeff: float = 0.0,
    **settings: Unpack[PolicyLossSettings],
) -> Algorithm:
    """On-policy distillation from several teachers: each row names its own under ``"domain"``.

    As in MiMo-V2-Flash (arXiv:2601.02780) the reward may have a part beside the teachers: with
    ``outcome_coeff`` the advantage in the group is added to the distillation's.

    Args:
        actor: the student.
        teachers: name to scorer; all of the student's vocabulary.
        group_size: responses to a prompt, with ``outcome_coeff``.
        estimator: how the divergence is estimated, see
            :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.
        coeff: weight of the divergence.
        outcome_coeff: weight of the advantage that the reward gives; 0 does not read the reward.
        **settings: further arguments of the loss.
    """
    algorithm = _distilled(
        "mopd",
        actor,
        teachers,
        estimator=estimator,
        coeff=coeff,
        outcome_coeff=outcome_coeff,
        **settings,
    )
    return replace(algorithm, credit=MCAdvantage(group_size)) if outcome_coeff else algorithm


def _distilled(
    name: str,
    actor: Actor,
    teachers: TokenScorer | Mapping[str, TokenScorer],
    **settings: Any,
) -> Algorithm:
    # The full vocabulary needs the teachers themselves, the others what they say of the rows.
    if settings["estimator"] == "full_vocabulary":
        return PRESETS[name].build(actor, teachers=teachers, **settings)
    scorers = (RetrieveTeacherLogProb(teachers, student=actor),)
    return replace(PRESETS[name].build(actor, **settings), scorers=scorers)

"""Distillation from a teacher's log-probs that are stored in the rows.

The tokens may come from demonstrations or from the student.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_llm._checked import checked
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.functional import Normalizer, k3
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows
from torchrl_llm.objectives.sft import SFTLoss, SFTReduction
from torchrl_llm.objectives.token_loss import LLMLossOutput, check_scores


def k3_kl_token_estimate(target_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    r"""Estimate the KL per token, :math:`e^d - 1 - d` with :math:`d` target minus own log-prob.

    On tokens drawn from the distribution of ``log_prob``, the mean of the estimate is
    :math:`\mathrm{KL}(\cdot \| \text{target})`. On other tokens the estimate is still never
    negative, and it is zero where the log-probs are equal. This is TorchRL's name for
    :func:`~torchrl_llm.functional.k3`.

    Args:
        target_log_prob: log-prob of the tokens under the target, nats.
        log_prob: log-prob of the tokens under the distribution from which they were drawn, nats.

    Returns:
        Nats, same shape.

    Raises:
        ValueError: for shapes that differ.

    Example:
        >>> k3_kl_token_estimate(torch.tensor([0.0, -1.0]), torch.tensor([-1.0, -1.0]))
        tensor([0.7183, 0.0000])
    """
    if target_log_prob.shape != log_prob.shape:
        raise ValueError(
            f"target_log_prob and log_prob must have one shape, got {tuple(target_log_prob.shape)} "
            f"and {tuple(log_prob.shape)}"
        )
    return k3(target_log_prob - log_prob)


class DistillationLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of :class:`DistillationLoss`; scalars.

    Attributes:
        loss_distill: the objective; ``[B]`` if the reduction is ``"none"``.
        kl_to_teacher: mean of the estimate over the counted tokens, nats.
    """

    loss_distill: Tensor
    kl_to_teacher: Tensor | None = None


class DistillationLoss(SFTLoss):
    r"""KL divergence from a teacher whose log-probs are stored in the rows, estimated by ``k3``.

    Let :math:`d` be the teacher's minus the student's log-prob. ``"reverse"`` is :math:`e^d - 1 -
    d`, an estimate of KL(student || teacher) on samples of the student. ``"forward"`` is
    :math:`e^{-d}
    - 1 + d`, an estimate of KL(teacher || student) on samples of the teacher.

    As *losses*, both have the gradient of the forward divergence: on the student's samples
    :math:`E[(1 - e^d) \nabla \log \pi] = -\sum_v q_v \nabla \log \pi_v`, and on the teacher's
    :math:`E[(e^{-d} - 1) \nabla \log \pi]` is the same. So the trained student covers the modes of
    the teacher, and the loss is zero exactly where student and teacher agree. For the gradient of
    the reverse divergence use :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.
    :math:`e^d` becomes very large for a token that the teacher prefers and the student hardly ever
    samples.

    Rows, including their weights, are read as in :class:`~torchrl_llm.objectives.SFTLoss`. The
    teacher's log-probs come from :class:`~torchrl_llm.envs.transforms.RetrieveTeacherLogProb`, or
    from ``RetrieveLogProb(teacher, log_probs_full_key=("teacher_log_probs", "full"))``, at the
    temperature of the rows.

    Args:
        actor_network: the student: a policy wrapper, or a ``CausalScorer``.
        tokenizer: encodes conversations; by default the tokenizer of the actor. Not needed for rows
            that have ids.
        tokenizer_kwargs: keyword arguments of :class:`~torchrl_llm.data.text.ChatFormatter`.
        kl_direction: ``"reverse"`` or ``"forward"``, see above.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over rows; ``"token_mean"`` averages over all
            tokens.
        normalize_by_seq_length: use the mean instead of the sum over a row's tokens. This is the
            default, except for ``"token_mean"``, where it has no meaning.
        assistant_only: only the assistant's tokens count. Otherwise every token except the first
            counts, and the teacher must also have scored with ``assistant_only=False``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import write_rows
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> rows = TensorDict(batch_size=[2])
        >>> write_rows(rows, ("tokens", "full"), [torch.tensor([3, 4, 5]), torch.tensor([3, 7])])
        >>> masks = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        >>> write_rows(rows, ("masks", "all_assistant_mask"), masks)
        >>> teacher = [torch.tensor([0.0, -0.1, -0.2]), torch.tensor([0.0, -0.3])]
        >>> write_rows(rows, ("next", "teacher_log_probs", "full"), teacher)
        >>> loss = DistillationLoss(CausalScorer(Qwen2ForCausalLM(config)))
        >>> loss(rows).total_loss().backward()
    """

    @dataclass
    class _AcceptedKeys(SFTLoss._AcceptedKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        teacher_log_prob: NestedKey = ("next", "teacher_log_probs", "full")

    default_keys = _AcceptedKeys

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        kl_direction: Literal["reverse", "forward"] = "reverse",
        reduction: SFTReduction = "mean",
        normalize_by_seq_length: bool | None = None,
        assistant_only: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            tokenizer,
            tokenizer_kwargs,
            reduction=reduction,
            normalize_by_seq_length=normalize_by_seq_length,
            device=device,
        )
        self.kl_direction = kl_direction
        self.assistant_only = assistant_only
        self.masking_strategy = "rlhf" if assistant_only else "generic"

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`; also rejects tokens that the teacher has not scored."""
        self.column(tensordict, rows, "teacher_log_prob")
        if not self.assistant_only:
            keys = self.tensor_keys
            rows.refuse_unscored(tensordict, keys.teacher_log_prob, keys.assistant_mask)

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> DistillationLossOutput:
        """See :meth:`TokenLoss.from_scores`."""
        normalizer = normalizer or self.count(tensordict, rows)
        log_probs = check_scores(scores.log_probs, rows)
        log_probs = log_probs.to(self.device or log_probs.device)
        teacher = sent(self.column(tensordict, rows, "teacher_log_prob"), log_probs.device)
        pair = (teacher, log_probs) if self.kl_direction == "reverse" else (log_probs, teacher)
        divergence = k3_kl_token_estimate(*pair)
        weights = self._weights(tensordict)
        return DistillationLossOutput(
            loss_distill=self._averaged(divergence, rows, normalizer, weights),
            kl_to_teacher=self._over_tokens(divergence.detach(), rows, normalizer, weights),
        )

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Called by ``set_keys`` to update ``in_keys``; there is no value estimator."""
        keys = self.tensor_keys
        self.in_keys = [keys.action, keys.assistant_mask, keys.teacher_log_prob]
        self.out_keys = list(DistillationLossOutput.__dataclass_fields__)

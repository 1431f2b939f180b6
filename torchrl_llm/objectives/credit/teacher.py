"""A transform for any advantage estimator: subtracts the divergence from a teacher.

Shape legend: ``T`` tokens of a row.
"""

from __future__ import annotations

from typing import Annotated

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import Transform

from torchrl_llm._checked import Gt, checked
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import DataError
from torchrl_llm.objectives.credit.credit_assigner import sampled_in_row


class TeacherKL(Transform):
    r"""Subtracts the divergence from a teacher from the advantage of each sampled token.

    :math:`A_t' = A_t - c (\log \pi_{old} - \log \pi_T)`. The term is computed per token, when rows
    are written, and is a constant. The loss that reads the advantage multiplies it by the ratio.
    With :class:`~torchrl_llm.objectives.credit.ConstantCredit` of value 0 this is on-policy
    distillation (Thinking Machines, *On-Policy Distillation*, 2025). With the advantage of an
    outcome it is the mixture of multi-teacher distillation (MOPD, arXiv:2601.02780). With a
    sequence ratio it is GSPO with distillation, see :class:`~torchrl_llm.objectives.GSPOTokenLoss`.
    The term is not normalised, because estimators normalise before it is added.

    Append this transform before the estimator whose advantage it changes. Append the transform that
    writes the teacher's log-probs after both, because the transform that was appended last runs
    first::

        buffer.append_transform(JoinTurns())
        buffer.append_transform(TeacherKL(0.1))
        buffer.append_transform(MCAdvantage(8))
        buffer.append_transform(RetrieveTeacherLogProb(teacher, student=policy))

    Args:
        coeff: ``c``, the weight of the divergence.
        advantage_key: key of the advantage, ``[1, 1]`` or ``[T, 1]``; afterwards ``[T, 1]``, with 0
            at tokens that were not sampled.
        sample_log_prob_key: key of the sampler's log-probs, ``[T]``.
        teacher_log_prob_key: key of the teacher's log-probs, ``[T]``.

    Raises:
        ConfigError: for a coefficient that is not positive.
        DataError: when a column is missing, misaligned or not finite.

    Example:
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> buffer = ReplayBuffer(transform=TeacherKL(0.5))
        >>> ids = torch.arange(3)
        >>> index = buffer.extend([TensorDict(
        ...     tokens={"full": ids, "response": ids[1:]},
        ...     log_probs={"full": torch.tensor([0.0, -1.0, -1.0])},
        ...     next={"teacher_log_probs": {"full": torch.tensor([0.0, -3.0, -0.5])}},
        ...     advantage=torch.ones(1, 1))])
        >>> buffer[0]["advantage"].flatten().tolist()
        [0.0, 0.0, 1.25]
    """

    adds_keys_only = True

    @checked
    def __init__(
        self,
        coeff: Annotated[float, Gt(0)] = 1.0,
        *,
        advantage_key: NestedKey = "advantage",
        sample_log_prob_key: NestedKey = ("log_probs", "full"),
        teacher_log_prob_key: NestedKey = ("next", "teacher_log_probs", "full"),
    ) -> None:
        super().__init__()
        self.coeff = float(coeff)
        self.advantage_key = advantage_key
        self.sample_log_prob_key = sample_log_prob_key
        self.teacher_log_prob_key = teacher_log_prob_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> LazyStackedTensorDict | None:
        if tensordict is None:
            return None
        rows = row_list(tensordict)
        for row in rows:
            row.set(self.advantage_key, self._modified(row))
        return lazy_rows(rows)

    def _modified(self, row: TensorDict) -> Tensor:
        full = leaf(row, ("tokens", "full"))
        if full is None:
            raise DataError('a row has no ("tokens", "full"), which the policy writes')
        length = full.shape[0]
        mask = sampled_in_row(row, length)
        sampled = self._column(row, self.sample_log_prob_key, length, "the policy writes it")
        advice = "append RetrieveTeacherLogProb to the buffer after the advantage estimator"
        teacher = self._column(row, self.teacher_log_prob_key, length, advice)
        gap = torch.where(mask, sampled - teacher, 0.0)
        if not bool(gap.isfinite().all()):
            raise DataError("log-probs of sampler or teacher are NaN or infinite at sampled tokens")
        advantage = leaf(row, as_path(self.advantage_key))
        if advantage is None or advantage.shape not in ((1, 1), (length, 1)):
            got = None if advantage is None else tuple(advantage.shape)
            raise DataError(
                f"TeacherKL changes {self.advantage_key!r}, [1, 1] or [{length}, 1], and got "
                f"{got}; append the advantage estimator to the buffer after it"
            )
        spread = torch.where(mask, advantage.reshape(-1), 0.0)
        return (spread - self.coeff * gap)[:, None]

    @staticmethod
    def _column(row: TensorDict, key: NestedKey, length: int, advice: str) -> Tensor:
        values = leaf(row, as_path(key))
        if values is None or values.shape != (length,):
            got = None if values is None else tuple(values.shape)
            raise DataError(f"a row needs {key!r}, [{length}], and got {got}; {advice}")
        return values

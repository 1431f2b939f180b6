"""Online DPO: pairs of samples of the current policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.functional import sequence_log_ratio
from torchrl_llm.objectives.answer_loss import AnswerLoss, Answers
from torchrl_llm.objectives.dpo import DPOLoss
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows


@register("losses", "online_dpo")
class OnlineDPOLoss(DPOLoss):
    r"""The DPO loss of the best and the worst sample of each group (arXiv:2402.04792).

    :class:`~torchrl_llm.objectives.credit.BestWorst` marks the pairs. (The paper samples two
    answers per prompt, and a judge compares them.) An answer consists of the sampled tokens of a
    trajectory, without tool results, scored at the temperature of sampling. A trajectory may have
    several rows if its turns could not be joined. The reference log-probs are per token, as
    :class:`~torchrl_llm.envs.transforms.RetrieveLogProb` writes them.

    The arguments are the same as for :class:`~torchrl_llm.objectives.DPOLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([3, 7])]
        >>> masks = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        >>> reference = ragged_rows({"full": [torch.zeros(3), torch.zeros(2)]})
        >>> rows = TensorDict(
        ...     tokens=ragged_rows({"full": ids}),
        ...     masks=ragged_rows({"all_assistant_mask": masks}),
        ...     next=TensorDict(ref_log_probs=reference, batch_size=2),
        ...     pair_id=torch.tensor([0, 0]),
        ...     is_chosen=torch.tensor([True, False]),
        ...     batch_size=2,
        ... )
        >>> OnlineDPOLoss(CausalScorer(load_model()))(rows).total_loss().backward()
    """

    @dataclass
    class _AcceptedKeys(AnswerLoss._AcceptedKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        trace: NestedKey | None = "trace"
        ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")

    default_keys = _AcceptedKeys

    def places(self, tensordict: Any) -> tuple[Tensor, Tensor]:
        """See :meth:`AnswerLoss.places`; the first row represents its trajectory."""
        heads = self._heads(tensordict)
        first = (heads == torch.arange(len(heads))).nonzero()[:, 0]
        chosen, rejected = super().places(tensordict[first.tolist()])
        return first[chosen], first[rejected]

    def answers(self, tensordict: Any, rows: TokenRows, log_probs_N: Tensor) -> Answers:
        """See :meth:`AnswerLoss.answers`; rows of a trajectory are summed into the first."""
        found = super().answers(tensordict, rows, log_probs_N)
        heads = sent(self._heads(tensordict), log_probs_N.device)
        sums = [torch.zeros_like(each).index_add(0, heads, each) for each in found]
        return Answers(sums[0], sums[1].clamp(min=1), sums[2])

    def _heads(self, tensordict: Any) -> Tensor:
        """For each row, return the first row of its trajectory, int64 ``[B]``."""
        keys = (self.tensor_keys.pair_id, self.tensor_keys.is_chosen)
        sides = zip(
            *(self.numbers(tensordict, key, "BestWorst writes it").tolist() for key in keys),
            strict=True,
        )
        first: dict[Any, int] = {}
        return torch.tensor([first.setdefault(side, row) for row, side in enumerate(sides)])

    def _reference(self, tensordict: Any, rows: TokenRows) -> Tensor:
        log_probs_N = self.column(tensordict, rows, "ref_log_prob")
        return sequence_log_ratio(log_probs_N, rows.row, len(rows.counts))

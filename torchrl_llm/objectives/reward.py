"""The loss of a reward model: compares the scores of pairs of answers.

Shape legend: ``B`` rows, ``P`` pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.scoring import TokenScorer, TokenScores, last_values
from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer, bradley_terry
from torchrl_llm.objectives.answer_loss import AnswerLoss
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows, read_token_rows
from torchrl_llm.objectives.token_loss import LLMLossOutput


class RewardLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of a loss of a reward model; float32 scalars, each a mean over pairs.

    Attributes:
        loss_reward: the Bradley-Terry loss, including the centering term.
        accuracy: share of the pairs whose chosen answer has the larger score.
        margin: mean difference of the scores, chosen minus rejected.
        score: mean of the scores of both answers.
    """

    loss_reward: Tensor
    accuracy: Tensor
    margin: Tensor
    score: Tensor


class RewardLoss(AnswerLoss):
    """Bradley-Terry loss of the scores of pairs.

    See :func:`~torchrl_llm.functional.bradley_terry`. The score of a row is the value at its last
    token, so rows need no mask of answers. The optional column ``"margin"`` contains how much
    better the chosen answer is. TRL's ``RewardTrainer`` computes the same loss.

    Args:
        actor_network: computes values: a ``ClassifierScorer``, or a scorer with a value head.
        centering: weight of the squared sum of the two scores. It keeps scores around 0
            (arXiv:2312.09244 uses 0.01); 0 for none.
        pad_id: padding id; the score is read at the last token that is not padding. By default the
            padding id of the model, if it has one.
        device: device on which the loss is computed from the scores; by default the device of the
            scores.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.modules import load_reward_model
        >>> from torchrl_llm.modules.backends import ClassifierScorer
        >>> rows = TensorDict(
        ...     tokens=ragged_rows({"full": [torch.tensor([3, 4, 5]), torch.tensor([3, 7])]}),
        ...     pair_id=torch.tensor([0, 0]),
        ...     is_chosen=torch.tensor([True, False]),
        ...     batch_size=2,
        ... )
        >>> RewardLoss(ClassifierScorer(load_reward_model()))(rows).total_loss().backward()
    """

    @dataclass
    class _AcceptedKeys(AnswerLoss._AcceptedKeys):
        margin: NestedKey = "margin"

    default_keys = _AcceptedKeys
    output_type = RewardLossOutput

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        centering: Annotated[float, Ge(0)] = 0.0,
        pad_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(actor_network, device=device)
        self.centering = float(centering)
        self.pad_id = getattr(self.scorer, "pad_id", None) if pad_id is None else pad_id
        self._forward_value_estimator_keys()

    def select(self, tensordict: Any) -> TokenRows:
        """Read the rows; all their tokens count."""
        return read_token_rows(tensordict, self.tensor_keys, "generic")

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        super().check(tensordict, rows)
        self.places(tensordict)
        self._margins(tensordict)

    def _margins(self, tensordict: Any) -> Tensor:
        key = self.tensor_keys.margin
        if read_rows(tensordict, key, None) is None:
            return torch.zeros(len(tensordict))
        return self.numbers(tensordict, key, "").float()

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """Count the tokens, and the pairs (as sequences).

        Args:
            tensordict: the rows.
            rows: their tokens.
        """
        return Normalizer(sum(rows.counts), len(self.places(tensordict)[0]))

    def score(self, tensordict: Any, rows: TokenRows) -> TokenScores:
        """Return the value of each row, ``[B]``.

        Args:
            tensordict: the rows.
            rows: their tokens.
        """
        values = last_values(self.scorer, rows.sequences, pad_id=self.pad_id)
        return TokenScores(values.new_zeros(0), values=values)

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> RewardLossOutput:
        """See :meth:`TokenLoss.from_scores`."""
        normalizer = normalizer or self.count(tensordict, rows)
        values = scores.values.to(self.device or scores.values.device)
        if values.device.type == "cpu" and not bool(values.detach().isfinite().all()):
            raise DataError("the scores are NaN or infinite: the model's weights have diverged")
        chosen, rejected = (sent(side, values.device) for side in self.places(tensordict))
        margins = sent(self._margins(tensordict), values.device)[chosen]
        better, worse = values[chosen], values[rejected]
        loss = bradley_terry(better, worse, margins_P=margins, centering=self.centering)
        with torch.no_grad():
            difference = better - worse
            parts = {
                "accuracy": (difference > 0).to(loss.dtype),
                "margin": difference,
                "score": (better + worse) / 2,
            }
        means = {
            name: (value.double().sum() / normalizer.num_sequences).to(loss.dtype)
            for name, value in (parts | {"loss_reward": loss}).items()
        }
        return RewardLossOutput(**means)

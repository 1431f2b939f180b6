"""KTO: trains on single answers that are labelled good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from tensordict import TensorClass
from torch import Tensor, nn

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.functional import Normalizer
from torchrl_llm.functional.preferences import kto_loss
from torchrl_llm.objectives.answer_loss import AnswerLoss
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows
from torchrl_llm.objectives.token_loss import LLMLossOutput, check_scores


class KTOLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of :class:`KTOLoss`; float32 scalars, each a mean over answers.

    Attributes:
        loss_preference: the objective.
        accuracy: share of the answers whose implicit reward has the sign of their label.
        kl: divergence from the reference that the loss used, nats per answer.
    """

    loss_preference: Tensor
    accuracy: Tensor
    kl: Tensor


@register("preference_losses", "kto")
class KTOLoss(AnswerLoss):
    r"""Kahneman-Tversky optimization of answers with a label, see ``functional.kto_loss``.

    arXiv:2402.01306. Rows need ``"is_chosen"`` (the label), ``"ref_log_prob"`` and ``"kl"``.
    ``"kl"`` is the divergence of the policy from the reference before the update. It is one number
    for the whole batch: the mean log-ratio of :func:`mismatched` answers.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        beta: slope; larger values keep the policy closer to the reference.
        good_weight: weight of good answers; TRL's ``desirable_weight``.
        bad_weight: weight of bad answers. The paper recommends weights for which the weighted
            numbers of good and bad answers have a ratio between 1:1 and 4:3.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown or invalid.

    Example:
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> KTOLoss(CausalScorer(load_model()), bad_weight=1.5).bad_weight
        1.5
    """

    needs_reference = True
    row_keys = ("is_chosen", "kl")
    output_type = KTOLossOutput

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        beta: Annotated[float, Gt(0)] = 0.1,
        good_weight: Annotated[float, Ge(0)] = 1.0,
        bad_weight: Annotated[float, Ge(0)] = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(actor_network, device=device)
        self.beta = float(beta)
        self.good_weight, self.bad_weight = float(good_weight), float(bad_weight)
        self._forward_value_estimator_keys()

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        super().check(tensordict, rows)
        self._kl(tensordict)

    def _kl(self, tensordict: Any) -> Tensor:
        advice = "it is the mean log-ratio of mismatched answers"
        return self.numbers(tensordict, self.tensor_keys.kl, advice).float()

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> KTOLossOutput:
        """See :meth:`TokenLoss.from_scores`."""
        normalizer = normalizer or self.count(tensordict, rows)
        log_probs = check_scores(scores.log_probs, rows)
        log_probs = log_probs.to(self.device or log_probs.device)
        device, keys = log_probs.device, self.tensor_keys
        ratios = self.answers(tensordict, rows, log_probs).log_ratio
        good = sent(self.numbers(tensordict, keys.is_chosen, "the label").bool(), device)
        kl = sent(self._kl(tensordict), device)
        weights = torch.where(good, self.good_weight, self.bad_weight)
        parts = {
            "loss_preference": weights * kto_loss(ratios, good, kl, beta=self.beta),
            "accuracy": torch.where(good, ratios > 0, ratios < 0),
            "kl": kl,
        }
        sums = {
            name: part.double().sum() / normalizer.num_sequences for name, part in parts.items()
        }
        fields = {name: value.to(log_probs.dtype) for name, value in sums.items()}
        fields["accuracy"] = fields["accuracy"].detach()
        return KTOLossOutput(**fields)


def mismatched(
    sequences: Sequence[Tensor], answers: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Pair each prompt with the answer of the previous row (the first prompt with the last answer).

    The policy was not trained on these combinations, so their log-ratios measure how far the policy
    is from its reference. Previous rows with the same prompt (the other answer of a pair) are
    skipped. If all rows have the same prompt, no row is returned.

    Args:
        sequences: ``B`` int64 tensors ``[T_b]``, prompts with answers.
        answers: ``B`` bool tensors ``[T_b]``, the tokens of the answers.

    Returns:
        Sequences and answers of the new rows, at most ``B``.

    Example:
        >>> ids = [torch.tensor([1, 2, 3]), torch.tensor([7, 8])]
        >>> mismatched(ids, [ids[0] > 2, ids[1] > 7])[0]
        [tensor([1, 2, 8]), tensor([7, 3])]
    """
    cuts = [int(mask.long().argmax()) for mask in answers]
    prompts = [ids[:cut].tolist() for ids, cut in zip(sequences, cuts, strict=True)]
    made, masks = [], []
    for row, cut in enumerate(cuts):
        before = (row - n for n in range(1, len(cuts)))
        said = next((other for other in before if prompts[other] != prompts[row]), None)
        if said is None:
            continue
        at = cuts[said]
        made.append(torch.cat([sequences[row][:cut], sequences[said][at:]]))
        masks.append(torch.cat([answers[row][:cut], answers[said][at:]]))
    return made, masks

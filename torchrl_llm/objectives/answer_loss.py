"""Base classes of the losses that score whole answers or compare pairs of answers.

A row is a conversation with one answer; the tokens of its assistant mask are the answer. The two
rows of a pair share a ``"pair_id"``, and ``"is_chosen"`` marks the chosen one. Reference log-probs
are one number per row, so they are computed once for all epochs.

Shape legend: ``B`` rows, ``P`` pairs, ``N`` tokens of answers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_llm._checked import Ge, Gt, In, checked
from torchrl_llm.data.row_transform import pieces_under_budget
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import Normalizer, sequence_log_ratio
from torchrl_llm.functional.preferences import PairForm, pair_loss
from torchrl_llm.objectives.flat_columns import RowKeys, key_name, read_column, sent
from torchrl_llm.objectives.loss_rows import TokenRows, read_token_rows
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss, check_scores

SFTTokens = Literal["answer", "conversation"]


class Answers(NamedTuple):
    """The log-probs and lengths of the answers.

    Attributes:
        log_prob: ``[B]``, log-prob of the whole answer under the current policy, nats, with
            gradients.
        length: ``[B]``, number of tokens of the answer, in the dtype of ``log_prob``.
        reference: ``[B]``, log-prob under the reference; ``None`` for a loss without one.
    """

    log_prob: Tensor
    length: Tensor
    reference: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        """``[B]``, log-prob under the policy minus log-prob under the reference."""
        return self.log_prob - self.reference


@torch.no_grad()
def answer_log_probs(
    scorer: TokenScorer,
    sequences: Sequence[Tensor],
    answers: Sequence[Tensor],
    *,
    token_budget: int | None = None,
) -> Tensor:
    """Return the log-prob of each answer (the sum over its tokens), without gradient.

    Args:
        scorer: a policy, or its reference.
        sequences: ``B`` int64 tensors ``[T_b]``, prompts with answers.
        answers: ``B`` bool tensors ``[T_b]``, the tokens of the answers.
        token_budget: largest number of tokens in one forward, including padding; ``None`` scores
            all rows in one forward.

    Returns:
        float32 ``[B]`` on the CPU, nats.
    """
    sums = torch.zeros(len(sequences))
    lengths = [len(ids) for ids in sequences]
    for piece in pieces_under_budget(range(len(sequences)), lengths, token_budget):
        select = [answers[row] for row in piece]
        scores = scorer.token_scores([sequences[row] for row in piece], select)
        parts = scores.log_probs.cpu().double().split([int(mask.sum()) for mask in select])
        sums[piece] = torch.stack([part.sum() for part in parts]).float()
    return sums


class AnswerLoss(TokenLoss):
    """Base class of the losses that read the log-prob of each answer.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Attributes:
        needs_reference: whether rows need the log-prob of the reference.
        row_keys: names of the other columns that rows need.
        output_type: class of the result.
    """

    @dataclass
    class _AcceptedKeys(RowKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        # Only the assistant mask defines the answer, because the answer was not sampled.
        trace: NestedKey | None = None
        pair_id: NestedKey = "pair_id"
        is_chosen: NestedKey = "is_chosen"
        ref_log_prob: NestedKey = "ref_log_prob"
        kl: NestedKey = "kl"

    default_keys = _AcceptedKeys
    needs_reference: ClassVar[bool] = False
    row_keys: ClassVar[tuple[str, ...]] = ("is_chosen", "pair_id")
    output_type: ClassVar[type]

    def select(self, tensordict: Any) -> TokenRows:
        """See :meth:`TokenLoss.select`.

        Raises:
            DataError: also when a row has no token of an answer.
        """
        rows = read_token_rows(tensordict, self.tensor_keys, "rlhf")
        if silent := [row for row, count in enumerate(rows.counts) if not count]:
            raise DataError(f"rows {silent[:8]} have no token of an answer to compare; drop them")
        return rows

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        self._is_chosen(tensordict)
        if self.needs_reference:
            self._reference(tensordict, rows)

    def numbers(self, tensordict: Any, key: NestedKey, advice: str) -> Tensor:
        """Read a column that has one finite number per row.

        Args:
            tensordict: the rows.
            key: key of the column.
            advice: how to produce the column, for the error message.

        Returns:
            ``[B]`` as stored.

        Raises:
            DataError: when the column is missing, has a wrong shape, or is not finite.
        """
        values = read_column(tensordict, key, advice)
        if any(value.numel() != 1 for value in values):
            raise DataError(f"{key_name(key)} must be one number per row")
        numbers = torch.stack([value.detach().reshape(()) for value in values])
        if bad := (~numbers.isfinite()).nonzero()[:8, 0].tolist():
            raise DataError(f"{key_name(key)} is NaN or infinite in rows {bad}")
        return numbers

    def places(self, tensordict: Any) -> tuple[Tensor, Tensor]:
        """Return the row indices of the chosen and the rejected answers, each int64 ``[P]``.

        Args:
            tensordict: the rows.

        Raises:
            DataError: when a pair does not have one chosen and one rejected answer.
        """
        keys, advice = self.tensor_keys, "it says which rows belong together"
        ids = self.numbers(tensordict, keys.pair_id, advice).long()
        chosen = self._is_chosen(tensordict)
        sides = [place.nonzero()[:, 0] for place in (chosen, ~chosen)]
        sides = [side[ids[side].argsort(stable=True)] for side in sides]
        pairs = [ids[side].tolist() for side in sides]
        if pairs[0] != pairs[1] or len(set(pairs[0])) < len(pairs[0]):
            every = sorted({*pairs[0], *pairs[1]})
            odd = [pair for pair in every if [side.count(pair) for side in pairs] != [1, 1]]
            raise DataError(
                f"each pair needs one chosen and one rejected answer, and the pairs {odd[:8]} do "
                f"not have them ({key_name(keys.pair_id)}, {key_name(keys.is_chosen)})"
            )
        return sides[0], sides[1]

    def _is_chosen(self, tensordict: Any) -> Tensor:
        advice = "it says which answer was chosen"
        return self.numbers(tensordict, self.tensor_keys.is_chosen, advice).bool()

    def _reference(self, tensordict: Any, rows: TokenRows) -> Tensor:
        advice = "answer_log_probs(reference, ...) computes it"
        return self.numbers(tensordict, self.tensor_keys.ref_log_prob, advice)

    def answers(self, tensordict: Any, rows: TokenRows, log_probs_N: Tensor) -> Answers:
        """The log-probs and lengths of the answers.

        Args:
            tensordict: the rows.
            rows: their tokens.
            log_probs_N: log-probs of the answers' tokens, ``[N]``.
        """
        device, size = log_probs_N.device, len(rows.counts)
        sums = sequence_log_ratio(log_probs_N, sent(rows.row, device), size)
        lengths = sent(torch.tensor(rows.counts), device).to(sums.dtype)
        reference = (
            sent(self._reference(tensordict, rows), device) if self.needs_reference else None
        )
        return Answers(sums, lengths, reference)

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Called by ``set_keys`` to update ``in_keys``; there is no value estimator."""
        keys, names = self.tensor_keys, ["action", "assistant_mask", *self.row_keys]
        names += ["ref_log_prob"] * self.needs_reference
        self.in_keys = [getattr(keys, name) for name in names]
        self.out_keys = list(self.output_type.__dataclass_fields__)


class PairLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of a loss of pairs; float32 scalars, each a mean over pairs.

    Attributes:
        loss_preference: the preference loss.
        loss_sft: weighted cross-entropy of the chosen answers; ``None`` without ``sft_coeff``.
        accuracy: share of the pairs whose chosen answer has the larger implicit reward.
        margin: mean difference of the implicit rewards, chosen minus rejected.
        reward_chosen: implicit reward of the chosen answers, ``beta`` times the compared number.
        reward_rejected: implicit reward of the rejected answers.
    """

    loss_preference: Tensor
    accuracy: Tensor
    margin: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor
    loss_sft: Tensor | None = None


class PairLoss(AnswerLoss):
    r"""Base class of the losses that compare a chosen with a rejected answer.

    A subclass computes one number per answer (:meth:`compared`). The loss is
    :func:`~torchrl_llm.functional.pair_loss` of the difference of the two numbers, averaged over
    pairs. ``sft_coeff`` adds the cross-entropy of the chosen answers, averaged over their tokens.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        beta: slope; larger values keep the policy closer to the reference.
        form: form of the loss, see :func:`~torchrl_llm.functional.pair_loss`.
        label_smoothing: share of pairs whose answers are assumed to be swapped; for ``"sigmoid"``
            and ``"robust"``.
        target_margin: target difference of the implicit rewards of a pair.
        sft_coeff: weight of the cross-entropy of the chosen answers; 0 for none.
        sft_tokens: tokens of that cross-entropy: the ``"answer"``, or the whole ``"conversation"``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.
    """

    output_type = PairLossOutput

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        beta: Annotated[float, Gt(0)] = 0.1,
        form: PairForm = "sigmoid",
        label_smoothing: Annotated[float, In("[0, 0.5)")] = 0.0,
        target_margin: Annotated[float, In("[0, inf)")] = 0.0,
        sft_coeff: Annotated[float, Ge(0)] = 0.0,
        sft_tokens: SFTTokens = "answer",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(actor_network, device=device)
        if label_smoothing and form not in ("sigmoid", "robust"):
            raise ConfigError(f"label_smoothing has no effect with form={form!r}")
        if target_margin and form == "ipo":
            raise ConfigError("target_margin has no effect with form='ipo', which has its own")
        if sft_tokens != "answer" and not sft_coeff:
            raise ConfigError("sft_tokens has no effect without sft_coeff")
        self.beta, self.form, self.label_smoothing = float(beta), form, float(label_smoothing)
        self.target_margin = float(target_margin)
        self.sft_coeff, self.sft_tokens = float(sft_coeff), sft_tokens
        self.pair_coeff = 1.0
        self._forward_value_estimator_keys()

    @abstractmethod
    def compared(self, answers: Answers) -> Tensor:
        """Return the number that is compared, in nats ``[B]``; ``beta`` times it is the reward.

        Args:
            answers: log-probs and lengths of the answers.
        """

    def select(self, tensordict: Any) -> TokenRows:
        """See :meth:`AnswerLoss.select`; with ``sft_tokens="conversation"`` prompts also count."""
        rows = super().select(tensordict)
        if self.sft_tokens == "conversation":
            rows = read_token_rows(tensordict, self.tensor_keys, "generic")
        return rows

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        super().check(tensordict, rows)
        self.places(tensordict)

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """Count the tokens of ``loss_sft``, and the pairs (as sequences).

        Args:
            tensordict: the rows.
            rows: their tokens.
        """
        chosen = self._is_chosen(tensordict).tolist()
        num_tokens = sum(n for n, good in zip(rows.counts, chosen, strict=True) if good)
        return Normalizer(num_tokens, len(self.places(tensordict)[0]))

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> PairLossOutput:
        """See :meth:`TokenLoss.from_scores`."""
        normalizer = normalizer or self.count(tensordict, rows)
        log_probs = check_scores(scores.log_probs, rows)
        log_probs = log_probs.to(self.device or log_probs.device)
        device, places, fields = log_probs.device, self.places(tensordict), {}
        chosen, rejected = (sent(side, device) for side in places)
        if self.sft_coeff:
            of_chosen = self._is_chosen(tensordict)[rows.row].nonzero()[:, 0]
            total = -log_probs[sent(of_chosen, device)].double().sum() / normalizer.num_tokens
            fields["loss_sft"] = (self.sft_coeff * total).to(log_probs.dtype)
        if self.sft_tokens == "conversation":
            counted, rows = rows, super().select(tensordict)
            inside = torch.cat(rows.select)[torch.cat(counted.select)].nonzero()[:, 0]
            log_probs = log_probs[sent(inside, device)]
        compared = self.compared(self.answers(tensordict, rows, log_probs))
        difference = compared[chosen] - compared[rejected]
        loss = pair_loss(
            difference,
            self.form,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            target_margin=self.target_margin,
        )
        fields["loss_preference"] = self.pair_coeff * loss
        with torch.no_grad():
            fields["accuracy"] = (difference > 0).to(loss.dtype)
            fields["margin"] = self.beta * difference
            fields["reward_chosen"] = self.beta * compared[chosen]
            fields["reward_rejected"] = self.beta * compared[rejected]
        means = {
            name: (value.double().sum() / normalizer.num_sequences).to(loss.dtype)
            for name, value in fields.items()
            if name != "loss_sft"
        }
        return PairLossOutput(**(fields | means))

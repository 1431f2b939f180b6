"""Base class of losses over rows of tokens: reads rows, scores tokens, computes loss terms.

The three steps are separate methods, so that several losses can share one forward
(:class:`~torchrl_llm.objectives.CompositeLoss`): ``read`` rejects bad rows before anything is
computed, ``score`` calls the actor, ``from_scores`` computes the terms. Next:
:mod:`torchrl_llm.objectives.policy_loss` is the base of the policy-gradient losses.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_llm._log import tell_once
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.logit_scores import as_scorer
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer
from torchrl_llm.objectives.loss_rows import TokenRows

_WRITTEN_BY = {
    "sample_log_prob": "generate with a policy that returns log-probs",
    "prox_log_prob": "RetrieveLogProb with the trained policy writes it into the buffer; or set "
    "proximal='current' where a batch is used for one update",
    "ref_log_prob": "RetrieveLogProb with the reference policy writes it",
    "teacher_log_prob": "RetrieveTeacherLogProb with the teacher writes it",
    "value": "RetrieveValues writes it",
    "value_target": "GAEAdvantage writes it",
}


class LLMLossOutput:
    """Mixin with the common methods of the outputs of losses (tensorclasses of named scalars).

    Fields whose name begins with ``loss_`` are terms of the objective, all others are metrics
    without gradient. Outputs of micro-batches that were computed with the whole batch's normalizer
    add up (``first + second``) to the output of the whole batch.
    """

    def total_loss(self) -> Tensor:
        """Return the sum of the ``loss_*`` terms; call ``backward`` on it.

        If a term has one value per row, terms that are a single number are added to each row.
        """
        terms = self._terms()
        if len(terms) == 1:
            return terms[0]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)

    def _terms(self) -> list[Tensor]:
        return [value for key, value in self.items() if key.startswith("loss_")]

    def mean(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """Return the mean of each field; with ``reduce=True``, return the loss as one number.

        TorchRL's recipes call ``loss.mean(reduce=True).backward()``. In TorchRL this averages loss
        terms and metrics together, so each metric makes the step smaller. In torchrl_llm this call
        returns the mean of :meth:`total_loss`, and a message is logged once.

        Args:
            args: as in ``TensorDict.mean``.
            reduce: return one number.
            kwargs: as in ``TensorDict.mean``.

        Example:
            >>> import torch
            >>> from torchrl_llm.objectives import SFTLossOutput
            >>> output = SFTLossOutput(loss_sft=torch.tensor(2.0), kl_to_ref=torch.tensor(9.0))
            >>> output.mean(reduce=True)
            tensor(2.)
        """
        if reduce:
            return self._one_number("mean", *args, **kwargs)
        return super().mean(*args, reduce=reduce, **kwargs)

    def sum(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """Return the sum of each field; with ``reduce=True``, return the loss as one number.

        The gradient equals the gradient of TorchRL's ``loss.sum(reduce=True)``. TorchRL's value
        also contains the metrics.

        Args:
            args: as in ``TensorDict.sum``.
            reduce: return one number.
            kwargs: as in ``TensorDict.sum``.
        """
        if reduce:
            return self._one_number("sum", *args, **kwargs)
        return super().sum(*args, reduce=reduce, **kwargs)

    def _one_number(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        tell_once(
            f"loss.{name}(reduce=True) is the sum of the loss terms, loss.total_loss(); TorchRL "
            f"takes the {name} over loss terms and metrics"
        )
        # Sum each term separately: a term that is one number for all rows counts once.
        return torch.stack([getattr(term, name)(*args, **kwargs) for term in self._terms()]).sum(0)

    def metrics(self) -> dict[str, Tensor]:
        """Return all fields that are set, including loss terms, without gradient."""
        return {key: value.detach() for key, value in self.items()}

    def leaves(self) -> list[Tensor]:
        """Return all tensors of the output; adding outputs adds each of them."""
        return [value for _, value in self.items()]


class TokenLoss(LossModule):
    """Base class of the losses that score tokens of rows.

    The actor is not changed: its parameters are not moved, and the ``state_dict`` of the loss is
    the actor's.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``. Any other
            module that returns logits or a distribution also works, see ``ModuleScorer``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs. The actor is not moved.

    Attributes:
        needs_entropy: whether the loss reads the entropy of the scores.

    Raises:
        ConfigError: for an actor that cannot score tokens.
    """

    __signature__ = FullSignature()
    default_value_estimator = None
    needs_entropy = False

    def __init__(
        self, actor_network: nn.Module | TokenScorer, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        as_scorer(actor_network)
        self.actor_network = actor_network
        self.device = None if device is None else torch.device(device)

    @property
    def scorer(self) -> TokenScorer:
        """The object that scores the tokens (the actor, or a scorer of its logits)."""
        return as_scorer(self.actor_network)

    @property
    def functional(self) -> bool:
        """``False``, because the actor's parameters stay in the actor."""
        return False

    @abstractmethod
    def select(self, tensordict: Any) -> TokenRows:
        """Read the tokens of the rows and decide which count; read no other column.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.

        Raises:
            DataError: when the ids or masks are missing or misaligned.
        """

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """Reject rows with bad columns before anything is computed.

        Args:
            tensordict: the rows.
            rows: their tokens; caches the columns that this method reads.

        Raises:
            DataError: when a column is missing or misaligned, or a value that counts is not finite.
        """

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """Return the counts of the rows, where the rows are a whole batch.

        Args:
            tensordict: the rows.
            rows: their tokens.

        Raises:
            DataError: when no token counts.
        """
        return rows.normalizer()

    @abstractmethod
    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> Any:
        """Compute the loss terms from the scores of the tokens that count.

        Args:
            tensordict: the rows.
            rows: result of :meth:`read` for them.
            scores: the actor's scores of the ``N`` tokens that count.
            normalizer: counts of the whole batch when these rows are a part of it.

        Raises:
            DataError: when the number of scores is wrong or a score is not finite.
        """

    def column(self, tensordict: Any, rows: TokenRows, name: str) -> Tensor:
        """Return the values of a column at the counted tokens.

        Args:
            tensordict: the rows.
            rows: their tokens.
            name: name of the key, as in ``set_keys``.

        Returns:
            ``[N]``, see ``TokenRows.column``.

        Raises:
            DataError: when the column is missing or misaligned, or is not finite at a counted
                token.
        """
        advice = _WRITTEN_BY.get(name.replace("probs", "prob"), "the loss reads it")
        return rows.column(tensordict, getattr(self.tensor_keys, name), advice)

    def normalizer(self, tensordict: Any) -> Normalizer:
        """Return the counts of a whole batch, for the ``normalizer`` argument of its micro-batches.

        Args:
            tensordict: the rows of the whole batch.

        Raises:
            DataError: when no token counts.
        """
        return self.count(tensordict, self.select(tensordict))

    def read(self, tensordict: Any) -> TokenRows:
        """Read the counted tokens and check every column that the loss reads.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.

        Raises:
            DataError: as :meth:`select` and :meth:`check`.
        """
        rows = self.select(tensordict)
        self.check(tensordict, rows)
        return rows

    def extras(self, tensordict: Any, rows: TokenRows) -> ScoreExtras | None:
        """Return further requests to the actor in the same forward; none by default.

        Args:
            tensordict: the rows.
            rows: their tokens.
        """
        return None

    def score(self, tensordict: Any, rows: TokenRows) -> TokenScores:
        """Score the tokens that count, with one forward of the actor.

        Args:
            tensordict: the rows.
            rows: result of :meth:`read` for them.
        """
        return self.scorer.token_scores(
            rows.sequences,
            rows.select,
            temperature=rows.temperature(tensordict, self.tensor_keys.temperature),
            entropy=self.needs_entropy,
            extras=self.extras(tensordict, rows),
        )

    def forward(self, tensordict: Any, *, normalizer: Normalizer | None = None) -> Any:
        """Compute the loss of a batch or of a micro-batch.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.
            normalizer: counts of the whole batch when these rows are a part of it.

        Returns:
            The loss terms and metrics, an :class:`LLMLossOutput`.

        Raises:
            DataError: when a column is missing or misaligned, a value that counts is not finite, or
                no token counts.
        """
        rows = self.read(tensordict)
        # A part of a batch may have no counted tokens; it then adds nothing.
        normalizer = normalizer or self.count(tensordict, rows)
        scores = self.score(tensordict, rows)
        return self.from_scores(tensordict, rows, scores, normalizer=normalizer)


def check_scores(log_probs: Tensor, rows: TokenRows) -> Tensor:
    """Reject log-probs of the current policy if their number is wrong or one is not finite.

    On a GPU, the check for finite values would wait for the forward in every micro-batch. Therefore
    :func:`~torchrl_llm.trainers.optimize` checks them at the end of the update.

    Args:
        log_probs: output of the actor, must be float32 ``[N]``.
        rows: the rows that it scored.

    Returns:
        The log-probs as given.

    Raises:
        DataError: when their number is not ``N``, or (on the CPU) one is not finite.
    """
    count = rows.row.shape[0]
    if log_probs.shape != (count,):
        raise DataError(
            f"the actor must score the {count} selected tokens, got {tuple(log_probs.shape)}"
        )
    if log_probs.device.type == "cpu" and not bool(log_probs.detach().isfinite().all()):
        raise DataError(
            "the current policy's log-probs are NaN or infinite: its weights have diverged, or a "
            "sampled token has probability zero under it"
        )
    return log_probs

"""Base of the losses over rows of tokens: read the rows, score their tokens, make the terms.

The three steps are methods of their own, so that several losses can share one forward
(:class:`~torchrl_llm.objectives.CompositeLoss`): ``read`` refuses bad rows before anything is
computed, ``score`` asks the actor, ``from_scores`` makes the terms. Next:
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
    """What the outputs of all losses can do; a mixin of tensorclasses of named scalars.

    Fields whose name begins with ``loss_`` are terms of the objective, all others are metrics
    without gradient. Outputs of micro-batches that were computed with the whole batch's normalizer
    add up (``first + second``) to the output of the whole batch.
    """

    def total_loss(self) -> Tensor:
        """The sum of the ``loss_*`` terms and of nothing else: what to call ``backward`` on.

        Where a term has a value a row, those that are one number for all are added to each.
        """
        terms = self._terms()
        if len(terms) == 1:
            return terms[0]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)

    def _terms(self) -> list[Tensor]:
        return [value for key, value in self.items() if key.startswith("loss_")]

    def mean(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With ``reduce=True`` the loss, as one number; else the mean of each field.

        TorchRL's recipes call ``loss.mean(reduce=True).backward()``, which is there the mean over
        loss terms and metrics together, so that each metric makes the step smaller. Here it is the
        mean of :meth:`total_loss`. The log says so once.

        Args:
            args: those of ``TensorDict.mean``.
            reduce: return one number.
            kwargs: those of ``TensorDict.mean``.

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
        """With ``reduce=True`` the loss, as one number; else the sum of each field.

        The gradient is that of TorchRL's ``loss.sum(reduce=True)``, whose value has the metrics in
        it, too.

        Args:
            args: those of ``TensorDict.sum``.
            reduce: return one number.
            kwargs: those of ``TensorDict.sum``.
        """
        if reduce:
            return self._one_number("sum", *args, **kwargs)
        return super().sum(*args, reduce=reduce, **kwargs)

    def _one_number(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        tell_once(
            f"loss.{name}(reduce=True) is the sum of the loss terms, loss.total_loss(); TorchRL "
            f"takes the {name} over loss terms and metrics"
        )
        # Each term by itself: one that is a number for all rows counts once.
        return torch.stack([getattr(term, name)(*args, **kwargs) for term in self._terms()]).sum(0)

    def metrics(self) -> dict[str, Tensor]:
        """Every field that is there, loss terms included, without gradient."""
        return {key: value.detach() for key, value in self.items()}

    def leaves(self) -> list[Tensor]:
        """Every tensor that it holds; adding up outputs adds each of them."""
        return [value for _, value in self.items()]


class TokenLoss(LossModule):
    """Base of the losses that score tokens of rows.

    The modules stay as they are: no parameters are moved, ``state_dict`` is the actor's.

    Args:
        actor_network: scores tokens; a policy wrapper, or a ``CausalScorer``. Any other module that
            gives logits or a distribution is scored by them, see
            ``ModuleScorer``.
        device: where the loss is computed from the log-probs; theirs by default. The actor is not
            moved.

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
        """What scores the tokens (the actor, or its logits)."""
        return as_scorer(self.actor_network)

    @property
    def functional(self) -> bool:
        """``False``, because the actor's parameters stay in the actor."""
        return False

    @abstractmethod
    def select(self, tensordict: Any) -> TokenRows:
        """The tokens of the rows and which of them count; no other column is read.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.

        Raises:
            DataError: when the ids or masks are missing or misaligned.
        """

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """Refuse rows whose other columns are bad, before anything is computed.

        Args:
            tensordict: the rows.
            rows: their tokens. Columns that are read here are remembered there.

        Raises:
            DataError: when a column is missing or misaligned, or a value that counts is not finite.
        """

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """Counts of rows as a whole batch.

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
        """The loss terms, from the scores of the tokens that count.

        Args:
            tensordict: the rows.
            rows: what :meth:`read` gave for them.
            scores: the actor's scores of the ``N`` tokens that count.
            normalizer: counts of the whole batch when these rows are a part of it.

        Raises:
            DataError: when the scores are of the wrong number or not finite.
        """

    def column(self, tensordict: Any, rows: TokenRows, name: str) -> Tensor:
        """Values at the tokens that count, of the column that one of the loss's keys names.

        Args:
            tensordict: the rows.
            rows: their tokens.
            name: of the key, as ``set_keys`` takes it.

        Returns:
            ``[N]``, see ``TokenRows.column``.

        Raises:
            DataError: when the column is missing, has other lengths, or is not finite where it
                counts.
        """
        advice = _WRITTEN_BY.get(name.replace("probs", "prob"), "the loss reads it")
        return rows.column(tensordict, getattr(self.tensor_keys, name), advice)

    def normalizer(self, tensordict: Any) -> Normalizer:
        """Counts of a whole batch, for the ``normalizer`` argument of its micro-batches.

        Args:
            tensordict: the rows of the whole batch.

        Raises:
            DataError: when no token counts.
        """
        return self.count(tensordict, self.select(tensordict))

    def read(self, tensordict: Any) -> TokenRows:
        """The tokens that count, with every column that the loss reads checked.

        Args:
            tensordict: rows, a one-dimensional lazy stack or padded tensors with masks.

        Raises:
            DataError: as :meth:`select` and :meth:`check`.
        """
        rows = self.select(tensordict)
        self.check(tensordict, rows)
        return rows

    def extras(self, tensordict: Any, rows: TokenRows) -> ScoreExtras | None:
        """What else the actor is asked for in the one forward; nothing by default.

        Args:
            tensordict: the rows.
            rows: their tokens.
        """
        return None

    def score(self, tensordict: Any, rows: TokenRows) -> TokenScores:
        """Scores of the tokens that count, from one forward of the actor.

        Args:
            tensordict: the rows.
            rows: what :meth:`read` gave for them.
        """
        return self.scorer.token_scores(
            rows.sequences,
            rows.select,
            temperature=rows.temperature(tensordict, self.tensor_keys.temperature),
            entropy=self.needs_entropy,
            extras=self.extras(tensordict, rows),
        )

    def forward(self, tensordict: Any, *, normalizer: Normalizer | None = None) -> Any:
        """The loss of a batch, or of a micro-batch of it.

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
        # A piece of a batch may be without tokens that count; it then adds nothing.
        normalizer = normalizer or self.count(tensordict, rows)
        scores = self.score(tensordict, rows)
        return self.from_scores(tensordict, rows, scores, normalizer=normalizer)


def check_scores(log_probs: Tensor, rows: TokenRows) -> Tensor:
    """Refuse log-probs of the current policy that are of the wrong number or not finite.

    On a GPU the second would wait for the forward, once a micro-batch; there
    :func:`~torchrl_llm.trainers.optimize` refuses them at the end of the update.

    Args:
        log_probs: what the actor returned, to be float32 ``[N]``.
        rows: the rows that it scored.

    Returns:
        The log-probs as given.

    Raises:
        DataError: when they are not ``N``, or on the CPU not finite.
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

"""Log-probs of sampled tokens under another model: a reference, a teacher, the trainer itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import (
    Path,
    RowTransform,
    RowView,
    pieces_under_budget,
)
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScorer
from torchrl_llm.data.specs import RaggedSpec
from torchrl_llm.errors import ConfigError


class RetrieveLogProb(RowTransform):
    """Scores ``("tokens", "full")`` of each row with a model of its own.

    Writes float32 rows aligned with the tokens, in nats, log p(x_t | x_<t), 0.0 where not scored.

    - In an environment, or called on rows, they go to ``("next", *log_probs_full_key)``, where
      losses look for a reference.
    - In a replay buffer they are written with the rows (as an inverse transform), to the same
      place. Append it *before* :class:`~torchrl_llm.data.replay_buffers.JoinTurns` and the credit
      assigner where only the loss reads them: it then sees the rows last, joined and filtered, and
      scores each token once.

    The log-probs of the trainer before its update, which
    :class:`~torchrl_llm.objectives.PolicyGradientLoss` compares with the sampler's when a
    correction is set, stand in the row itself::

        buffer.append_transform(
            RetrieveLogProb(policy, log_probs_full_key=("prox_log_probs", "full"), root=True)
        )

    The model is no submodule of the transform: ``eval()``, ``to()`` and the state of a buffer leave
    it alone, so that it may be the policy in training.

    Args:
        model: anything that scores tokens, a
            :class:`~torchrl_llm.modules.policies.TransformersWrapper` for example.
        log_probs_full_key: where the log-probs go, a nested key.
        assistant_only: score the assistant's tokens only, by
            ``("masks", "all_assistant_mask")``; otherwise every token but the first.
        detach: score without gradients.
        device: move the model there once, where it is a module.
        temperature_key: temperature of each row, float32 ``[B]``; rows without one are scored at 1.
            Where rows have a ``"support"`` (the ids that truncated sampling kept), they are scored
            on it.
        root: write into the row itself instead of its ``"next"``; in a replay buffer only.
        token_budget: tokens that the model is given at once, with the padding of a padded layout;
            the result does not depend on it. ``None`` for all rows at once.

    Raises:
        ConfigError: for a model that cannot score, a key that is not nested, or a budget below 1.
        DataError: for rows without tokens, or without a mask where one is needed.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.69))
        >>> td = TensorDict(tokens=ragged_rows({"full": [torch.tensor([1, 2])]}), batch_size=[1])
        >>> td = RetrieveLogProb(Coin(), assistant_only=False)(td)
        >>> [row.tolist() for row in read_rows(td, ("next", "ref_log_probs", "full"))]
        [[0.0, -0.6899999976158142]]
    """

    def __init__(
        self,
        model: TokenScorer,
        *,
        log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        assistant_only: bool = True,
        detach: bool = True,
        device: torch.device | str | None = None,
        temperature_key: NestedKey = ("tokens", "temperature"),
        root: bool = False,
        token_budget: int | None = 65536,
    ) -> None:
        super().__init__()
        if not isinstance(model, TokenScorer):
            raise ConfigError(f"model must be a TokenScorer, got {type(model).__name__}")
        if not isinstance(log_probs_full_key, tuple) or len(log_probs_full_key) != 2:
            raise ConfigError(f"log_probs_full_key must have two parts, got {log_probs_full_key!r}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, got {token_budget}")
        if device is not None:
            if not isinstance(model, torch.nn.Module):
                raise ConfigError(
                    f"a {type(model).__name__} is no module that device={device} could move"
                )
            model.to(device)
        self._models = (model,)  # a tuple hides it from nn.Module, see the class
        self.log_probs_full_key = log_probs_full_key
        self.assistant_only = assistant_only
        self.detach = detach
        self.temperature_key = temperature_key
        self.root = root
        self.token_budget = token_budget

    @property
    def model(self) -> TokenScorer:
        """The model that scores."""
        return self._models[0]

    @property
    def written(self) -> Path:
        """Where the log-probs are."""
        return self.log_probs_full_key if self.root else ("next", *self.log_probs_full_key)

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The log-probs."""
        return {self.written: self.log_probs(rows)}

    def log_probs(self, rows: RowView) -> list[Tensor]:
        """Score rows.

        Args:
            rows: the ``B`` rows.

        Returns:
            ``B`` float32 tensors ``[T_b]``.
        """
        sequences = rows.read(("tokens", "full"), "the policy writes them")
        selected = self._selected(rows, sequences)
        temperature = rows.read(as_path(self.temperature_key))
        found = [torch.zeros(ids.shape, device=ids.device) for ids in sequences]
        asked = [row for row, mask in enumerate(selected) if bool(mask.any())]
        lengths = [ids.shape[0] for ids in sequences]
        for piece in pieces_under_budget(asked, lengths, self.token_budget):
            temperatures: float | Tensor = 1.0
            if temperature is not None:
                temperatures = torch.stack([temperature[row].reshape(()) for row in piece]).float()
            masks = [selected[row] for row in piece]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
                scores = self.model.token_scores(
                    [sequences[row] for row in piece],
                    masks,
                    temperature=temperatures,
                    extras=self._support(rows, piece, masks),
                )
            values = scores.log_probs.float().to(masks[0].device)
            counts = [int(mask.sum()) for mask in masks]
            for row, mask, own in zip(piece, masks, values.split(counts), strict=True):
                found[row] = found[row].masked_scatter(mask, own)
        return found

    @staticmethod
    def _support(
        rows: RowView, asked: Sequence[int], masks: Sequence[Tensor]
    ) -> ScoreExtras | None:
        """What truncated sampling kept: two models are compared on the same ids."""
        ids, counts = (rows.read(("support", name)) for name in Support._fields)
        if ids is None or counts is None:
            return None
        columns = [[column[row] for row in asked] for column in (ids, counts)]
        return ScoreExtras(support=Support.of_rows(*columns, masks))

    def _selected(self, rows: RowView, sequences: list[Tensor]) -> list[Tensor]:
        if self.assistant_only:
            selected = rows.read(("masks", "all_assistant_mask"), "the policy writes it")
        else:
            selected = [torch.ones_like(ids, dtype=torch.bool) for ids in sequences]
        kept = rows.read(("masks", "all_attention_mask"))
        masks = []
        for row, stepped in enumerate(rows.stepped()):
            mask = selected[row] & stepped
            if kept is not None:
                mask &= kept[row]
            mask[:1] = False  # the first token has no prefix
            masks.append(mask)
        return masks

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token has a log-prob yet."""
        return {self.written: torch.zeros(0)}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-probs."""
        node, field = self.log_probs_full_key
        observation_spec[node] = RaggedSpec({field: torch.float32}, shape=observation_spec.shape)
        return observation_spec

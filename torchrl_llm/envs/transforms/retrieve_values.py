"""A critic's values of the states before sampled tokens, and of the state behind a cut."""

from __future__ import annotations

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory, as_path
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_transform import (
    Path,
    RowTransform,
    RowView,
    pieces_under_budget,
)
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer
from torchrl_llm.errors import ConfigError


class RetrieveValues(RowTransform):
    """Writes what a critic says about each sampled token, into the rows of a replay buffer.

    ``("values", "full")`` is float32 along ``("tokens", "full")``: the value of the state before
    each token that the policy sampled in the row's turn, 0.0 elsewhere. For a row that ends a cut
    episode, ``("next", "state_value")``, float32 ``[1, 1]``, is the value of the state behind its
    last token; it is 0.0 for all others.

    Append it to the buffer after :class:`~torchrl_llm.objectives.credit.GAEAdvantage`, which reads
    both: what is appended last runs first. The head over the vocabulary is not run.

    The critic is no submodule of the transform: ``eval()``, ``to()`` and the state of a buffer
    leave it alone, so that it may be the policy in training.

    Args:
        critic: a policy or scorer with a value head, see
            :class:`~torchrl_llm.modules.ValueHead`.
        values_key: where the values go, a nested key.
        final_value_key: where the value behind a cut goes.
        token_budget: tokens that the critic is given at once, with the padding of a padded layout;
            ``None`` for all rows at once.

    Raises:
        ConfigError: for a critic that cannot score, a key that is not nested, or a budget below 1.
        DataError: for rows without tokens.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Position(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         places = torch.cat([mask.nonzero()[:, 0] for mask in select])
        ...         return TokenScores(torch.zeros(0), values=places.float())
        >>> buffer = ReplayBuffer(transform=RetrieveValues(Position()))
        >>> ids = torch.arange(4)
        >>> done = {"truncated": torch.tensor([True])}
        >>> tokens = {"full": ids, "response": ids[2:]}
        >>> index = buffer.extend([TensorDict(tokens=tokens, next=done)])
        >>> buffer[0]["values", "full"].tolist(), buffer[0]["next", "state_value"].item()
        ([0.0, 0.0, 2.0, 3.0], 4.0)
    """

    def __init__(
        self,
        critic: TokenScorer,
        *,
        values_key: NestedKey = ("values", "full"),
        final_value_key: NestedKey = ("next", "state_value"),
        token_budget: int | None = 65536,
    ) -> None:
        super().__init__()
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, got {token_budget}")
        self.token_budget = token_budget
        if not isinstance(critic, TokenScorer):
            raise ConfigError(f"critic must be a TokenScorer, got {type(critic).__name__}")
        if not isinstance(values_key, tuple) or len(values_key) < 2:
            raise ConfigError(f"values_key must be a nested key, got {values_key!r}")
        self._critics = (critic,)  # a tuple hides it from nn.Module, see the class
        self.values_key, self.final_value_key = values_key, final_value_key

    @property
    def critic(self) -> TokenScorer:
        """What values the tokens."""
        return self._critics[0]

    @property
    def written(self) -> Path:
        """Where the values are."""
        return as_path(self.values_key)

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The two columns."""
        sequences = rows.read(("tokens", "full"), "the policy writes them")
        cut = [Trajectory([row]).truncated for row in row_list(rows.root)]
        # Behind a cut stands a token that is only there to be predicted; it is never run.
        padded = [
            torch.cat([ids, ids[-1:]]) if behind else ids
            for ids, behind in zip(sequences, cut, strict=True)
        ]
        masks = [
            torch.cat([mask, mask.new_ones(1)]) if behind else mask.clone()
            for mask, behind in zip(rows.sampled(), cut, strict=True)
        ]
        for mask in masks:
            mask[:1] = False  # the first token has no prefix
        found = self._values(padded, masks)
        values = [own[: ids.shape[0]] for own, ids in zip(found, sequences, strict=True)]
        behind = [
            own[-1] if at_end else own.new_zeros(()) for own, at_end in zip(found, cut, strict=True)
        ]
        return {
            self.written: values,
            as_path(self.final_value_key): [value.reshape(1, 1).clone() for value in behind],
        }

    def _values(self, sequences: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        found = [torch.zeros(ids.shape, device=ids.device) for ids in sequences]
        asked = [row for row, mask in enumerate(masks) if bool(mask.any())]
        lengths = [ids.shape[0] for ids in sequences]
        for piece in pieces_under_budget(asked, lengths, self.token_budget):
            chosen = [masks[row] for row in piece]
            with torch.no_grad():
                scores = self.critic.token_scores(
                    [sequences[row] for row in piece],
                    chosen,
                    extras=ScoreExtras(values=True, log_probs=False),
                )
            if scores.values is None:
                raise ConfigError(
                    f"{type(self.critic).__name__} gives no values: it has no value head"
                )
            values = scores.values.float().to(chosen[0].device)
            counts = [int(mask.sum()) for mask in chosen]
            for row, mask, own in zip(piece, chosen, values.split(counts), strict=True):
                found[row] = found[row].masked_scatter(mask, own)
        return found

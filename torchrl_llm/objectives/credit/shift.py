"""How far a policy has moved since it sampled some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScorer
from torchrl_llm.data.wire import leaf, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.kl import k3
from torchrl_llm.objectives.credit.columns import sampled_in_response

_COLUMNS = {
    "ids": ("tokens", "full"),
    "log_probs": ("log_probs", "full"),
    "temperature": ("tokens", "temperature"),
    "support_ids": ("support", "token_ids"),
    "support_counts": ("support", "counts"),
}


class PolicyShift:
    r"""Keeps a few rows of a batch, and scores them once the policy has been updated.

    The mean of ``k3`` over their sampled tokens estimates :math:`KL(\pi_{then} \| \pi_{now})` in
    nats a token. A sampler that differs from the scorer (kernels, precision) adds what it differs.

    Args:
        policy: scores tokens; the policy in training.
        num_rows: how many rows are kept of a batch.

    Raises:
        ConfigError: for a policy that cannot score, or no row.

    Example:
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.6931))
        >>> row = TensorDict(
        ...     tokens={"full": torch.arange(3), "response": torch.arange(1, 3)},
        ...     log_probs={"full": torch.tensor([0.0, -0.6931, -0.6931])})
        >>> shift = PolicyShift(Coin())
        >>> shift.remember([Trajectory([row])])
        >>> shift.measure()
        0.0
    """

    def __init__(self, policy: TokenScorer, *, num_rows: int = 8) -> None:
        if not isinstance(policy, TokenScorer):
            raise ConfigError(f"policy must be a TokenScorer, got {type(policy).__name__}")
        if num_rows < 1:
            raise ConfigError(f"num_rows must be at least 1, got {num_rows}")
        self.policy, self.num_rows = policy, num_rows
        self._rows: list[TensorDict] = []

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep the first rows of a batch in the place of what was kept.

        Args:
            trajectories: as a rule of credit sees them.

        Raises:
            DataError: rows without tokens or log-probs.
        """
        rows = [row for trajectory in trajectories for row in trajectory.rows][: self.num_rows]
        self._rows = [self._columns(row) for row in rows]

    @staticmethod
    def _columns(row: TensorDict) -> TensorDict:
        columns = {name: leaf(row, path) for name, path in _COLUMNS.items()}
        ids, log_probs = columns["ids"], columns["log_probs"]
        if ids is None or log_probs is None or ids.shape != log_probs.shape:
            raise DataError(
                "how far the policy moved is measured on ('tokens', 'full') and "
                "('log_probs', 'full'), which the policy writes, one of each a token"
            )
        sampled = sampled_in_response(row)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask[ids.shape[0] - sampled.shape[0] :] = sampled
        mask[:1] = False  # the first token has no prefix
        kept = {name: value.clone() for name, value in columns.items() if value is not None}
        return TensorDict({**kept, "mask": mask})

    def measure(self) -> float:
        """How far the policy has moved since, in nats a token; 0 where nothing is kept.

        Raises:
            DataError: log-probs that are not finite: the policy has diverged.
        """
        rows = [row for row in self._rows if bool(row["mask"].any())]
        if not rows:
            return 0.0
        masks = [row["mask"] for row in rows]
        with torch.no_grad():
            scores = self.policy.token_scores(
                [row["ids"] for row in rows],
                masks,
                temperature=torch.stack([self._temperature(row) for row in rows]),
                extras=self._support(rows, masks),
            )
        then = torch.cat([row["log_probs"][mask] for row, mask in zip(rows, masks, strict=True)])
        now = scores.log_probs.to(then.device).double()
        moved = k3(now - then.double()).mean()
        if not bool(moved.isfinite()):
            raise DataError(
                "how far the policy moved is not finite: its weights have diverged, or a token "
                "that was sampled has probability zero under it"
            )
        return moved.clamp(min=0.0).item()

    @staticmethod
    def _temperature(row: TensorDict) -> Tensor:
        value = row.get("temperature", None)
        return torch.ones(()) if value is None else value.reshape(()).float()

    @staticmethod
    def _support(rows: list[TensorDict], masks: list[Tensor]) -> ScoreExtras | None:
        columns = [
            [row.get(name, None) for row in rows] for name in ("support_ids", "support_counts")
        ]
        if any(value is None for column in columns for value in column):
            return None
        return ScoreExtras(support=Support.of_rows(*columns, masks))

    def state_dict(self) -> dict[str, Any]:
        """The kept rows in wire form."""
        return {"rows": pack_rows(self._rows) if self._rows else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._rows = [] if state["rows"] is None else unpack_row_list(state["rows"])

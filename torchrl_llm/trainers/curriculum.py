"""Results of a step: read from its rows and passed to the order in which prompts are drawn.

The orders are in :mod:`torchrl_llm.data.row_order`. They run in this process, or in the actor of a
:class:`~torchrl_llm.envs.transforms.RayDataLoadingPrimer` that many collectors share.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict

from torchrl_llm.data.ragged import row_values
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_order import ROW_ID
from torchrl_llm.envs.transforms import DataLoadingPrimer
from torchrl_llm.errors import DataError
from torchrl_llm.objectives import CreditAssigner, SPOAdvantage
from torchrl_llm.trainers.episode_metrics import Episodes
from torchrl_llm.trainers.ranks import ALONE, Ranks

# Tolerance by which the summed rewards of several turns may leave [0, 1].
_ROUNDING = 1e-5


class Curriculum:
    """Part of a training loop: results decide which prompts are drawn next.

    Args:
        primer: draws the rows in an order that depends on results; ``None`` if the order does not
            depend on them, and then nothing is recorded.
        credit: the advantage estimator. Only an :class:`~torchrl_llm.objectives.SPOAdvantage` has
            success rates for the order.
        ranks: the processes that train together; the orders of all ranks get the results of rank 0.

    Example:
        >>> Curriculum(None).see(None)
        {}
    """

    def __init__(
        self,
        primer: DataLoadingPrimer | None,
        credit: CreditAssigner | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._primer, self._ranks = primer, ranks
        self._tracker = credit if isinstance(credit, SPOAdvantage) else None

    @property
    def parts(self) -> dict[str, Any]:
        """The results so far, a part of a run that is restored before loaders of rows."""
        return {} if self._primer is None else {"curriculum": self._primer.order}

    def see(self, rows: LazyStackedTensorDict | None) -> dict[str, float]:
        """Record the results of a step.

        Args:
            rows: all rows collected for the step, one per turn; in rank 0 the rows of all ranks.

        Returns:
            ``train/curriculum_...``, see :meth:`torchrl_llm.data.row_order.RowOrder.metrics`.

        Raises:
            DataError: rows without ``"row_id"``, or without ``success`` and with rewards outside
                [0, 1].
        """
        if self._primer is None:
            return {}
        order = self._primer.order
        results = successes(rows)
        values = None
        if self._tracker is not None:
            values = {int(row[ROW_ID]): self._tracker.value_of(row) for row in row_list(rows)}
        order.record(*self._ranks.from_main((results, values)))
        return order.metrics()

    def ended(self) -> str | None:
        """Why no prompt is left, for :class:`~torchrl_llm.trainers.TrainingRun`."""
        return None if self._primer is None else self._primer.order.ended()


def successes(rows: LazyStackedTensorDict) -> dict[int, list[float]]:
    """Success of each finished conversation, by the data row that it started with.

    Args:
        rows: 1-d stack of rows with rewards, one per turn.

    Returns:
        Index of a data row to the results of its conversations: ``success`` of the last turn (0 or
        1), or the summed reward of the task if rows have no ``success``. Conversations without a
        valid reward are left out.

    Raises:
        DataError: rows without ``"row_id"``, or without ``success`` and with rewards outside
            [0, 1].

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> def row(number, reward):
        ...     next_ = TensorDict(reward=torch.full((1, 1), reward), done=torch.ones(1).bool())
        ...     return TensorDict(row_id=torch.tensor(number), next=next_)
        >>> successes(lazy_stack([row(3, 1.0), row(5, 0.0), row(3, 0.5)]))
        {3: [1.0, 0.5], 5: [0.0]}
    """
    indices = row_values(rows, ROW_ID, torch.sum, None)
    if indices is None:
        raise DataError(
            f"results are recorded by {ROW_ID!r}, and the rows lack it; draw them by a RowLoader "
            "with an order"
        )
    episodes = Episodes(rows)
    told = row_values(rows, ("next", "success"), torch.any, None)
    gains = episodes.task_returns if told is None else told[episodes.last].double()
    counts = episodes.returns.isfinite()
    counts &= row_values(rows, ("next", "done"), torch.any)[episodes.last]
    found: dict[int, list[float]] = {}
    for index, gain in zip(
        indices[episodes.last][counts].tolist(), gains[counts].tolist(), strict=True
    ):
        if told is None and not -_ROUNDING <= gain <= 1 + _ROUNDING:
            raise DataError(
                f"a curriculum follows success rates, and a reward is {gain:g}: write success, or "
                "rewards in [0, 1]"
            )
        found.setdefault(index, []).append(min(max(gain, 0.0), 1.0))
    return found

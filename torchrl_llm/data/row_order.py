"""Orders of rows that depend on results: prompts of medium difficulty, or a queue.

An order determines which row :class:`~torchrl_llm.data.row_files.RowLoader` returns next. This
depends on the position in the data and on the results so far. Each row has its index as
``"row_id"``, and results are recorded under it. Without results, every order is a shuffled pass
over all rows.

Next: :class:`torchrl_llm.trainers.curriculum.Curriculum` reads results from the rows of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, Gt, In, checked
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.advantages import uncertainty_weight

ROW_ID = "row_id"
"""Column with the index of a row in its dataset, int64 ``[]``."""


def shuffled(num_rows: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one pass, int64 ``[N]``; it depends only on the arguments.

    Args:
        num_rows: length of the dataset.
        seed: of all passes.
        epoch: number of the pass.

    Example:
        >>> sorted(shuffled(4, seed=0, epoch=1).tolist())
        [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_rows, generator=generator)


class RowOrder(ABC):
    """Base class of the orders that depend on results.

    A draw depends only on seed, position and results. So a run that resumes from the saved position
    and results draws the same rows. An order stores the success rate over the visits of each row;
    the results of one step are one visit.

    Args:
        memory: weight of the results of earlier visits, relative to a new visit.
    """

    @checked
    def __init__(self, *, memory: Annotated[float, In("[0, 1)")] = 0.0) -> None:
        self.memory = memory
        self.epoch = 0
        self.begin(0)

    def begin(self, num_rows: int) -> None:
        """Start without results.

        Args:
            num_rows: length of the dataset.
        """
        self.num_rows = num_rows
        self._facts = {name: torch.zeros(num_rows, dtype=t) for name, t in self._columns().items()}

    def _columns(self) -> dict[str, torch.dtype]:
        """Return the stored facts of each row, all zero before its first visit."""
        return {"rate": torch.float64, "count": torch.float64, "visits": torch.int64}

    @abstractmethod
    def draw(self, seed: int, epoch: int, index: int) -> tuple[int, int] | None:
        """Return the next row.

        Args:
            seed: of the loader.
            epoch: number of the pass.
            index: position in the pass.

        Returns:
            Index of the row, and the position after it; ``None`` if the pass is over. One of the
            next passes must have a row.
        """

    def record(
        self, results: Mapping[int, Sequence[float]], values: Mapping[int, float] | None = None
    ) -> None:
        """Record the results of answers to rows.

        Args:
            results: success of each answer, in [0, 1], by the index of the row.
            values: success rate by the index of the row, from another tracker such as
                :class:`~torchrl_llm.objectives.SPOAdvantage`; it replaces the mean.

        Raises:
            DataError: a success is outside [0, 1], or a row does not exist.
        """
        for row, successes in results.items():
            if not 0 <= row < self.num_rows or not all(0 <= s <= 1 for s in successes):
                raise DataError(
                    f"results are successes in [0, 1] of one of {self.num_rows} rows, got "
                    f"{list(successes)[:8]} of row {row}"
                )
            if successes:
                self._visit(row, successes, None if values is None else values.get(row))

    def _visit(self, row: int, successes: Sequence[float], value: float | None) -> None:
        rate, count, visits = (self._facts[name] for name in ("rate", "count", "visits"))
        kept = self._kept(row) * float(count[row])
        total = kept + len(successes)
        mean = (kept * float(rate[row]) + sum(successes)) / total
        rate[row], count[row] = mean if value is None else value, total
        visits[row] += 1

    def _kept(self, row: int) -> float:
        return self.memory

    def ended(self) -> str | None:
        """The reason why no row is left to draw; ``None`` if there is a row."""
        return None

    @abstractmethod
    def active(self) -> float:
        """Share of the rows that are currently drawn."""

    def metrics(self) -> dict[str, float]:
        """Return ``train/curriculum_...``: shares of seen and drawn rows, success rate."""
        seen = self._facts["visits"] > 0
        success = self._facts["rate"][seen].mean().item() if bool(seen.any()) else float("nan")
        return {
            "train/curriculum_seen": seen.double().mean().item(),
            "train/curriculum_success": success,
            "train/curriculum_active": self.active(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the results so far; the loader saves the position."""
        return {"epoch": self.epoch, **{name: fact.clone() for name, fact in self._facts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the results of :meth:`state_dict`.

        Args:
            state: of an order of the same kind.

        Raises:
            DataError: the state has a different number of rows.
        """
        if len(state["rate"]) != self.num_rows:
            raise DataError(
                f"the results are those of {len(state['rate'])} rows, and the dataset has "
                f"{self.num_rows}; a run resumes with the data that it began with"
            )
        self.epoch = int(state["epoch"])
        self._facts = {name: state[name].clone() for name in self._facts}


class _Passes(RowOrder):
    """Shuffled passes, one after the other, that skip some rows."""

    _pass: tuple[tuple[int, int], Tensor] | None = None

    @abstractmethod
    def wanted(self) -> Tensor:
        """Return which rows are currently drawn, bool ``[N]``."""

    def draw(self, seed: int, epoch: int, index: int) -> tuple[int, int] | None:
        """Return the next wanted row of the pass; see the base class."""
        self.epoch = epoch
        if self._pass is None or self._pass[0] != (seed, epoch):
            self._pass = (seed, epoch), shuffled(self.num_rows, seed, epoch)
        order = self._pass[1][index:]
        found = self._drawn()[order].nonzero()
        if not len(found):
            return None
        place = int(found[0])
        return int(order[place]), index + place + 1

    def _drawn(self) -> Tensor:
        return self.wanted()

    def active(self) -> float:
        """Share of the rows that are currently drawn."""
        return self.wanted().double().mean().item()


class BandOrder(_Passes):
    """Draws rows whose success rate is in a band; other rows are tried again later.

    All answers to a prompt that is always or never solved have the same reward, so the model learns
    nothing from comparing them. Such rows are skipped in the next passes, but not forever, because
    models change.

    Args:
        low: least success rate.
        high: greatest success rate.
        revisit: number of passes that skip a row outside the band.
        memory: see :class:`RowOrder`. When a row is tried again, its earlier results are forgotten.

    Raises:
        ConfigError: the band is impossible, or no row would ever be skipped.

    Example:
        >>> order = BandOrder(revisit=2)
        >>> order.begin(3)
        >>> order.record({0: [1, 1], 1: [1, 0], 2: [0, 0]})
        >>> order.wanted().tolist()
        [False, True, False]
    """

    @checked
    def __init__(
        self,
        low: float = 0.1,
        high: float = 0.9,
        *,
        revisit: Annotated[int, Ge(1)] = 4,
        memory: float = 0.5,
    ) -> None:
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"a band of success rates rises within [0, 1], got [{low}, {high}]")
        self.low, self.high, self.revisit = low, high, revisit
        super().__init__(memory=memory)

    def _columns(self) -> dict[str, torch.dtype]:
        return super()._columns() | {"rests_until": torch.int64}

    def wanted(self) -> Tensor:
        """Return which rows are currently drawn, bool ``[N]``."""
        return self._facts["rests_until"] <= self.epoch

    def _kept(self, row: int) -> float:
        return 0.0 if int(self._facts["rests_until"][row]) else self.memory

    def _visit(self, row: int, successes: Sequence[float], value: float | None) -> None:
        super()._visit(row, successes, value)
        inside = self.low <= float(self._facts["rate"][row]) <= self.high
        self._facts["rests_until"][row] = 0 if inside else self.epoch + 1 + self.revisit


class QueueOrder(_Passes):
    """A queue of rows; a row leaves it when solved, or after a number of visits.

    Args:
        solved: success rate of a visit from which on a row leaves the queue.
        visits: number of visits after which a row leaves in any case; ``None`` for no limit.

    Raises:
        ConfigError: for impossible numbers.

    Example:
        >>> order = QueueOrder(visits=2)
        >>> order.begin(2)
        >>> order.record({0: [1, 1], 1: [0, 1]}); order.ended()
        >>> order.record({1: [0, 0]}); order.ended()
        'the queue is empty: of 2 prompts 1 solved, 1 unsolved (visits=2)'
    """

    @checked
    def __init__(
        self,
        *,
        solved: Annotated[float, In("(0, 1]")] = 1.0,
        visits: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        self.solved, self.visits = solved, visits
        super().__init__()

    def _columns(self) -> dict[str, torch.dtype]:
        return super()._columns() | {"solved": torch.bool}

    def _visit(self, row: int, successes: Sequence[float], value: float | None) -> None:
        super()._visit(row, successes, None)
        self._facts["solved"][row] |= float(self._facts["rate"][row]) >= self.solved

    def wanted(self) -> Tensor:
        """Return which rows are in the queue, bool ``[N]``."""
        left = ~self._facts["solved"]
        return left if self.visits is None else left & (self._facts["visits"] < self.visits)

    def _drawn(self) -> Tensor:
        wanted = self.wanted()
        # An empty queue returns any row, until the run has ended.
        return wanted if bool(wanted.any()) else torch.ones_like(wanted)

    def ended(self) -> str | None:
        """The outcome of the rows if the queue is empty, else ``None``."""
        if bool(self.wanted().any()):
            return None
        solved = int(self._facts["solved"].sum())
        others = self.num_rows - solved
        rest = f", {others} unsolved (visits={self.visits})" if others else ""
        return f"the queue is empty: of {self.num_rows} prompts {solved} solved{rest}"


class WeightedOrder(RowOrder):
    r"""Draws random rows, weighted by the uncertainty of success: SPO's prioritised sampling.

    As in arXiv:2509.13232, section 3.3, row :math:`i` is drawn with probability :math:`\propto
    \sqrt{v_i (1 - v_i)} + \epsilon`, with replacement. A pass has as many draws as there are rows.
    Deviation from the paper: without a tracker, :math:`v` is the mean of the visits.

    Args:
        floor: :math:`\epsilon`, the smallest weight.
        memory: see :class:`RowOrder`.

    Raises:
        ConfigError: the floor is not above 0, so some rows would never be drawn again.

    Example:
        >>> order = WeightedOrder()
        >>> order.begin(2)
        >>> order.record({0: [1.0, 1.0]})
        >>> [round(w, 2) for w in order.weights().tolist()]
        [0.05, 0.55]
    """

    @checked
    def __init__(self, *, floor: Annotated[float, Gt(0)] = 0.05, memory: float = 0.5) -> None:
        self.floor = floor
        super().__init__(memory=memory)

    def weights(self) -> Tensor:
        """Return unnormalised weights, float64 ``[N]``; a new row counts as half solved."""
        rates = torch.where(self._facts["visits"] > 0, self._facts["rate"], 0.5)
        return uncertainty_weight(rates, floor=self.floor)

    def draw(self, seed: int, epoch: int, index: int) -> tuple[int, int] | None:
        """Draw a row at random, by its weight; see the base class."""
        self.epoch = epoch
        if index >= self.num_rows:
            return None
        number = seed * 1_000_003 + epoch * self.num_rows + index
        generator = torch.Generator().manual_seed(number % 2**63)
        share = torch.rand((), dtype=torch.float64, generator=generator)
        bounds = self.weights().cumsum(0)
        row = int(torch.searchsorted(bounds, share * bounds[-1], right=True))
        return min(row, self.num_rows - 1), index + 1

    def active(self) -> float:
        """Effective share of the drawn rows: (sum w)^2 / (N sum w^2)."""
        weights = self.weights()
        return (weights.sum() ** 2 / (weights.square().sum() * self.num_rows)).item()

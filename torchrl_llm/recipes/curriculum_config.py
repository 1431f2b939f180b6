"""Order in which prompts are drawn: the group ``curriculum`` of the GRPO recipes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from torchrl_llm._settings import Group, ensure, naming, several
from torchrl_llm.data.row_order import BandOrder, QueueOrder, RowOrder, WeightedOrder

# Keys that each order reads.
_READ = {"band": ("band", "revisit"), "queue": ("solved", "visits"), "spo": ("floor",)}


class CurriculumConfig(Group, key="curriculum"):
    """Order in which prompts are drawn, see :mod:`torchrl_llm.data.row_order`.

    Attributes:
        order: order of the prompts (``shuffle``: a different order in each pass; ``file``: the
            order of the data; ``band``: only prompts whose success rate is in a band; ``queue``:
            each prompt until it is solved or was visited often enough, and the run ends with the
            last one; ``spo``: at random, weighted by the uncertainty of success, with the tracked
            rates of ``advantage=spo``).
        band: ``[low, high]``, the success rates of ``band``.
        revisit: number of passes that skip a prompt outside the band.
        solved: success rate in a step at which a prompt leaves the ``queue``.
        visits: number of steps after which a prompt leaves the ``queue`` unsolved; ``None`` for no
            limit.
        floor: smallest weight of ``spo``.
    """

    order: Literal["shuffle", "file", "band", "queue", "spo"] = "shuffle"
    band: list[float] = several(0.1, 0.9)
    revisit: int = 4
    solved: float = 1.0
    visits: int | None = None
    floor: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in fields(self)[1:]:
            owner = next(order for order, read in _READ.items() if key.name in read)
            where = f"with curriculum.order={self.order}; it belongs to {owner}"
            self.only(key.name, self.order == owner, where)
        ensure(len(self.band) == 2, f"curriculum.band must be [low, high], got {self.band}")
        with naming(f"curriculum.order={self.order}"):
            self.build()

    @property
    def follows_results(self) -> bool:
        """Whether the order depends on results."""
        return self.order in _READ

    def build(self) -> RowOrder | None:
        """The order that depends on results; ``None`` for a fixed order."""
        if self.order == "band":
            return BandOrder(*self.band, revisit=self.revisit)
        if self.order == "queue":
            return QueueOrder(solved=self.solved, visits=self.visits)
        return WeightedOrder(floor=self.floor) if self.order == "spo" else None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`~torchrl_llm.envs.DatasetChatEnv` that differ from the defaults."""
        if self.follows_results:
            return {"order": self.build()}
        return {"shuffle": False} if self.order == "file" else {}

"""What the recipes share that learn from rows of a table, and not from samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from torchrl_llm._settings import Count, ensure
from torchrl_llm.data.demonstrations import Demonstration
from torchrl_llm.data.row_files import MappedRows, Row, RowLoader
from torchrl_llm.recipes.data_config import DataSource, hold_out, tell_overlap
from torchrl_llm.recipes.groups import ForwardConfig
from torchrl_llm.trainers import Ranks
from torchrl_llm.trainers.kept_rollouts import Kept
from torchrl_llm.trainers.run_config import LoggingConfig

READ_FIRST = 10_000
"""Rows that are read before the first step, which takes a few seconds; the others are looked at
when it is their turn."""


class TrainConfig(ForwardConfig):
    """The loop.

    Attributes:
        max_steps: optimizer steps; ``None`` for as many as ``max_epochs`` takes.
        max_epochs: passes over the rows; ``None`` for as many as ``max_steps`` takes, and 1 without
            it. With both the run ends with what comes first.
        batch_size: rows an optimizer step.
    """

    max_steps: Count | None = None
    max_epochs: Count | None = None
    batch_size: Count = 32

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole run.

        Args:
            num_rows: of the data.
        """
        epochs = self.max_epochs or (1 if self.max_steps is None else None)
        limits = [self.max_steps, epochs and epochs * -(-num_rows // self.batch_size)]
        return min(limit for limit in limits if limit is not None)


class NumbersConfig(LoggingConfig):
    """Where numbers go.

    Attributes:
        samples: always ``None``; no answers are sampled to learn from.
        rollouts: always ``none``, likewise.
    """

    samples: int | None = None
    rollouts: Kept = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(self.samples is None, "logging.samples has no effect: nothing learns from samples")
        ensure(
            self.rollouts == "none", "logging.rollouts has no effect: nothing learns from samples"
        )


class Parts(NamedTuple):
    """Rows of a run as they are learned, and those that are held out (``None`` for none)."""

    train: Any
    held_out: Any


def parts_of(
    data: DataSource,
    num_prompts: int | None,
    make: Callable[..., Any],
    asked: Callable[[Row], Any],
    *,
    read_first: int = READ_FIRST,
) -> Parts:
    """Read the rows of a run, and look at the first of both parts.

    Args:
        data: where they come from.
        num_prompts: rows that are held out, as ``eval.num_prompts``.
        make: makes a part of its rows, whose attribute ``rows`` they are; also takes ``name``, and
            of held-out rows ``first_row`` and ``held_out``.
        asked: what a row asks, to find prompts that both parts have.
        read_first: rows of each part that are looked at; 0 to look at nothing.

    Raises:
        DataError: missing or malformed data, or a row that cannot be learned from.
    """
    rows, held_out, cut = data.load(), None, False
    if num_prompts != 0:
        held_out = data.load_held_out()
        if cut := held_out is None:
            rows, held_out = hold_out(rows, num_prompts, where="data.source")
    found = Parts(make(rows, name=_name(data.source)), None)
    if held_out is not None:
        where = data.source if cut or data.eval_split is not None else data.eval_source
        first = len(rows) + 1 if cut else 1
        held_out = make(
            _first(held_out, num_prompts), name=_name(where), first_row=first, held_out=True
        )
        found = found._replace(held_out=held_out)
    if not read_first:
        return found
    for part in found:
        if part is not None:
            part.check(read_first)
    if held_out is not None:
        prompts = (map(asked, part.rows) for part in found)
        tell_overlap(
            next(prompts), list(next(prompts)), "data.source" if cut else "data.eval_source"
        )
    return found


def _name(source: Any) -> str:
    return " + ".join(source) if isinstance(source, list) else source


def _first(rows: Sequence[Row], number: int | None) -> Sequence[Row]:
    """The first rows of any sequence, or all of them."""
    return rows if number is None else MappedRows(range(min(number, len(rows))), rows.__getitem__)


def batches(loader: RowLoader) -> Iterator[list[Any]]:
    """The batches of one epoch after the other, from where the loader is."""
    return chain.from_iterable(repeat(loader))


def batch_metrics(
    batch: Sequence[Demonstration], loader: RowLoader, ranks: Ranks
) -> dict[str, float]:
    """Tokens of a batch, rows that were too long, and how many epochs are done."""
    counts = {
        "train/tokens": sum(len(each.token_ids) for each in batch),
        "train/tokens_trained": sum(int(each.learned.sum()) for each in batch),
        "train/overlong": sum(each.overlong for each in batch),
    }
    return ranks.sums(counts) | {"train/epoch": loader.epoch + loader.index / len(loader.rows)}

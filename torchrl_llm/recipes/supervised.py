"""Shared parts of the recipes that learn from rows of a table instead of samples."""

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
"""Rows that are checked before the first step, which takes a few seconds; the others are checked
when they are trained."""


class TrainConfig(ForwardConfig):
    """The training loop.

    Attributes:
        max_steps: optimizer steps; ``None`` for as many as ``max_epochs`` takes.
        max_epochs: passes over the rows; ``None`` for as many as ``max_steps`` takes, and 1 without
            it. With both the run ends with whichever comes first.
        batch_size: rows per optimizer step.
    """

    max_steps: Count | None = None
    max_epochs: Count | None = None
    batch_size: Count = 32

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole run.

        Args:
            num_rows: number of training rows.
        """
        epochs = self.max_epochs or (1 if self.max_steps is None else None)
        limits = [self.max_steps, epochs and epochs * -(-num_rows // self.batch_size)]
        return min(limit for limit in limits if limit is not None)


class NumbersConfig(LoggingConfig):
    """Logging of metrics.

    Attributes:
        samples: always ``None``; training does not sample answers.
        rollouts: always ``none``; training does not sample answers.
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
    """Training rows of a run, and held-out rows (``None`` for none)."""

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
    """Read the rows of a run, and check the first rows of both parts.

    Args:
        data: source of the rows.
        num_prompts: number of held-out rows, as ``eval.num_prompts``.
        make: makes a part from its rows, with these rows in the attribute ``rows``; also takes
            ``name``, and for held-out rows ``first_row`` and ``held_out``.
        asked: returns the prompt of a row, to find prompts that are in both parts.
        read_first: number of rows of each part to check; 0 for no check.

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
    """The batches of all further epochs, from the loader's position on."""
    return chain.from_iterable(repeat(loader))


def batch_metrics(
    batch: Sequence[Demonstration], loader: RowLoader, ranks: Ranks
) -> dict[str, float]:
    """Tokens of a batch, number of overlong rows, and finished epochs."""
    counts = {
        "train/tokens": sum(len(each.token_ids) for each in batch),
        "train/tokens_trained": sum(int(each.learned.sum()) for each in batch),
        "train/overlong": sum(each.overlong for each in batch),
    }
    return ranks.sums(counts) | {"train/epoch": loader.epoch + loader.index / len(loader.rows)}

"""Rows of a data set on their way to an environment: generated, mapped, put into an order.

Where rows come from (a file, Python objects, the hub) is :mod:`torchrl_llm.data.sources`. Task
environments expect ``query`` (the user's message, or a list of messages) and whatever their reward
reads, usually ``answer``. A generated task is the same thing with rows made on the fly by index
(:class:`GeneratedRows`), so it can be shuffled, split and resumed like a file.

Next: :class:`torchrl_llm.envs.transforms.DataLoadingPrimer` hands the rows to an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchrl_llm.data.sources import load_rows, read_jsonl
from torchrl_llm.errors import DataError

__all__ = ["GeneratedRows", "MappedRows", "RowLoader", "load_rows", "read_jsonl"]

Row = Mapping[str, Any]


class GeneratedRows(Sequence):
    """A finite data set whose rows are computed from their index.

    Args:
        make_row: index to row. It must depend on nothing but the index, or a resumed run would
            see other rows; give train and held-out sets index ranges of their own.
        num_rows: length of the data set.
        offset: added to every index before ``make_row`` sees it.

    Example:
        >>> make_row = lambda i: {"query": f"{i} + 1", "answer": f"{i + 1}"}
        >>> rows = GeneratedRows(make_row, 3, offset=10)
        >>> len(rows), rows[0]["query"], rows[-1]["answer"]
        (3, '10 + 1', '13')
    """

    def __init__(self, make_row: Callable[[int], Row], num_rows: int, *, offset: int = 0) -> None:
        if num_rows < 1:
            raise DataError(f"a data set needs at least one row, got num_rows={num_rows}")
        self.make_row = make_row
        self.num_rows = num_rows
        self.offset = offset

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.num_rows))]
        if not -self.num_rows <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return self.make_row(self.offset + index % self.num_rows)


class MappedRows(Sequence):
    """Another sequence's rows, each passed through a function when it is read.

    Args:
        rows: the rows.
        function: row to row.

    Example:
        >>> MappedRows([{"question": "Hi"}], lambda row: {"query": row["question"]})[0]
        {'query': 'Hi'}
    """

    def __init__(self, rows: Sequence[Row], function: Callable[[Row], Row]) -> None:
        self.rows = rows
        self.function = function

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.function(row) for row in self.rows[index]]
        return self.function(self.rows[index])


class RowLoader:
    """Iterates over a sequence of rows, one epoch an iteration, from a position that can be saved.

    Args:
        rows: the data set.
        shuffle: whether each epoch has an order of its own, a function of ``seed`` and its number.
        seed: seed of the orders; ``None`` draws one from torch's generator.
        batch_size: how many rows ``collate_fn`` sees at a time.
        collate_fn: list of rows to one mapping of columns, each with a value per row, as for
            ``torch.utils.data.DataLoader``; ``None`` hands the rows out as they are.

    Example:
        >>> loader = RowLoader([{"query": q} for q in "abc"], shuffle=False)
        >>> first = next(iter(loader)); state = loader.state_dict()
        >>> [row["query"] for row in loader], loader.epoch
        (['b', 'c'], 1)
        >>> loader.load_state_dict(state); next(iter(loader))["query"]
        'b'
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        shuffle: bool = True,
        seed: int | None = None,
        batch_size: int = 1,
        collate_fn: Callable[[list[Row]], Mapping[str, Any]] | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"rows are read at least one at a time, got batch_size={batch_size}")
        self.rows = rows
        self.shuffle = shuffle
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.batch_size = batch_size if collate_fn is not None else None
        self.collate_fn = collate_fn
        self.epoch = 0
        self.index = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size or 1))

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        while self.index < len(order):
            chosen = order[self.index : self.index + (self.batch_size or 1)]
            self.index += len(chosen)
            if self.collate_fn is None:
                yield self.rows[chosen[0]]
            else:
                yield self.collate_fn([self.rows[i] for i in chosen])
        self.epoch, self.index = self.epoch + 1, 0

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.rows))
        # Each epoch's order is a function of two numbers, so a position is two numbers too.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(len(self.rows), generator=generator).tolist()

    def reset(self, seed: int | None = None) -> None:
        """Start over, with another seed if one is given."""
        self.seed = self.seed if seed is None else seed
        self.epoch = self.index = 0

    def state_dict(self) -> dict[str, int]:
        """Seed and position."""
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; an iterator that is running must be made anew."""
        self.seed, self.epoch, self.index = state["seed"], state["epoch"], state["index"]

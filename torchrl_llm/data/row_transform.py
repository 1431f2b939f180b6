"""Transforms that add columns to rows, the same in an environment and in a replay buffer.

A subclass computes the columns in one method (:meth:`RowTransform.columns`). An environment writes
them at each step. A replay buffer writes them together with the rows, so that transforms that were
appended earlier (credit, joining of turns) can read them.

Next: :mod:`torchrl_llm.envs.transforms.retrieve_scores` is one.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``R_b`` tokens of its response.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from torchrl_llm.data.enums import Source
from torchrl_llm.data.nodes import leaf, set_copied
from torchrl_llm.data.ragged import lazy_rows, read_rows, write_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import CUT_TOKENS
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import ConfigError, DataError

Path = tuple[str, ...]


def pieces_under_budget(
    asked: Sequence[int], lengths: Sequence[int], budget: int | None
) -> list[list[int]]:
    """Pieces of neighbouring rows under a budget: rows of a group are adjacent and share a prompt.

    Args:
        asked: indices of rows.
        lengths: tokens of each row.
        budget: tokens of a piece, including the padding of a padded layout; ``None`` for one piece.
            A longer row is a piece by itself.

    Example:
        >>> pieces_under_budget([0, 1, 3], [2, 3, 9, 4], 6)
        [[0, 1], [3]]
    """
    pieces: list[list[int]] = []
    longest = 0
    for row in asked:
        longest = max(longest, lengths[row])
        padded = (len(pieces[-1]) + 1) * longest if pieces else 0
        if not pieces or (budget is not None and padded > budget):
            pieces.append([])
            longest = lengths[row]
        pieces[-1].append(row)
    return pieces


def unparted_rows(rows: TensorDictBase, pair_key: NestedKey = "pair_id") -> list[list[int]]:
    """The rows that a loss must read together: those of each pair, or each row alone.

    Args:
        rows: ``[B]``.
        pair_key: int64, one number per row, if rows belong to pairs.

    Example:
        >>> from tensordict import TensorDict
        >>> unparted_rows(TensorDict(pair_id=torch.tensor([4, 9, 4]), batch_size=3))
        [[0, 2], [1]]
    """
    pairs = read_rows(rows, pair_key, None)
    units: dict[int, list[int]] = {}
    for row in range(len(rows)):
        units.setdefault(row if pairs is None else int(pairs[row]), []).append(row)
    return list(units.values())


class RowView:
    """Columns of rows, whether ``next`` is in the rows or an environment is still making it.

    Args:
        root: rows ``[B]``.
        next_rows: rows that an environment will put under ``"next"``; ``None`` if ``"next"``
            exists.
    """

    def __init__(self, root: TensorDictBase, next_rows: TensorDictBase | None = None) -> None:
        self.root, self.next_rows = root, next_rows

    def __len__(self) -> int:
        return self.root.batch_size[0]

    def part(self, index: list[int]) -> RowView:
        """A view of some of the rows.

        Args:
            index: their places.
        """
        next_rows = None if self.next_rows is None else self.next_rows[index]
        return RowView(self.root[index], next_rows)

    def read(self, path: Path, advice: str | None = None) -> list[Tensor] | None:
        """The ``B`` tensors of a column.

        Args:
            path: the column; one that begins with ``"next"`` is read from the next rows.
            advice: how to create the column, for the error; without it a missing column gives
                ``None``.

        Raises:
            DataError: the column is missing, and there is advice.
        """
        if path[0] == "next" and self.next_rows is not None:
            values = read_rows(self.next_rows, path[1:], None)
        else:
            values = read_rows(self.root, path, None)
        if values is None and advice is not None:
            raise DataError(f"the rows have no {path!r}; {advice}")
        return values

    def chats(self) -> list[Any] | None:
        """The conversation of each row, under ``("history", "full")``; ``None`` without any."""
        history = self.root.get(("history", "full"), None)
        return None if history is None else list(history.chats)

    def texts(self) -> list[str] | None:
        """The text of each row, under ``("text", "full")``; ``None`` without any."""
        texts = self.root.get(("text", "full"), None)
        return texts if texts is None or isinstance(texts, list) else texts.tolist()

    def stepped(self) -> list[bool]:
        """Which rows an environment steps; all of them outside of an environment."""
        mask = None if self.next_rows is None else self.root.get("_step", None)
        if mask is None:
            return [True] * len(self)
        return mask.reshape(len(self), -1).any(-1).tolist()

    def sampled(self) -> list[Tensor]:
        """The tokens that the policy sampled in the turn that a row represents.

        Tokens of templates, tools and prefilled text are excluded. Earlier turns of the same
        conversation are excluded, too, unless the turns were joined.

        Returns:
            ``B`` bool tensors ``[T_b]``, all false for a row that is not stepped.

        Raises:
            DataError: the rows have no tokens.
        """
        advice = "which the policy writes"
        full = self.read(("tokens", "full"), advice)
        response = self.read(("tokens", "response"), advice)
        source = self.read(("trace", "source"))
        assistant = self.read(("masks", "all_assistant_mask"))
        masks = []
        for row, stepped in enumerate(self.stepped()):
            mask = torch.arange(full[row].shape[0], device=full[row].device)
            mask = mask >= mask.shape[0] - response[row].shape[0]
            if source is not None:
                mask = mask & (source[row] == Source.SAMPLED)
            elif assistant is not None:
                mask = mask & assistant[row]
            masks.append(mask & stepped)
        return masks

    def cut_tokens(self) -> Tensor:
        """Sampled tokens that were cut off each row to fit it into training, int64 ``[B]``."""
        rows = self.root.tensordicts if isinstance(self.root, LazyStackedTensorDict) else ()
        cut = [leaf(row, (CUT_TOKENS,)) for row in rows]
        return torch.tensor([0 if n is None else int(n) for n in cut] or [0] * len(self))


class RowTransform(Transform):
    """Base of the transforms that add columns to rows; subclasses write :meth:`columns`.

    - In an environment the columns are written at each step; those under ``"next"`` only.
    - In a replay buffer (``buffer.append_transform(transform)``) they are written with the rows,
      as an inverse transform: before transforms that were appended earlier see the rows.
    - Called on rows, it writes into them, in place.

    Rows that have the columns pass unchanged, so a buffer that also runs its transforms on samples
    computes nothing twice.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> class Length(RowTransform):
        ...     written = ("next", "length")
        ...     def columns(self, rows):
        ...         return {self.written: [mask.sum().view(1) for mask in rows.sampled()]}
        >>> buffer = ReplayBuffer(transform=Length())
        >>> ids = torch.arange(5)
        >>> index = buffer.extend([TensorDict(tokens={"full": ids, "response": ids[2:]})])
        >>> buffer[0]["next", "length"]
        tensor([3])
    """

    adds_keys_only = True

    @abstractmethod
    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The new columns.

        Args:
            rows: the ``B`` rows.

        Returns:
            For each full path (``("next", "reward")``), ``B`` tensors.
        """

    @property
    @abstractmethod
    def written(self) -> Path:
        """The column whose presence shows that this transform has already run."""

    def is_written(self, row: TensorDictBase) -> bool:
        """Whether the columns exist.

        Args:
            row: one row, or dense rows.
        """
        return row.get(self.written, None) is not None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the columns into rows that do not have them, in place.

        Args:
            tensordict: rows ``[B]``, ragged or dense.

        Returns:
            The same rows.

        Raises:
            DataError: for rollouts ``[B, T]``.
        """
        if tensordict.batch_dims > 1:
            raise DataError(
                f"{type(self).__name__} reads rows with one batch dimension, got batch size "
                f"{tuple(tensordict.batch_size)}; flatten them first, td = td.reshape(-1), or "
                "append the transform to the environment"
            )
        missing: Any = tensordict
        if isinstance(tensordict, LazyStackedTensorDict) or not tensordict.batch_dims:
            rows = tensordict.tensordicts if tensordict.batch_dims else [tensordict]
            found = [row for row in rows if not self.is_written(row)]
            missing = lazy_rows(found) if found else None
        elif self.is_written(tensordict):
            missing = None
        if missing is not None:
            for path, values in self.columns(RowView(missing)).items():
                _write(missing, path, values)
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None or not tensordict.batch_dims or self._in_environment():
            # A single row is being read, not written; an environment inverts actions this way.
            return tensordict
        rows = row_list(tensordict)
        missing = [row for row in rows if not self.is_written(row)]
        if missing:
            for path, values in self.columns(RowView(lazy_rows(missing))).items():
                for row, value in zip(missing, values, strict=True):
                    # Nodes under the root may belong to the writer of the rows.
                    set_copied(row, path, value)
        return lazy_rows(rows)

    def _in_environment(self) -> bool:
        try:
            return isinstance(self.container, EnvBase)
        except ValueError:  # a Compose outside of an environment, as in a replay buffer
            return False

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        columns = self.columns(RowView(tensordict, next_tensordict))
        for path, values in columns.items():
            _write(next_tensordict, _in_next(path), values)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size = tensordict_reset.batch_size.numel()
        for path, empty in self.empty_columns().items():
            _write(tensordict_reset, _in_next(path), [empty] * size)
        return tensordict_reset

    def empty_columns(self) -> Mapping[Path, Tensor]:
        """Values of the columns before a row's first step; none by default."""
        return {}


def _in_next(path: Path) -> Path:
    if path[0] != "next":
        raise ConfigError(
            f"an environment writes below 'next', and {path!r} is not there; append this transform "
            "to the replay buffer"
        )
    return path[1:]


def _write(td: Any, path: Path, values: list[Tensor]) -> None:
    parent = td if len(path) < 2 else td.get(path[:-1], None)
    if isinstance(td, LazyStackedTensorDict) or isinstance(parent, LazyStackedTensorDict):
        write_rows(td, path, values)
    elif len({value.shape for value in values}) == 1 and not _belongs_to_node(path):
        td.set(path, torch.stack(values))
    else:
        write_rows(td, path, values)


def _belongs_to_node(path: Path) -> bool:
    """Whether a column is in a node, which is ragged even if the lengths happen to agree."""
    return len(path) - (path[0] == "next") > 1

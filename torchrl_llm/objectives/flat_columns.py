"""Concatenated columns of rows, and masks over them: assistant tokens, trained tokens.

:mod:`torchrl_llm.objectives.loss_rows` is built from these.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``L`` tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import DataError


@dataclass
class RowKeys:
    """The keys of the columns that a loss reads."""

    action: NestedKey = ("tokens", "full")
    prompt: NestedKey = ("tokens", "prompt")
    attention_mask: NestedKey = ("masks", "all_attention_mask")
    assistant_mask: NestedKey = ("masks", "all_assistant_mask")
    trace: NestedKey | None = "trace"
    temperature: NestedKey = ("tokens", "temperature")
    truncated_support: NestedKey = ("tokens", "truncated_support")
    support: NestedKey = "support"
    group_id: NestedKey = "group_id"


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Move values to a device, without waiting for copies from the CPU.

    Args:
        values: a column, an index.
        device: device of the loss.
    """
    return values.to(device, non_blocking=values.device.type == "cpu")


def key_name(key: NestedKey) -> str:
    """Return a key in the form that error messages use."""
    return key if isinstance(key, str) else repr(key)


def read_column(td: Any, key: NestedKey, advice: str) -> list[Tensor]:
    """Return the tensors of a column, one per row.

    Args:
        td: the rows.
        key: name of the column.
        advice: how to produce the column, for the error message.

    Raises:
        DataError: when the column is missing.
    """
    values = read_rows(td, key, None)
    if values is None:
        raise DataError(f"the rows have no {key_name(key)}; {advice}")
    return values


def optional_column(td: Any, key: NestedKey) -> list[Tensor] | None:
    """Return the tensors of an optional column; ``None`` if no row has it.

    Args:
        td: the rows.
        key: name of the column.

    Raises:
        DataError: when only some rows have the column. A missing value has a meaning (a temperature
            of one, for example), so mixed rows are an error.
    """
    values = read_rows(td, key, None)
    if values is not None:
        return values
    node, path = td, (key,) if isinstance(key, str) else tuple(key)
    if not _is_ragged(td):
        # A dense node has a column for all rows, but may contain a lazy node.
        node, path = td.get(path[0], None), path[1:]
    if path and _is_ragged(node):
        lacking = [b for b, row in enumerate(node.unbind(0)) if leaf(row, path) is None]
        if len(lacking) < len(td):
            raise DataError(
                f"rows {lacking[:8]} have no {key_name(key)} and others do: write it for all of "
                "them, or keep rows of different origin in batches of their own"
            )
    return None


def flatten(values: list[Tensor], stored: list[int], kept: Tensor | None, key: NestedKey) -> Tensor:
    """Concatenate a token-aligned column without padding.

    Args:
        values: ``[T_b]`` or ``[T_b, 1]`` per row.
        stored: stored length of each row, including padding.
        kept: see :func:`kept_positions`.
        key: name of the column.

    Returns:
        ``[L]``.

    Raises:
        DataError: when the number of values of a row differs from its number of tokens.
    """
    if values and values[0].ndim == 2:
        values = [value.squeeze(-1) for value in values]
    shapes = [value.shape for value in values]
    if shapes != [(length,) for length in stored]:
        row = next(b for b, (s, n) in enumerate(zip(shapes, stored, strict=True)) if s != (n,))
        raise DataError(
            f"{key_name(key)} must have one value per token: row {row} has {stored[row]} tokens "
            f"and values of shape {tuple(shapes[row])}"
        )
    flat = torch.cat(values)
    return flat if kept is None else flat[kept]


def kept_positions(td: Any, keys: RowKeys, stored: list[int]) -> Tensor | None:
    """Return which stored positions of all rows are not padding.

    Args:
        td: the rows.
        keys: keys of the columns, including the attention mask.
        stored: stored length of each row.

    Returns:
        bool over all stored positions; ``None`` without any padding.

    Raises:
        DataError: for padded rows without an attention mask.
    """
    masks = optional_column(td, keys.attention_mask)
    if masks is None:
        if _is_ragged(td) or (
            isinstance(keys.action, tuple) and _is_ragged(td.get(keys.action[:-1], None))
        ):
            return None
        raise DataError(
            f"padded rows need {keys.attention_mask!r}: padding is never inferred from token ids"
        )
    kept = flatten(masks, stored, None, keys.attention_mask).bool()
    return None if bool(kept.all()) else kept


def _is_ragged(td: Any) -> bool:
    return isinstance(getattr(td, "_tensordict", td), LazyStackedTensorDict)


def positions(lengths: list[int]) -> Tensor:
    """Return the index of each token in its row.

    Args:
        lengths: ``B`` lengths.

    Returns:
        int64 ``[L]``.

    Example:
        >>> positions([2, 3])
        tensor([0, 1, 0, 1, 2])
    """
    sizes = torch.tensor(lengths)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return torch.arange(starts.shape[0]) - starts


class RowMasks:
    """Masks over the ``L`` tokens of all rows.

    Args:
        td: the rows.
        keys: keys of their columns.
        ids: ``B`` int64 tensors ``[T_b]``, without padding.
        stored: stored length of each row, including padding.
        kept: see :func:`~torchrl_llm.objectives.flat_columns.kept_positions`.

    Raises:
        DataError: in each method, when a column that it needs is missing or misaligned.
    """

    def __init__(
        self, td: Any, keys: RowKeys, ids: list[Tensor], stored: list[int], kept: Tensor | None
    ) -> None:
        self.td, self.keys, self.ids, self.stored, self.kept = td, keys, ids, stored, kept

    def _read(self, key: NestedKey) -> Tensor | None:
        values = optional_column(self.td, key)
        return None if values is None else flatten(values, self.stored, self.kept, key)

    def with_prefix(self) -> Tensor:
        """All tokens except the first of each row; bool ``[L]``, like the other masks."""
        return positions([row.shape[0] for row in self.ids]) > 0

    def assistant(self) -> Tensor:
        """Tokens of the assistant mask."""
        mask = self._read(self.keys.assistant_mask)
        if mask is None:
            raise DataError(
                f"the rows have no {self.keys.assistant_mask!r}; every policy writes it"
            )
        return mask.bool()

    def after_prompt(self) -> Tensor:
        """Tokens after the row's prompt."""
        prompts = read_rows(self.td, self.keys.prompt, None)
        if prompts is None:
            raise DataError(f"masking_strategy='sft' needs {self.keys.prompt!r}")
        mask = _behind(prompts, self.ids)
        if mask is None and self.kept is not None:  # both may be padded in the same way
            mask = _behind(prompts, read_rows(self.td, self.keys.action))
            mask = None if mask is None else mask[self.kept]
        return self._last_turn() if mask is None else mask

    def _last_turn(self) -> Tensor:
        """Find the last sampled turn, if it ends the row; used when only the prompts are padded."""
        turn = self.keys.trace and self._read(_under(self.keys.trace, "turn"))
        if turn is None:
            raise DataError(
                f"{self.keys.prompt!r} is no prefix of {self.keys.action!r} (it is padded), and "
                "there is no trace that tells where the response begins; use ragged rows or "
                "masking_strategy='rlhf'"
            )
        parts = turn.split([row.shape[0] for row in self.ids])
        return torch.cat([(part == part[-1]) & (part >= 0) for part in parts])

    def trained(self) -> Tensor | None:
        """Sampled tokens without a mask reason; ``None`` without a trace."""
        if self.keys.trace is None:
            return None
        source = self._read(_under(self.keys.trace, "source"))
        if source is None:
            return None
        mask = source == Source.SAMPLED
        reason = self._read(_under(self.keys.trace, "mask_reason"))
        return mask if reason is None else mask & (reason == MaskReason.TRAINED)


def _behind(prompts: list[Tensor], rows: list[Tensor]) -> Tensor | None:
    """Return the tokens of all rows after their prompts; ``None`` if a prompt is not a prefix."""
    starts, lengths = ([row.shape[0] for row in column] for column in (prompts, rows))
    if any(start > length for start, length in zip(starts, lengths, strict=True)):
        return None
    limits = torch.repeat_interleave(torch.tensor(starts), torch.tensor(lengths))
    mask = positions(lengths) >= limits
    return mask if torch.equal(torch.cat(rows)[~mask], torch.cat(prompts)) else None


def _under(node: NestedKey, name: str) -> NestedKey:
    return (*((node,) if isinstance(node, str) else node), name)

"""Reads rows for a loss: decides which tokens count, and reads the columns at these tokens.

Rows come as a one-dimensional lazy stack (ragged) or as padded tensors with an attention mask.
In both cases the columns are concatenated without padding, so a misaligned value always raises an
error. Token ids are never used to decide which tokens count.

With top-k, top-p or min-p, a token is drawn from a few ids, and their probabilities are
renormalised. If both policies are normalised over these ids, the ratio of an unchanged policy is
one. Over the whole vocabulary the ratio is not one. Policies record these ids with
``generate_kwargs={"record_support": True}``, :func:`read_support` reads them, and
:func:`~torchrl_llm.functional.support_log_probs` scores on them.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``L`` tokens of all rows, ``N`` tokens that
count, ``S`` kept ids.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer, pad_flat, row_index
from torchrl_llm.objectives.flat_columns import (
    RowKeys,
    RowMasks,
    flatten,
    kept_positions,
    key_name,
    optional_column,
    positions,
    read_column,
)

MaskingStrategy = Literal["sft", "rlhf", "generic"]


class TokenRows:
    """The tokens of a batch, and which of them count.

    Args:
        sequences: ``B`` int64 tensors ``[T_b]``, without padding.
        stored: stored length of each row, including padding.
        kept: bool over the stored positions of all rows, false at padding; ``None`` without
            padding.
        mask: bool ``[L]``, the tokens that count.

    Attributes:
        sequences: the argument of this name.
        select: ``B`` bool tensors ``[T_b]``, the tokens that count.
        counts: number of counted tokens per row.
        row: int64 ``[N]``, the row of each token that counts.

    Raises:
        DataError: when the first token of a row counts.
    """

    def __init__(
        self, sequences: list[Tensor], stored: list[int], kept: Tensor | None, mask: Tensor
    ) -> None:
        lengths = [ids.shape[0] for ids in sequences]
        self.sequences = sequences
        self.select = list(mask.split(lengths))
        rows = row_index(lengths)
        self.row = rows[mask]
        self.counts = torch.bincount(self.row, minlength=len(lengths)).tolist()
        self._stored, self._kept = stored, kept
        self._index = mask.nonzero()[:, 0]
        self._read: dict[NestedKey, Tensor] = {}
        first = rows[mask & (positions(lengths) == 0)]
        if first.numel():
            raise DataError(
                f"the first token of row {first[0]} counts but has no prefix to be predicted from; "
                "rows need a prompt of at least one token"
            )

    def normalizer(self, groups: Tensor | None = None, *, count_empty: bool = False) -> Normalizer:
        """Count the tokens and rows, where these rows are a whole batch.

        Args:
            groups: int64 ``[B]``, the prompt group of each row, for ``prompt_mean``.
            count_empty: also count rows without counted tokens.

        Raises:
            DataError: when no token counts.
        """
        if not self._index.numel():
            raise DataError(
                f"no token of these {len(self.counts)} rows counts: the mask of the masking "
                "strategy, or the trace's mask_reason, excludes them all; drop such batches before "
                "the loss"
            )
        ids = None if groups is None else groups.tolist()
        return Normalizer.of(self.counts, ids, count_empty=count_empty)

    def column(self, td: Any, key: NestedKey, advice: str) -> Tensor:
        """Return the values of a token-aligned column at counted tokens; they must be finite.

        Args:
            td: the rows.
            key: the column, ``[T_b]`` or ``[T_b, 1]`` per row.
            advice: how to produce the column, for the error message.

        Returns:
            float32 ``[N]`` (float64 if it is stored as float64), without gradient. A column is read
            once and cached.

        Raises:
            DataError: when the column is missing or misaligned, or is not finite at a counted
                token.
        """
        if key not in self._read:
            values = self._flat(read_column(td, key, advice), key)
            self._read[key] = self._checked(_real(values)[self._index], key)
        return self._read[key]

    def flat(self, td: Any, key: NestedKey) -> Tensor:
        """Return the values of a token-aligned column at all ``L`` tokens, as stored.

        Args:
            td: the rows.
            key: the column, ``[T_b]`` per row.

        Raises:
            DataError: when the column is missing or misaligned.
        """
        return self._flat(read_column(td, key, "it goes with the tokens"), key)

    def advantage(self, td: Any, key: NestedKey) -> Tensor:
        """Return the advantage of each token that counts.

        Args:
            td: the rows.
            key: the column: one number per row (``[B, 1, 1]`` or ``[B, 1]``), or one per token of
                ``tokens.full`` (``[B, T, 1]``).

        Returns:
            float32 ``[N]``; float64 if it is stored as float64.

        Raises:
            DataError: when the advantage is missing, has a wrong shape, or is not finite at a
                counted token.
        """
        if key not in self._read:
            values = read_column(td, key, "MCAdvantage must run before sampling")
            self._read[key] = self._checked(self._advantage(values, key), key)
        return self._read[key]

    def _advantage(self, values: list[Tensor], key: NestedKey) -> Tensor:
        if all(value.numel() == 1 for value in values):
            return _real(torch.cat([value.reshape(1) for value in values]))[self.row]
        for row, (value, length) in enumerate(zip(values, self._stored, strict=True)):
            if value.numel() != 1 and value.shape != (length, 1):
                raise DataError(
                    f"{key_name(key)} must be [B, 1, 1] or [B, T, 1] with B={len(values)}, "
                    f"T={length}, got {(len(values), *value.shape)} (row {row}); MCAdvantage must "
                    "run before sampling"
                )
        expanded = [
            value.reshape(-1).expand(length)
            for value, length in zip(values, self._stored, strict=True)
        ]
        return _real(self._flat(expanded, key))[self._index]

    def groups(self, td: Any, key: NestedKey) -> Tensor:
        """Return the prompt group of each row.

        Args:
            td: the rows.
            key: int64, one number per row.

        Returns:
            int64 ``[B]``.

        Raises:
            DataError: when the column is missing or does not have one integer per row.
        """
        if key not in self._read:
            values = read_column(
                td,
                key,
                "aggregation='prompt_mean' is a mean over the rows of each prompt, which are told "
                "apart by it (the data loading primer writes it). What TorchRL calls prompt_mean "
                "is aggregation='sequence_mean' here",
            )
            if any(value.numel() != 1 or value.is_floating_point() for value in values):
                raise DataError(f"{key_name(key)} must be one integer per row")
            self._read[key] = torch.stack([value.reshape(()) for value in values]).long()
        return self._read[key]

    def temperature(self, td: Any, key: NestedKey) -> float | Tensor:
        """Temperature of each row, float32 ``[B]``; the number 1.0 if all temperatures are 1."""
        values = optional_column(td, key)
        if values is None:
            return 1.0
        temperatures = torch.stack([value.reshape(()) for value in values]).float()
        return 1.0 if bool((temperatures == 1.0).all()) else temperatures

    def refuse_truncated_support(self, td: Any, key: NestedKey) -> None:
        """Raise if a counted row was sampled with truncation and its kept ids are not stored."""
        values = optional_column(td, key)
        if values is None:
            return
        bad = [b for b, v in enumerate(values) if self.counts[b] and bool(v)]
        if bad:
            raise DataError(
                f"rows {bad[:8]} were sampled with top-k, top-p or min-p and the kept ids were not "
                "stored, so their ratios are not defined; sample with "
                'generate_kwargs={"record_support": True}, or with top_p=1, top_k=0, min_p=0'
            )

    def refuse_unscored(self, td: Any, key: NestedKey, mask_key: NestedKey) -> None:
        """Raise if tokens of other roles count, but only the assistant's tokens have log-probs.

        Args:
            td: the rows.
            key: log-probs.
            mask_key: the assistant's mask; rows may lack it.
        """
        if optional_column(td, mask_key) is None:
            return
        counts = torch.cat(self.select)
        others = ~self.flat(td, mask_key)[counts].bool()
        if bool(others.any()) and not bool(self.flat(td, key)[counts][others].any()):
            raise DataError(
                f"tokens that are not the assistant's are trained too, and {key} is 0.0 at each of "
                "them: they were not scored. Retrieve log-probs with assistant_only=False, or "
                "train the assistant's alone (masking_strategy='rlhf', or assistant_only=True)"
            )

    def scatter(self, values_N: Tensor) -> Tensor:
        """Put the values of counted tokens at their places in a rectangle of the stored rows.

        Args:
            values_N: ``[N]``.

        Returns:
            ``[B, T]`` with ``T`` the longest stored row; shorter rows are padded on the left; 0 at
            tokens that do not count.
        """
        index = self._index
        if self._kept is not None:
            index = self._kept.nonzero()[:, 0][index]
        flat = values_N.new_zeros(sum(self._stored))
        values = flat.index_put((index.to(values_N.device),), values_N)
        return pad_flat(values, self._stored, side="left")

    def stored_select(self) -> list[Tensor]:
        """Return bool ``[T]`` per row, true at counted tokens; positions include padding."""
        flat = torch.zeros(sum(self._stored), dtype=torch.bool)
        kept = slice(None) if self._kept is None else self._kept
        flat[kept] = torch.cat(self.select)
        return list(flat.split(self._stored))

    def _flat(self, values: list[Tensor], key: NestedKey) -> Tensor:
        return flatten(values, self._stored, self._kept, key)

    def _checked(self, values_N: Tensor, key: NestedKey) -> Tensor:
        if values_N.requires_grad:
            raise DataError(
                f"{key!r} must be stored data, and this column requires gradients: detach it"
            )
        fine = values_N.isfinite()
        if not bool(fine.all()):
            rows = self.row[~fine].unique().tolist()
            raise DataError(
                f"{key_name(key)} is NaN or infinite at tokens that count, in rows {rows[:8]}"
            )
        return values_N


def check_one_dimension(td: Any) -> None:
    """Reject inputs that are not a batch of rows: rollouts ``[B, T]`` and empty batches.

    Args:
        td: rows.

    Raises:
        DataError: if the number of batch dimensions is not one, or there are no rows.
    """
    if len(td.batch_size) != 1:
        raise DataError(
            f"a loss reads rows with one batch dimension, got batch size {tuple(td.batch_size)}; "
            "flatten them first: td.reshape(-1), as LLMCollector(flatten_data=True) and the replay "
            "buffer do"
        )
    if not td.batch_size[0]:
        raise DataError("the batch has no rows: skip such batches, there is nothing to learn from")


def read_token_rows(
    td: Any, keys: RowKeys, strategy: MaskingStrategy, trained_B: Tensor | None = None
) -> TokenRows:
    """Read the tokens of a batch and decide which count.

    Args:
        td: rows: a lazy stack, a tensordict with lazy nodes, or padded tensors; batch size ``[B]``.
        keys: keys of the columns.
        strategy: ``"sft"``, after the prompt; ``"rlhf"``, by the assistant mask; ``"generic"``,
            every token with a prefix. With a trace, only sampled tokens with reason ``TRAINED``
            remain.
        trained_B: bool ``[B]``, the rows whose tokens may count; all by default.

    Returns:
        The rows.

    Raises:
        DataError: when a required column is missing or misaligned.
    """
    check_one_dimension(td)
    ids = read_column(td, keys.action, "the rows must hold token ids")
    stored = [row.shape[0] for row in ids]
    kept = kept_positions(td, keys, stored)
    if kept is not None:
        lengths = [int(part.sum()) for part in kept.split(stored)]
        ids = list(torch.cat(ids)[kept].split(lengths))
    flat = RowMasks(td, keys, ids, stored, kept)
    masks = {"sft": flat.after_prompt, "rlhf": flat.assistant, "generic": flat.with_prefix}
    mask, trained = masks[strategy](), flat.trained()
    if trained is not None:
        mask = mask & trained
    if trained_B is not None:
        mask = mask & trained_B[row_index([row.shape[0] for row in ids])]
    return TokenRows(ids, stored, kept, mask)


def _real(values: Tensor) -> Tensor:
    """Convert to at least float32; float64 stays float64."""
    return values if values.dtype == torch.float64 else values.float()


def read_support(tensordict: Any, rows: TokenRows, key: NestedKey) -> Support | None:
    """Read the kept ids of the tokens that count.

    Args:
        tensordict: the rows, ragged or padded.
        rows: their tokens.
        key: node with the columns ``counts``, ``[T_b]`` per row, and ``token_ids``, ``[S_b]``; see
            :class:`~torchrl_llm.data.views.TokenSupport`.

    Returns:
        The support ``[N]``; ``None`` if no counted token was sampled with truncation.

    Raises:
        DataError: when the columns are misaligned, or a sampled token is not among its kept ids.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.objectives.loss_rows import RowKeys, read_token_rows
        >>> td = TensorDict(batch_size=[1])
        >>> td["tokens"] = ragged_rows({"full": [torch.tensor([5, 7])]})
        >>> kept = {"token_ids": [torch.tensor([7, 8])], "counts": [torch.tensor([0, 2])]}
        >>> td["support"] = ragged_rows(kept)
        >>> rows = read_token_rows(td, RowKeys(), "generic")
        >>> read_support(td, rows, "support")
        Support(token_ids=tensor([7, 8]), counts=tensor([2]))
    """
    node = (key,) if isinstance(key, str) else tuple(key)
    ids = optional_column(tensordict, (*node, "token_ids"))
    counts = optional_column(tensordict, (*node, "counts"))
    if ids is None or counts is None:
        return None
    totals = [int(column.sum()) for column in counts]
    for row, (own, total) in enumerate(zip(ids, totals, strict=True)):
        if own.shape[0] < total:
            raise DataError(f"row {row} counts {total} kept ids and stores {own.shape[0]}")
    flat = torch.cat([own[:total] for own, total in zip(ids, totals, strict=True)])
    mask = torch.cat(rows.select)
    support = Support(flat, rows.flat(tensordict, (*node, "counts"))).take(mask)
    if not bool(support.counts.any()):
        return None
    _check_drawn(support, torch.cat(rows.sequences)[mask], rows.row)
    return support


def _check_drawn(support: Support, targets_N: Tensor, row_N: Tensor) -> None:
    owner = torch.arange(targets_N.shape[0]).repeat_interleave(support.counts)
    drawn = support.counts == 0
    drawn[owner[support.token_ids == targets_N[owner]]] = True
    if not bool(drawn.all()):
        bad = row_N[~drawn].unique().tolist()
        raise DataError(
            f"tokens of rows {bad[:8]} are none of the ids that their sampling kept: tokens and "
            "kept ids do not belong together"
        )

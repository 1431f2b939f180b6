"""Whole rows to score: their tokens and the settings for scoring.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.ragged import spread_rows
from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.errors import DataError
from torchrl_llm.functional import restrict_logits
from torchrl_llm.modules.policies.row_blocks import tensor_rows
from torchrl_llm.modules.policies.row_readers import KeyNames, RowReader


class WholeRows(NamedTuple):
    """Rows to score.

    Attributes:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        select: ``B`` bool tensors ``[T_b]``, the tokens to score.
        temperature: temperature of each row, float32 ``[B]``, or one number for all rows.
        supports: ``B``, the ids that sampling kept, or ``None`` if nothing was recorded.
        places: bool ``[B, T]``, positions of the tokens in a dense column.
    """

    token_ids: list[Tensor]
    select: list[Tensor]
    temperature: float | Tensor
    supports: list[Support] | None
    places: Tensor

    def extras(self) -> ScoreExtras | None:
        """Return extras that make a scorer score tokens on the ids that sampling kept."""
        return support_extras(self.supports, self.select)

    def spread(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the values of each token as a dense ``[B, T, ...]``, 0 at padding."""
        return spread_rows(rows, self.places)

    def restricted(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Return logits ``[T_b, V]`` of each row, on the ids that sampling kept."""
        if self.supports is None:
            return list(logits)
        pairs = zip(logits, self.supports, strict=True)
        return [restrict_logits(row, *support.to(row.device)) for row, support in pairs]


def temperatures(blocks: Sequence[TensorDictBase], names: KeyNames) -> float | Tensor:
    """Return each row's sampling temperature, float32 ``[B]``; 1.0 if rows do not record it."""
    rows = tensor_rows(blocks, (names.tokens, "temperature"))
    return 1.0 if rows is None else torch.stack(rows).float()


def support_extras(
    supports: Sequence[Support] | None, select: Sequence[Tensor]
) -> ScoreExtras | None:
    """Return extras that make a scorer score tokens on the ids that sampling kept.

    Args:
        supports: ``B`` supports, each of all tokens of a row; ``None`` if nothing was recorded.
        select: ``B`` bool tensors, the tokens to score.
    """
    if supports is None:
        return None
    taken = [support.take(mask) for support, mask in zip(supports, select, strict=True)]
    return ScoreExtras(support=Support.join(taken))


def select_tokens(
    reader: RowReader,
    blocks: Sequence[TensorDictBase],
    ids: Sequence[Tensor],
    mask_key: NestedKey | None,
    known: Mapping[NestedKey, Sequence[Tensor]],
) -> list[Tensor]:
    """Select each row's tokens to score: all but the first, within a mask if one is given.

    Args:
        reader: reader of the rows, which removes their padding.
        blocks: rows in one-dimensional blocks.
        ids: ``B``, the ids of each row.
        mask_key: a bool column of the rows.
        known: masks computed for scoring, for rows without them.

    Raises:
        DataError: the mask does not exist, or is shorter than its row.
    """
    scorable = [torch.arange(row.shape[0]) > 0 for row in ids]
    if mask_key is None:
        return scorable
    masks = reader.unpadded(blocks, mask_key)
    masks = known.get(mask_key) if masks is None else masks
    if masks is None:
        raise DataError(f"the input has no mask {mask_key!r}")
    for row, (mask, valid) in enumerate(zip(masks, scorable, strict=True)):
        if mask.shape[0] < valid.shape[0]:
            raise DataError(
                f"mask {mask_key!r} of row {row} covers {mask.shape[0]} of its "
                f"{valid.shape[0]} tokens"
            )
    return [m[: v.shape[0]].bool() & v for m, v in zip(masks, scorable, strict=True)]

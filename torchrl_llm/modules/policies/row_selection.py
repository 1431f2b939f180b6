"""Which tokens of whole rows are scored, at which temperature, and on which kept ids.

Shape legend: ``B`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.errors import DataError
from torchrl_llm.modules.policies.row_blocks import tensor_rows
from torchrl_llm.modules.policies.row_readers import KeyNames


def temperatures(blocks: Sequence[TensorDictBase], names: KeyNames) -> float | Tensor:
    """What each row was sampled at, float32 ``[B]``, or 1.0 where the rows do not say."""
    rows = tensor_rows(blocks, (names.tokens, "temperature"))
    return 1.0 if rows is None else torch.stack(rows).float()


def support_extras(
    supports: Sequence[Support] | None, select: Sequence[Tensor]
) -> ScoreExtras | None:
    """What to ask a scorer for so that tokens are scored on the ids that sampling kept.

    Args:
        supports: ``B``, of all tokens of a row; ``None`` where nothing was recorded.
        select: ``B`` bool tensors, the tokens to score.
    """
    if supports is None:
        return None
    taken = [support.take(mask) for support, mask in zip(supports, select, strict=True)]
    return ScoreExtras(support=Support.join(taken))


def select_tokens(
    blocks: Sequence[TensorDictBase], ids: Sequence[Tensor], mask_key: NestedKey | None
) -> list[Tensor]:
    """Which tokens of each row to score: all but the first, those of a mask if one is given.

    Args:
        blocks: rows in one-dimensional blocks.
        ids: ``B``, the ids of each row.
        mask_key: a bool column of the rows.

    Raises:
        DataError: the rows have no such mask, or one that is shorter than its row.
    """
    scorable = [torch.arange(row.shape[0]) > 0 for row in ids]
    if mask_key is None:
        return scorable
    masks = tensor_rows(blocks, mask_key)
    if masks is None:
        raise DataError(f"the input has no mask {mask_key!r}")
    for row, (mask, valid) in enumerate(zip(masks, scorable, strict=True)):
        if mask.shape[0] < valid.shape[0]:
            raise DataError(
                f"mask {mask_key!r} of row {row} covers {mask.shape[0]} of its "
                f"{valid.shape[0]} tokens"
            )
    return [m[: v.shape[0]].bool() & v for m, v in zip(masks, scorable, strict=True)]

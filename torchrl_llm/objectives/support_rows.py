"""Reads the ids that truncated sampling kept, so that a loss scores on what could be sampled.

With top-k, top-p or min-p a token was drawn from a few ids, renormalised. On these ids the ratio of
an unchanged policy is one; over the whole vocabulary it is not. Policies write them with
``generate_kwargs={"record_support": True}``; the arithmetic is
:func:`~torchrl_llm.functional.support_log_probs`.

Shape legend: ``B`` rows, ``L`` tokens of all rows, ``N`` those that count, ``S`` kept ids.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import DataError
from torchrl_llm.objectives.flat_columns import optional_column
from torchrl_llm.objectives.loss_rows import TokenRows


def read_support(tensordict: Any, rows: TokenRows, key: NestedKey) -> Support | None:
    """The kept ids of the tokens that count.

    Args:
        tensordict: the rows, ragged or padded.
        rows: their tokens.
        key: node of the columns ``counts``, ``[T_b]`` a row, and ``token_ids``, ``[S_b]``; see
            :class:`~torchrl_llm.data.containers.TokenSupport`.

    Returns:
        The support ``[N]``; ``None`` where nothing that counts was cut.

    Raises:
        DataError: when the columns are misaligned, or a sampled token is none of its kept ids.

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

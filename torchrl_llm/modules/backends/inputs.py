"""Ragged sequences as the inputs of one forward: padded on the right, or packed into one row.

Shape legend: ``B`` sequences of ``T_b`` tokens, ``T`` the longest, ``S`` the sum of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm.errors import ConfigError

__all__ = ["ModelInputs", "packed_inputs", "padded_inputs"]


class ModelInputs(NamedTuple):
    """What a causal model reads.

    Attributes:
        input_ids: int64 ``[B, T]``, or ``[1, S]`` when packed.
        attention_mask: packed: ``[1, 1, S, S]``, bool or additive float; padded: ``None``, for a
            causal model does not look ahead at what stands behind a row.
        position_ids: int64 ``[1, S]`` when packed, else ``None``: 0, 1, 2, ... in each row.
        select_mask: bool, shaped as ``input_ids``.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    select_mask: Tensor


def padded_inputs(sequences: Sequence[Tensor], select: Sequence[Tensor]) -> ModelInputs:
    """Pad on the right; the pad id does not matter, nothing that is scored can see it.

    Example:
        >>> ids = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
        >>> padded_inputs(ids, [x > 5 for x in ids]).select_mask.int().tolist()
        [[0, 1, 1], [1, 1, 0]]
    """
    return ModelInputs(
        input_ids=torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True),
        attention_mask=None,
        position_ids=None,
        select_mask=torch.nn.utils.rnn.pad_sequence(list(select), batch_first=True),
    )


def packed_inputs(
    sequences: Sequence[Tensor],
    select: Sequence[Tensor],
    *,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> ModelInputs:
    """Put all sequences behind each other, with a block-causal mask that is written out.

    transformers finds the blocks in ``position_ids`` only under conditions that are easy to miss,
    and is silently wrong otherwise; so the mask is explicit.

    Args:
        sequences: ``B`` int64 tensors.
        select: ``B`` bool tensors.
        attn_implementation: ``"sdpa"`` (bool mask) or ``"eager"`` (additive mask).
        dtype: of the additive mask.

    Raises:
        ConfigError: for an attention implementation that takes no explicit mask.

    Example:
        >>> ids = [torch.tensor([5, 6]), torch.tensor([7])]
        >>> packed_inputs(ids, [x > 5 for x in ids]).attention_mask[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    if attn_implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"packing (pad_model_input=False) needs attn_implementation 'sdpa' or 'eager', which "
            f"take an explicit mask; got {attn_implementation!r}"
        )
    lengths = torch.tensor([s.shape[0] for s in sequences])
    block = torch.arange(len(sequences)).repeat_interleave(lengths)
    mask = (block[:, None] == block[None, :]).tril()[None, None]
    if attn_implementation == "eager":
        # Added to the scores: 0 keeps, the smallest number drops.
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    return ModelInputs(
        input_ids=torch.cat(list(sequences))[None],
        attention_mask=mask,
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
        select_mask=torch.cat(list(select))[None],
    )

"""Whole rows that are scored: which tokens, how, and the distributions of these for inspection.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules.policies.row_blocks import tensor_rows
from torchrl_llm.modules.policies.row_readers import KeyNames, RowReader


class WholeRows(NamedTuple):
    """Rows to score.

    Attributes:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        select: ``B`` bool tensors ``[T_b]``, the tokens to score.
        temperature: of each row, float32 ``[B]``, or of all.
        supports: ``B``, what sampling kept, or ``None`` where nothing was recorded.
        places: bool ``[B, T]``, where the tokens are in a dense column.
    """

    token_ids: list[Tensor]
    select: list[Tensor]
    temperature: float | Tensor
    supports: list[Support] | None
    places: Tensor


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
    reader: RowReader,
    blocks: Sequence[TensorDictBase],
    ids: Sequence[Tensor],
    mask_key: NestedKey | None,
    known: Mapping[NestedKey, Sequence[Tensor]],
) -> list[Tensor]:
    """Which tokens of each row to score: all but the first, those of a mask if one is given.

    Args:
        reader: knows the padding of the rows.
        blocks: rows in one-dimensional blocks.
        ids: ``B``, the ids of each row.
        mask_key: a bool column of the rows.
        known: masks that scoring finds out, for rows without them.

    Raises:
        DataError: there is no such mask, or one that is shorter than its row.
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


# What get_dist returns, in TorchRL's words.
_FORM = {
    "as_padded_tensor": (None, True),
    "as_nested_tensor": (None, False),
    "padding_value": (None, 0, 0.0),
    "padding_side": ("left", "right"),
    "layout": (None, torch.strided),
}


def check_form(form: Mapping[str, Any]) -> str:
    """Refuse another form of logits than dense ones padded with 0.0; returns the side of padding.

    Args:
        form: TorchRL's arguments of ``get_dist`` by name.

    Raises:
        ConfigError: for a value that asks for another form.
        TypeError: for an unknown name.
    """
    for name, value in form.items():
        if name not in _FORM:
            raise TypeError(f"get_dist() has no argument {name!r}; the form takes {sorted(_FORM)}")
        if value not in _FORM[name]:
            raise ConfigError(
                f"{name} must be one of {_FORM[name]}, got {value!r}: logits are dense [B, T, V], "
                "padded with 0.0; cut them by the mask for other forms"
            )
    return form.get("padding_side", "left")


class TokenDistribution(Categorical):
    """What each token was drawn from: index ``t`` is p(x_t | x_<t), not the model's next token.

    Args:
        logits: float ``[B, T, V]``.
        mask: bool ``[B, T]``; 0.0 outside of it.

    Example:
        >>> dist = TokenDistribution(torch.zeros(1, 2, 4), torch.tensor([[False, True]]))
        >>> dist.log_prob(torch.tensor([[3, 3]]))
        tensor([[ 0.0000, -1.3863]])
    """

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self.mask = mask

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs, float ``[B, T]`` in nats, of int64 ``[B, T]``, 0.0 outside the mask."""
        return torch.where(self.mask, super().log_prob(value), 0.0)

    def entropy(self) -> Tensor:
        """Entropies, float ``[B, T]`` in nats, 0.0 outside the mask."""
        return torch.where(self.mask, super().entropy(), 0.0)


class LogProbDistribution(Distribution):
    """Given log-probs of given tokens, where a distribution is expected.

    Args:
        log_probs: float ``[B, T]`` in nats.
        mask: bool ``[B, T]``; log-probs outside of it are 0.0. All by default.

    Example:
        >>> LogProbDistribution(torch.tensor([[0.0, -1.5]])).log_prob()
        tensor([[ 0.0000, -1.5000]])
    """

    arg_constraints: ClassVar[dict] = {}
    support = constraints.nonnegative_integer

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None) -> None:
        super().__init__(batch_shape=log_probs.shape, validate_args=False)
        self.mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        self.log_probs = log_probs

    def log_prob(self, value: Tensor | None = None) -> Tensor:
        """The log-probs, 0.0 outside the mask.

        Args:
            value: the tokens that they belong to, int64 ``[B, T]``; only its shape is checked.

        Raises:
            ValueError: for tokens of another shape.
        """
        if value is not None and value.shape != self.log_probs.shape:
            raise ValueError(
                f"these log-probs belong to tokens of shape {tuple(self.log_probs.shape)}, got "
                f"{tuple(value.shape)}"
            )
        return torch.where(self.mask, self.log_probs, 0.0)

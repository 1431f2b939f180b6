"""Numbers of the response's tokens as columns along ``tokens.full``.

Shape legend: ``T`` tokens of a row, ``R`` of its response.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.data.enums import Source
from torchrl_llm.data.wire import leaf
from torchrl_llm.errors import DataError


def along_tokens(row: TensorDict, values: Tensor) -> Tensor:
    """An advantage column of a row.

    Args:
        row: with ``("tokens", "full")`` where there is more than one value.
        values: one number, or one a token of the response (``R`` in any shape).

    Returns:
        ``[1, 1]``, or ``[T, 1]`` with 0 before the response.

    Raises:
        DataError: more values than the row has tokens.

    Example:
        >>> row = TensorDict(tokens={"full": torch.arange(3)})
        >>> along_tokens(row, torch.tensor([1.0, 2.0])).tolist()
        [[0.0], [1.0], [2.0]]
    """
    if values.numel() == 1:
        return values.reshape(1, 1).clone()
    full = leaf(row, ("tokens", "full"))
    if full is None or full.shape[0] < values.numel():
        length = None if full is None else full.shape[0]
        raise DataError(
            f"a row has {values.numel()} rewards, one a token of the response, and "
            f'("tokens", "full") of length {length}'
        )
    return torch.cat([values.new_zeros(full.shape[0] - values.numel()), values.reshape(-1)])[
        :, None
    ]


def sampled_in_response(row: TensorDict) -> Tensor:
    """Which tokens of the response were sampled, and not written by a tool or a template.

    Args:
        row: with ``("tokens", "response")``; without it one token is assumed.

    Returns:
        bool ``[R]``.

    Example:
        >>> sampled_in_response(TensorDict(tokens={"response": torch.arange(2)}))
        tensor([True, True])
    """
    response = leaf(row, ("tokens", "response"))
    size = 1 if response is None else response.shape[0]
    source = leaf(row, ("trace", "source"))
    if source is None:
        return torch.ones(size, dtype=torch.bool)
    return source[source.shape[0] - size :] == Source.SAMPLED

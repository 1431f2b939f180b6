"""Converts rollouts to rows: a batch from an environment becomes one tensordict per turn.

Environments work on batches: a dense root with lazy nodes for ragged values, and columns for
objects that are not tensors. Buffers and losses work on rows: plain tensordicts without batch
dimension, stacked lazily. Only this module converts the first form to the second.

Shape legend: ``B`` rows of the environment, ``T`` steps of the rollout.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.nodes import SHARED_BYTES, cell, leaf, new_node, set_copied, typed_node
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.views import LogProbs, Masks, Tokens, TokenSupport, TokenTrace

_REASON, _VALID = ("trace", "mask_reason"), ("next", "reward_valid")
# Read as columns of the whole batch; an instance in each row would cost more than the row itself.
_TOKEN_VIEWS = (Tokens, LogProbs, Masks, TokenTrace, TokenSupport)


def split_batch(batch: Any) -> list[TensorDict]:
    """Return the rows of one step, as plain tensordicts.

    Args:
        batch: tensordict or tensorclass of batch size ``[B]``, dense, lazy, or a dense root with
            lazy nodes.

    Returns:
        ``B`` tensordicts without batch dimension. Dense tensors are copied, large ones row by row,
        so that no row keeps its batch in memory. Ragged tensors and objects are referenced.
        Conversations and text keep their tensorclass; token-aligned nodes become plain tensordicts.

    Raises:
        ValueError: the number of batch dimensions is not one.

    Example:
        >>> rows = split_batch(TensorDict({"x": torch.arange(2)}, batch_size=[2]))
        >>> [row["x"].item() for row in rows]
        [0, 1]
    """
    if batch.batch_dims != 1:
        raise ValueError(f"expected one batch dimension, got batch size {tuple(batch.batch_size)}")
    cls, node = _unwrap(batch)
    return _split(node, cls, {})


def split_rollout(rollout: Any) -> LazyStackedTensorDict:
    """Return all rows of a rollout, trajectory by trajectory.

    Args:
        rollout: batch size ``[B]``, ``[B, T]``, or more batch dimensions with time as the last.

    Returns:
        A lazy stack of plain rows, ``[B * T]``. Row ``b * T + t`` is step ``t`` of batch row ``b``,
        in the order of ``rollout.reshape(-1)``.

    Example:
        >>> td = TensorDict({"x": torch.arange(4).view(2, 2)}, batch_size=[2, 2])
        >>> [row["x"].item() for row in split_rollout(td).unbind(0)]
        [0, 1, 2, 3]
    """
    return lazy_rows(_flatten(rollout))


def row_list(data: Any) -> list[TensorDict]:
    """Return the rows of any input of a replay buffer's transform.

    Args:
        data: a lazy stack of rows, whose rows are returned unchanged, or a rollout, which is split.
    """
    if isinstance(data, LazyStackedTensorDict) and data.batch_dims == 1:
        rows = data.tensordicts
        if all(type(row) is TensorDict for row in rows):
            return rows
    return _flatten(data)


def _flatten(rollout: Any) -> list[TensorDict]:
    if rollout.batch_dims == 1:
        return split_batch(rollout)
    if rollout.batch_dims == 0:
        raise ValueError("a rollout needs a batch dimension; got batch size ()")
    _, node = _unwrap(rollout)
    if isinstance(node, LazyStackedTensorDict):
        dim, parts = node.stack_dim, node.tensordicts
    else:
        dim, parts = node.batch_dims - 1, node.unbind(-1)
    split = [_flatten(part) for part in parts]
    # Rows of a part follow its remaining dimensions; put the stacked dimension in its place.
    inner = rollout.batch_size[dim + 1 :].numel()
    outer = rollout.batch_size[:dim].numel()
    return [rows[o * inner + i] for o in range(outer) for rows in split for i in range(inner)]


def unpadded(rows: list[TensorDict]) -> list[TensorDict]:
    """Remove padding from rows, as if the policy had no ``pad_output``.

    Args:
        rows: without batch dimension; ``("masks", "all_attention_mask")`` is false for padding.

    Returns:
        The same rows if none is padded. Padded rows are copied; in the copies, the columns of
        prompt, response and full sequence, ``advantage`` and per-token rewards have no padding.

    Example:
        >>> mask = torch.tensor([False, True, True, False])
        >>> ids = torch.tensor([0, 5, 7, 0])
        >>> row = TensorDict(
        ...     tokens={"prompt": ids[:2], "response": ids[2:], "full": ids},
        ...     masks={"all_attention_mask": mask},
        ... )
        >>> [row] = unpadded([row])
        >>> [row["tokens", name].tolist() for name in ("prompt", "response", "full")]
        [[5], [7], [5, 7]]
    """
    masks = [leaf(row, ("masks", "all_attention_mask")) for row in rows]
    known = [mask for mask in masks if mask is not None]
    if not known or bool(torch.cat(known).all()):
        return rows
    return [
        row if mask is None or bool(mask.all()) else _unpadded(row, mask.bool())
        for row, mask in zip(rows, masks, strict=True)
    ]


def _unpadded(row: TensorDict, mask: Tensor) -> TensorDict:
    made, response = new_node(row._tensordict.copy()), leaf(row, ("tokens", "response"))
    start = mask.shape[0] - (0 if response is None else response.shape[0])
    parts = {"prompt": mask[:start], "response": mask[start:]}
    tensors = [(key, value) for key, value in row.items(True, True) if isinstance(value, Tensor)]
    for key, value in tensors:
        path, kept = (key,) if isinstance(key, str) else key, None
        if path == ("support", "token_ids"):
            kept = torch.arange(value.shape[0]) < leaf(row, ("support", "counts")).sum()
        elif path[-1] == "full" or path[0] not in ("next", *row.keys(False, True)):
            kept = parts.get(path[-1], mask)
        elif path[0] == "next" and path[1].startswith("reward") and value.numel() > 1:
            kept = parts["response"]
        elif path == ("advantage",):
            kept = mask
        if kept is not None and value.shape[:1] == kept.shape:
            set_copied(made, path, value[kept])
    return made


def ends_trajectory(row: TensorDict) -> bool:
    """Return whether this turn ends a trajectory; a row without this flag is a trajectory.

    Args:
        row: a turn, without batch dimension.

    Example:
        >>> ends_trajectory(TensorDict(next={"done": torch.tensor([False])}))
        False
    """
    done = leaf(row, ("next", "done"))
    return done is None or bool(done.any())


def mask_trained(
    row: TensorDict, reason: MaskReason, *, start: int = 0, where: Tensor | None = None
) -> None:
    """Mask the tokens of a row that would be trained, with a reason.

    Args:
        row: row without batch dimension. Its mask reasons are replaced, not changed in place. A row
            without mask reasons does not change.
        reason: the new reason; tokens that are already masked keep their reason.
        start: index of the first token that may get it.
        where: bool ``[T]``, the tokens that may get it; all if not given.
    """
    reasons, source = leaf(row, _REASON), leaf(row, ("trace", "source"))
    if reasons is not None and source is not None:
        wanted = (source == Source.SAMPLED) & (reasons == MaskReason.TRAINED)
        wanted[:start] = False
        wanted = wanted if where is None else wanted & where
        set_copied(row, _REASON, reasons.masked_fill(wanted, int(reason)))


def invalidate_reward(row: TensorDict) -> None:
    """Mark the reward of a row as invalid, so that no group's baseline includes it.

    Args:
        row: without batch dimension; its flag is replaced, not changed.
    """
    valid = leaf(row, _VALID)
    flag = torch.zeros((), dtype=torch.bool) if valid is None else torch.zeros_like(valid)
    set_copied(row, _VALID, flag)


def sampled_tokens(row: TensorDictBase) -> int:
    """Return how many tokens the policy sampled in the turns that this row represents.

    These are the sampled tokens of the response. Earlier turns of the same conversation are before
    the response, and belong to their own rows, unless the rows were joined.

    Args:
        row: a row without batch dimension; one without tokens counts 0.
    """
    response = leaf(row, ("tokens", "response"))
    if response is None:
        return 0
    return count_sampled(response, leaf(row, ("trace", "source")))


def count_sampled(response: Tensor, source: Tensor | None) -> int:
    """Return how many tokens of a response were sampled.

    Args:
        response: ``[R]``.
        source: codes of :class:`~torchrl_llm.data.enums.Source` of the whole row, which ends with
            the response. Without codes, the whole response counts as sampled.
    """
    if source is None or not response.numel():
        return response.numel()
    return int((source[-response.shape[0] :] == Source.SAMPLED).sum())


def _unwrap(value: Any) -> tuple[type | None, Any]:
    if not is_tensorclass(value) or isinstance(value, (NonTensorData, NonTensorStack)):
        return None, value
    node = value._tensordict
    lazy = isinstance(node, LazyStackedTensorDict)
    return (None if lazy or isinstance(value, _TOKEN_VIEWS) else type(value)), node


def _split(node: Any, cls: type | None, cells: dict[int, NonTensorData]) -> list[Any]:
    if isinstance(node, LazyStackedTensorDict):
        rows = node.tensordicts if node.stack_dim == 0 else node.unbind(0)
        # Rows of a stack have the same structure; nodes with only tensors need no recursion.
        first = rows[0]
        if type(first) is TensorDict and all(
            isinstance(value, Tensor) for value in first._tensordict.values()
        ):
            return [new_node(row._tensordict.copy()) for row in rows]
        return [_plain_row(row) for row in rows]
    count = node.batch_size[0]
    names = tuple(node._tensordict)
    columns = [_parts(value, count, cells) for value in node._tensordict.values()]
    values = zip(*columns, strict=True) if columns else [()] * count
    rows = [new_node(dict(zip(names, row, strict=True))) for row in values]
    return rows if cls is None else [typed_node(cls, row) for row in rows]


def _parts(value: Any, count: int, cells: dict[int, NonTensorData]) -> Any:
    if isinstance(value, Tensor):
        # The environment may continue to write into its tensors, so rows never share them.
        small = value.nbytes <= SHARED_BYTES
        return value.clone().unbind(0) if small else torch.unbind_copy(value, 0)
    if isinstance(value, NonTensorStack):
        return [
            item if isinstance(item, TensorDictBase) else _shared_cell(item, cells)
            for item in value.tolist()
        ]
    if isinstance(value, NonTensorData):
        return [_shared_cell(value.data, cells)] * count
    cls, node = _unwrap(value)
    if isinstance(node, (TensorDict, LazyStackedTensorDict)):
        return _split(node, cls, cells)
    return value.unbind(0)


def _shared_cell(item: Any, cells: dict[int, NonTensorData]) -> NonTensorData:
    # The same object occurs many times (a query in its repeats and in ``next``, a conversation as
    # ``full`` and as the next prompt), and a cell costs six allocations.
    found = cells.get(id(item))
    if found is None:
        found = cells[id(item)] = cell(item)
    return found


def _plain_row(row: Any) -> Any:
    """Return a row of a lazy stack, with the same leaves but new nodes for new keys."""
    _, node = _unwrap(row)
    if not isinstance(node, TensorDict):
        return row
    source = {}
    for name, value in node._tensordict.items():
        if isinstance(value, (Tensor, NonTensorData)):
            source[name] = value
            continue
        cls, inner = _unwrap(value)
        if isinstance(inner, TensorDict) and not inner.batch_dims:
            inner = _plain_row(inner)
            source[name] = inner if cls is None else typed_node(cls, inner)
        else:
            source[name] = value
    return TensorDict._new_unsafe(source=source, batch_size=node.batch_size)

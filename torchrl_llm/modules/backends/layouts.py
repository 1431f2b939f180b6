"""Four layouts of ragged rows for the body of a model, and the choice of the cheapest.

- ``padded``: one rectangle.
- ``bucketed``: rows of similar length form rectangles; one call of the model for each.
- ``packed``: smaller rectangles, concatenated into one stream for one call of the model. Only
  attention distinguishes the rows (:mod:`torchrl_llm.modules.backends.attention`).
- ``shared``: packed, but a prompt that several rows share occurs only once.

Each layout is a stream of blocks. The layouts differ in how the stream is cut and how the model is
called. No layout runs tokens that no scored token depends on. These are rows without a scored
token, and the tokens of a row from its last scored token on (the state before that token predicts
it).

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``L`` tokens of all rows, ``S`` tokens of the
stream, ``N`` selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm.functional import AttentionBlock, Prefix, RowCosts, packing, row_index
from torchrl_llm.modules.backends.head import causal_model

LAYOUTS = ("padded", "bucketed", "packed", "shared")

# Seconds, for forward and backward together, of: a floating point operation; a call, per layer; a
# call, per weight; attention of one more block in a layer. The CPU numbers were measured with
# float32 on one thread. The GPU numbers are estimates for bfloat16 on an H100: 400 TFLOP/s, 80
# launches of 6 us per layer, 12 bytes per weight and its gradient at 3 TB/s, 16 launches per block.
# Only the ratios matter, and only for speed.
_SECONDS = {"cpu": (2e-11, 2e-3, 1.5e-9, 1.6e-4), "cuda": (2.5e-15, 5e-4, 4e-12, 1e-4)}


class Rows:
    """Rows of token ids, with a mask of the tokens to score.

    Args:
        sequences: ``B`` int64 tensors ``[T_b]``.
        select: ``B`` bool tensors ``[T_b]``.

    Attributes:
        ids: int64 ``[L]``, all rows end to end.
        starts: start of each row in ``ids``.
        row: int64 ``[N]``, the row of each selected token.
        source: int64 ``[N]``, the position of the token that predicts each selected token, in its
            row.
        targets: int64 ``[N]``, the selected ids.
        prompts: number of tokens before the first selected token, per row; 0 if no token is
            selected.
        lengths: number of tokens to run, per row.

    Raises:
        ValueError: when the first token of a row is selected.
    """

    def __init__(self, sequences: Sequence[Tensor], select: Sequence[Tensor]) -> None:
        sizes = torch.tensor([ids.shape[0] for ids in sequences])
        self.ids = torch.cat(list(sequences)).cpu()
        self.starts = sizes.cumsum(0) - sizes
        index = torch.cat(list(select)).cpu().nonzero()[:, 0]
        self.row = row_index(sizes)[index]
        self.source = index - self.starts[self.row] - 1
        self.targets = self.ids[index]
        if bool((self.source < 0).any()):
            raise ValueError("the first token of a row has no prefix and cannot be scored")
        counts = torch.bincount(self.row, minlength=len(sizes))
        ends = counts.cumsum(0)
        chosen = counts > 0
        first, last = torch.zeros_like(sizes), torch.zeros_like(sizes)
        first[chosen] = self.source[(ends - counts)[chosen]] + 1
        last[chosen] = self.source[ends[chosen] - 1] + 1
        if not len(index):
            # The model must be called even without selected tokens, to keep sharded ranks in step.
            last[:1] = 1
        self.prompts: list[int] = first.tolist()
        self.lengths: list[int] = last.tolist()

    @cached_property
    def families(self) -> dict[bytes, list[int]]:
        """Return the rows with a selected token, grouped by the ids of their prompt."""
        ids, starts = self.ids.numpy(), self.starts.tolist()
        found: dict[bytes, list[int]] = {}
        for row, (start, size) in enumerate(zip(starts, self.prompts, strict=True)):
            if size:
                found.setdefault(ids[start : start + size].tobytes(), []).append(row)
        return found


class RowStream(NamedTuple):
    """Rows laid out for a model.

    Attributes:
        input_ids: int64 ``[S]``, 0 at padding.
        position_ids: int64 ``[S]``, position of each token in its row.
        index: int64 ``[N]``, positions in the stream of the states that predict the selected
            tokens.
        targets: int64 ``[N]``, the selected ids.
        blocks: the blocks of the stream.
        one_call: whether the model gets the whole stream in one call, with a mask of its rows. If
            not, each block is a separate call.
    """

    input_ids: Tensor
    position_ids: Tensor
    index: Tensor
    targets: Tensor
    blocks: tuple[AttentionBlock, ...]
    one_call: bool

    def to(self, device: torch.device) -> RowStream:
        """Return a copy on the given device."""
        return RowStream(
            *(part.to(device, non_blocking=True) for part in self[:4]), self.blocks, self.one_call
        )


class _Plan(NamedTuple):
    """Blocks, and the rows of each block as ``(row, first token, number of tokens)``."""

    blocks: list[AttentionBlock]
    members: list[list[tuple[int, int, int]]]


def lay_out(
    rows: Rows, allowed: Sequence[str], costs: RowCosts, one_kernel: Sequence[str] = ()
) -> RowStream:
    """Lay rows out for a model in the cheapest way.

    Args:
        rows: the rows.
        allowed: layouts to choose from.
        costs: costs of the model, for the choice and the cuts.
        one_kernel: layouts with one attention kernel for all blocks, so that rows need no padding
            to a common width.

    Example:
        >>> rows = Rows([torch.tensor([5, 6, 7]), torch.tensor([5, 8])],
        ...     [torch.tensor([False, False, True]), torch.tensor([False, True])])
        >>> stream = lay_out(rows, ["padded"], RowCosts(1.0, 0.0, 1.0, 1.0))
        >>> stream.input_ids.tolist(), stream.index.tolist(), stream.targets.tolist()
        ([5, 6, 5, 0], [1, 2], [7, 8])
    """
    own = {name: costs._replace(block=0.0) if name in one_kernel else costs for name in allowed}
    plans = {name: _PLANS[name](rows, own[name]) for name in allowed}

    def price(name: str) -> float:
        blocks = plans[name].blocks
        calls = len(blocks) if name == "bucketed" else 1
        return packing.blocks_cost(blocks, own[name], calls=calls)

    best = min(plans, key=price)
    return _stream(rows, plans[best], best)


class ModelSize(NamedTuple):
    """Sizes of a model that determine its costs.

    Attributes:
        weights: number of weights of the body, without its embeddings.
        layers: number of layers.
        width: channels of a hidden state.
    """

    weights: int
    layers: int
    width: int

    @classmethod
    def of(cls, model: nn.Module, body: nn.Module) -> ModelSize:
        """Read the sizes of a causal model, in PEFT or not, and of its part that runs."""
        config = causal_model(model).config.get_text_config(decoder=True)
        tables = [m for m in body.modules() if isinstance(m, nn.Embedding)]
        embedded = sum(p.numel() for table in tables for p in table.parameters())
        weights = sum(p.numel() for p in body.parameters()) - embedded
        return cls(weights, config.num_hidden_layers, config.hidden_size)

    def costs(self, device: torch.device) -> RowCosts:
        """Return the estimated costs of a forward and backward, in seconds.

        A token costs six floating point operations per weight. Attention costs twelve operations
        per layer, channel and pair. A call costs some time per layer, and reads and adds the
        gradient of every weight.

        Args:
            device: of the model.
        """
        operation, layer, weight, block = _SECONDS.get(device.type, _SECONDS["cuda"])
        if device.type == "cpu":
            operation /= torch.get_num_threads()
        return RowCosts(
            token=6 * self.weights * operation,
            pair=12 * self.layers * self.width * operation,
            call=self.layers * layer + self.weights * weight,
            block=self.layers * block,
        )


def _in_rectangles(rows: Rows, cut: float | None, costs: RowCosts) -> _Plan:
    """Lay all rows out in one rectangle, or in several if each further one costs ``cut``."""
    running = _running(rows)
    return _rectangles(rows, [running] if cut is None else _buckets(rows, running, costs, cut=cut))


def _shared(rows: Rows, costs: RowCosts) -> _Plan:
    families = [members for members in rows.families.values() if len(members) > 1]
    if not families:
        return _in_rectangles(rows, costs.block, costs)
    shared = {row for members in families for row in members}
    alone = [row for row in _running(rows) if row not in shared]
    plan = _rectangles(rows, _buckets(rows, alone, costs, cut=costs.block) if alone else [])
    sizes = [rows.prompts[members[0]] for members in families]
    cuts = packing.length_buckets(sizes, token=costs.token, pair=costs.pair, cut=costs.block)
    for bucket in cuts:
        before = len(plan.blocks)
        plan.blocks.append(AttentionBlock(len(bucket), max(sizes[k] for k in bucket)))
        plan.members.append([(families[k][0], 0, sizes[k]) for k in bucket])
        owners = {row: place for place, k in enumerate(bucket) for row in families[k]}
        # A response of one token is predicted by the prompt alone.
        rest = {
            row: rows.lengths[row] - rows.prompts[row]
            for row in owners
            if rows.lengths[row] > rows.prompts[row]
        }
        for part in _buckets(rows, list(rest), costs, cut=costs.block, lengths=rest):
            prefix = Prefix(
                before, tuple(owners[row] for row in part), tuple(rows.prompts[row] for row in part)
            )
            width = max(rest[row] for row in part)
            plan.blocks.append(AttentionBlock(len(part), width, prefix))
            plan.members.append([(row, rows.prompts[row], rest[row]) for row in part])
    return plan


_PLANS = {
    "padded": lambda rows, costs: _in_rectangles(rows, None, costs),
    "bucketed": lambda rows, costs: _in_rectangles(rows, costs.call, costs),
    "packed": lambda rows, costs: _in_rectangles(rows, costs.block, costs),
    "shared": _shared,
}


def _running(rows: Rows) -> list[int]:
    return [row for row, length in enumerate(rows.lengths) if length]


def _buckets(
    rows: Rows,
    chosen: list[int],
    costs: RowCosts,
    *,
    cut: float,
    lengths: dict[int, int] | None = None,
) -> list[list[int]]:
    lengths = rows.lengths if lengths is None else lengths
    sizes = [lengths[row] for row in chosen]
    buckets = packing.length_buckets(sizes, token=costs.token, pair=costs.pair, cut=cut)
    return [[chosen[k] for k in bucket] for bucket in buckets]


def _rectangles(rows: Rows, buckets: list[list[int]]) -> _Plan:
    plan = _Plan([], [])
    for bucket in buckets:
        plan.blocks.append(AttentionBlock(len(bucket), max(rows.lengths[row] for row in bucket)))
        plan.members.append([(row, 0, rows.lengths[row]) for row in bucket])
    return plan


def _stream(rows: Rows, plan: _Plan, layout: str) -> RowStream:
    count = len(rows.lengths)
    # Token t of a row is at head + t before its split, and at tail + t - split after it.
    head, split, tail = [0] * count, [0] * count, [0] * count
    parts, total = [], 0
    for block, members in zip(plan.blocks, plan.members, strict=True):
        for row, begin, size in members:
            parts.append((row, begin, size, total))
            if begin:
                tail[row] = total
            else:
                head[row], split[row] = total, size
            total += block.width
    if layout == "shared":
        for first, *others in rows.families.values():
            for row in others:
                head[row], split[row] = head[first], rows.prompts[first]
    row, begin, size, place = torch.tensor(parts).unbind(1)
    # Source and destination of every token that runs.
    part = row_index(size)
    step = torch.arange(part.shape[0]) - (size.cumsum(0) - size)[part]
    goal, position = place[part] + step, begin[part] + step
    input_ids = torch.zeros(total, dtype=torch.int64)
    position_ids = torch.zeros(total, dtype=torch.int64)
    input_ids[goal] = rows.ids[rows.starts[row[part]] + position]
    position_ids[goal] = position
    head, split, tail = (x[rows.row] for x in torch.tensor([head, split, tail]))
    index = rows.source + torch.where(rows.source < split, head, tail - split)
    return RowStream(
        input_ids,
        position_ids,
        index,
        rows.targets,
        tuple(plan.blocks),
        layout in ("packed", "shared"),
    )

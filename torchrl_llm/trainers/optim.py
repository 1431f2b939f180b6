"""One update: micro-batches under a token budget, counts of all ranks, and an optimizer step.

A batch of rows is cut into pieces that fit into memory; each piece is one forward and backward.
In padded pieces, rows of similar length go together to reduce padding, and padding counts towards
the budget. In other layouts (:mod:`torchrl_llm.modules.backends.layouts`), only tokens count, and
the rows of a group go together, because a scorer runs their prompt once. The loss of every piece is
normalised by the whole batch (``loss.normalizer``), so the gradients of the pieces add up to the
gradient of the batch for any cut.

A batch may also be spread over ranks (:mod:`torchrl_llm.trainers.ranks`). Each rank computes its
rows' loss with the counts of all ranks (:func:`~torchrl_llm.trainers.ranks.sum_counts`); then the
losses and gradients of the ranks add up to the loss and gradient of the batch, as for
micro-batches. With whole weights, gradients are summed once, after the last micro-batch. FSDP2
averages the gradients of shards in each backward, so the loss is multiplied by the number of ranks.
Each forward is then a collective call: a rank with fewer micro-batches than another, or without
rows, continues with rows whose loss is multiplied by 0.

Next: :mod:`torchrl_llm.trainers.optimizers` makes optimizers by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.row_transform import pieces_under_budget, unparted_rows
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss
from torchrl_llm.trainers.metrics import LossMeter
from torchrl_llm.trainers.optimizers import in_training
from torchrl_llm.trainers.ranks import ALONE, Counts, Ranks, add_gradients, sum_counts

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Name of a schedule to its factor, given the share of the run after the warm-up, 0 to 1."""


def schedule_factor(step: int, *, name: str, warmup_steps: int, total_steps: int) -> float:
    """Factor on the learning rate at an optimizer step.

    Args:
        step: optimizer steps already taken.
        name: one of :data:`SCHEDULES`: ``constant``, ``linear`` (to zero at ``total_steps``) or
            ``cosine`` (half a period).
        warmup_steps: steps of a linear rise from ``1 / warmup_steps`` to 1.
        total_steps: steps of the whole run.

    Example:
        >>> [schedule_factor(s, name="linear", warmup_steps=2, total_steps=6) for s in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    check_schedule(name)
    return SCHEDULES[name](min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def check_schedule(name: str) -> None:
    """Reject an unknown name of a schedule.

    Args:
        name: one of :data:`SCHEDULES`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SCHEDULES:
        *most, last = SCHEDULES
        known = f"{', '.join(most)} or {last}"
        raise ConfigError(f"optimizer.scheduler must be {known}, got {name!r}")


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, name: str, warmup_steps: float = 0, total_steps: int
) -> LambdaLR:
    """A schedule of the learning rate over the optimizer steps of a run.

    Args:
        optimizer: the optimizer whose learning rate is scaled.
        name: see ``schedule_factor``.
        warmup_steps: see ``schedule_factor``; a number below 1 is a share of ``total_steps``.
        total_steps: see ``schedule_factor``.
    """
    if warmup_steps < 1:
        warmup_steps = round(warmup_steps * total_steps)
    settings = {"name": name, "warmup_steps": warmup_steps, "total_steps": total_steps}
    return LambdaLR(optimizer, lambda step: schedule_factor(step, **settings))


def clipped_step(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR | None = None,
    *,
    max_norm: float | None = None,
) -> Tensor:
    """Clip the gradients, step optimizer and schedule, clear the gradients.

    Args:
        optimizer: holds parameters with gradients.
        scheduler: stepped after the optimizer.
        max_norm: bound on the norm of all gradients together; ``None`` only measures it.

    Returns:
        Norm of the gradients before clipping, a scalar. If it is not finite, no parameter is
        changed: one broken batch does not end a long run, and the norm in the metrics shows it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    bound = math.inf if max_norm is None else max_norm
    norm = nn.utils.clip_grad_norm_(parameters, bound)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if torch.isfinite(norm):
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@checked
def plan_micro_batches(lengths: Sequence[int], budget: Annotated[int, Ge(1)]) -> list[list[int]]:
    """Cut rows into pieces of at most ``budget`` padded tokens (rows x longest row).

    Args:
        lengths: tokens in each row.
        budget: padded tokens that a piece may hold. A longer row goes alone, because a row cannot
            be cut.

    Returns:
        Row indices of each piece; each row appears exactly once. The piece with the longest rows
        comes first, so that a batch that does not fit into memory fails at once.

    Raises:
        ConfigError: the budget is not positive.

    Example:
        >>> plan_micro_batches([2, 9, 3, 8], 18)
        [[1, 3], [2, 0]]
    """
    return pieces_under_budget(_longest_first(lengths), lengths, budget)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


@checked
def plan_packed_batches(
    lengths: Sequence[int], budget: Annotated[int, Ge(1)], groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Cut rows into pieces of at most ``budget`` tokens, with the rows of a group together.

    Args:
        lengths: tokens in each row.
        budget: tokens that a piece may hold. A longer row goes alone.
        groups: group of each row; by default each row is its own group. A group is only cut where a
            piece reaches the budget.

    Returns:
        Row indices of each piece, the group with the longest row first, and its rows by length, the
        longest first; each row appears exactly once.

    Raises:
        ConfigError: the budget is not positive.

    Example:
        >>> plan_packed_batches([4, 9, 3, 8], 15, groups=[0, 1, 1, 0])
        [[1, 2], [3, 0]]
    """
    families: dict[Hashable, list[int]] = {}
    for row in _longest_first(lengths):
        families.setdefault(row if groups is None else groups[row], []).append(row)
    pieces: list[list[int]] = []
    held = 0
    for row in chain.from_iterable(families.values()):
        held += lengths[row]
        if not pieces or held > budget:
            pieces.append([])
            held = lengths[row]
        pieces[-1].append(row)
    return pieces


def micro_batches(
    rows: LazyStackedTensorDict,
    *,
    budget: int | None = None,
    layout: str | None = "padded",
    key: NestedKey = ("tokens", "full"),
    group_key: NestedKey = "group_id",
    pair_key: NestedKey = "pair_id",
) -> list[LazyStackedTensorDict]:
    """Cut a batch of rows into micro-batches under a budget of tokens.

    Args:
        rows: 1-d lazy stack of rows.
        budget: tokens that a micro-batch may hold; ``None`` for no cut.
        layout: layout of the scorer (``policy.layout``). With ``"padded"``, or ``None`` for a
            scorer without a choice, padding counts, too.
        key: key of a row's token ids.
        group_key: key of its group, if the rows have it; read for the other layouts.
        pair_key: key of its pair, if the rows have it; rows of a pair are never separated.

    Returns:
        The pieces, each a lazy stack over the same rows (nothing is copied).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> rows = lazy_rows([TensorDict({"ids": torch.zeros(n)}) for n in (2, 9, 3, 8)])
        >>> [len(piece) for piece in micro_batches(rows, budget=18, key="ids")]
        [2, 2]
        >>> [len(piece) for piece in micro_batches(rows, budget=20, layout="packed", key="ids")]
        [3, 1]
    """
    if budget is None:
        return [rows] if len(rows) else []
    members = rows.unbind(0)
    lengths = [ids.shape[0] for ids in read_rows(rows, key)]
    units = unparted_rows(rows, pair_key)
    if layout in (None, "padded"):
        most = max(map(len, units), default=1)
        longest = [max(lengths[row] for row in unit) for unit in units]
        pieces = plan_micro_batches(longest, max(1, budget // most))
    else:
        groups = read_rows(rows, group_key, None)
        ids = None if groups is None else [int(groups[unit[0]]) for unit in units]
        pieces = plan_packed_batches([sum(lengths[r] for r in u) for u in units], budget, ids)
    return [lazy_rows([members[row] for unit in piece for row in units[unit]]) for piece in pieces]


def optimize(
    loss: TokenLoss,
    batches: Iterable[LazyStackedTensorDict | None],
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR | None = None,
    *,
    max_norm: float | None = None,
    budget: int | None = None,
    layout: str | None = "padded",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """One update per batch: forward and backward of its micro-batches, then a clipped step.

    The loss of each micro-batch is divided by the counts of its whole batch, so gradients and
    metrics add up to the gradient and metrics of the batch for any cut.

    Args:
        loss: a loss over rows of tokens.
        batches: the rows of each update: the mini-batches of all epochs.
        optimizer: holds the parameters that are trained; its gradients are cleared at each step.
        scheduler: stepped after the optimizer.
        max_norm: bound on the norm of all gradients together; ``None`` only measures it.
        budget: tokens that a micro-batch may hold, see :func:`micro_batches`.
        layout: how the scorer lays rows out, see :func:`micro_batches`.
        context: makes the context of each forward, such as an autocast.
        ranks: the processes that make each update together, each with its own batches. All have to
            call this function; a process with fewer batches than another takes part without rows.

    Returns:
        Means over the updates, named ``train/<name>``: the loss's metrics, ``train/grad_norm``
        and, with a scheduler, ``train/lr``; empty without a batch. They cover all ranks.

    Raises:
        DataError: the loss rejects the rows, or is NaN or infinite.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> from torchrl_llm.objectives import SFTLoss
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> model = Qwen2ForCausalLM(config)
        >>> rows = lazy_rows([TensorDict(
        ...     tokens={"full": torch.arange(n)}, masks={"all_assistant_mask": torch.arange(n) > 0})
        ...     for n in (3, 5)])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> sorted(optimize(SFTLoss(CausalScorer(model)), [rows], optimizer, budget=5))
        ['train/grad_norm', 'train/loss_sft']
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    scale = ranks.world if sharded else 1
    cut = partial(micro_batches, budget=budget, layout=layout)
    if sharded and layout == "bucketed":
        cut = partial(_bucketed, budget=budget)
    meter = LossMeter()
    with in_training(optimizer):
        for pieces, normalizer, most in _in_step(loss, batches, cut, ranks):
            fillers = []
            if sharded and ranks.world > 1:
                fillers = _fillers(pieces, most - len(pieces), ranks)
            own: LLMLossOutput | None = None
            for piece in pieces:
                with context():
                    output = loss(piece, normalizer=normalizer)
                (output.total_loss() * scale).backward()
                own = output.detach() if own is None else own + output.detach()
            for filler in fillers:
                with context():
                    output = loss(filler, normalizer=normalizer)
                (output.total_loss() * 0.0).backward()
            if not sharded and ranks.world > 1:
                add_gradients(parameters, ranks)
            for part in ranks.gather(own if ranks.world == 1 or own is None else own.cpu()):
                if part is not None:
                    meter.add(part)
            norm = clipped_step(optimizer, scheduler, max_norm=max_norm)
            if own is not None and not norm.isfinite() and not own.total_loss().isfinite().all():
                raise DataError(
                    "loss and gradients are NaN or infinite: the weights of the policy, or of "
                    "its value head, have diverged, or a sampled token has probability zero. No "
                    "weight was changed"
                )
            rate = {} if scheduler is None else {"lr": scheduler.get_last_lr()[0]}
            meter.close(grad_norm=norm, **rate)
    return meter.metrics()


def _bucketed(rows: LazyStackedTensorDict, budget: int | None) -> list[LazyStackedTensorDict]:
    """Micro-batches of rows of similar length: rows over half of the longest go together."""
    pieces: list[list[TensorDict]] = []
    for piece in micro_batches(rows, budget=budget, layout="bucketed"):
        members, longest, first = piece.unbind(0), 0, len(pieces)
        lengths = [ids.shape[0] for ids in read_rows(piece, ("tokens", "full"))]
        units = [(max(lengths[row] for row in unit), unit) for unit in unparted_rows(piece)]
        for length, unit in sorted(units, key=lambda pair: -pair[0]):
            if len(pieces) == first or 2 * length <= longest:
                pieces.append([])
                longest = length
            pieces[-1] += [members[row] for row in unit]
    return [lazy_rows(piece) for piece in pieces]


def _in_step(
    loss: TokenLoss,
    batches: Iterable[LazyStackedTensorDict | None],
    cut: Callable[[LazyStackedTensorDict], list[LazyStackedTensorDict]],
    ranks: Ranks,
) -> Iterator[tuple[list[LazyStackedTensorDict], Counts | None, int]]:
    """Yield each batch's micro-batches, the counts of all ranks, and the most pieces of a rank.

    A rank without further batches yields no micro-batches until all ranks are done.
    """
    if ranks.world == 1:
        for batch in batches:
            pieces = cut(batch)
            # A batch in one piece is counted by the loss itself.
            yield pieces, loss.normalizer(batch) if len(pieces) > 1 else None, len(pieces)
        return
    own = iter(batches)
    while True:
        batch = next(own, None)
        pieces = [] if batch is None else cut(batch)
        counts = None if batch is None else loss.normalizer(batch)
        everyone, numbers = zip(*ranks.gather((counts, len(pieces))), strict=True)
        normalizer = sum_counts(everyone)
        if normalizer is None:
            return
        yield pieces, normalizer, max(numbers)


def _fillers(
    pieces: list[LazyStackedTensorDict], number: int, ranks: Ranks
) -> list[LazyStackedTensorDict]:
    """Fillers for a rank while other ranks have more micro-batches: a short row, repeated.

    It takes the same path as every row, so that the same weights are requested. A rank without rows
    gets the row of a different rank. A row of a pair comes with its partner.
    """
    rows = None
    if pieces:
        # The last piece has the shortest rows.
        members = pieces[-1].unbind(0)
        sizes = [row["tokens", "full"].shape[0] for row in members]
        unit = min(unparted_rows(pieces[-1]), key=lambda unit: max(sizes[row] for row in unit))
        rows = [members[row] for row in unit]
    if ranks.any(rows is None):
        sent = ranks.gather(None if rows is None else pack_rows(rows))
        rows = next(packed for packed in sent if packed is not None).unpack()
    return [lazy_rows(rows)] * number

"""Computes log-probs of tokens from hidden states, one tile of logits at a time.

A language-model head turns ``N`` hidden states into ``N x V`` logits, but a loss needs only one
number per token. With ``V`` = 151,936, most of the memory of a training step holds these logits and
the copies that autograd keeps. This module computes one tile of the vocabulary after the other, and
updates a log-sum-exp. The backward computes the tiles again. A tensor ``[N, V]`` is stored only if
it is small: if all tiles fit into 256 MiB, they are kept for the backward.

If the tiles do not fit and the weight needs a gradient, the gradient takes ``V x D`` numbers. The
forward already allocates the memory of this gradient and stores as many tiles there as fit (a share
of ``D / N``). The backward need not compute these tiles again, and the peak memory stays the same.
But the graph holds this memory until the backward, so call ``backward`` for each micro-batch
separately.

Tiles are slices of the *vocabulary*, not of the tokens: each slice of the weight is read once, its
gradient is written once, and the running sums stay in the cache.

On a GPU, the kernels of :mod:`torchrl_llm.functional.head_kernels` read each tile once, and no tile
is kept. They need products in bfloat16 or float16, and a head without bias and soft-cap.

``torch.compile`` sees one operator for the forward and one for the backward, and does not trace
into them. There are two reasons. Tiles share memory, so their operations must not be reordered
(torch 2.11 computes wrong gradients when it traces them). And a loop over tiles would become a very
long graph. Under ``torch.compile``, no tiles are kept.

:mod:`torchrl_llm.modules.backends.head` finds the head of a given model and its logit scale.

Shape legend: ``N`` tokens, ``V`` vocabulary, ``D`` hidden size, ``R`` rank of an adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.functional import head_kernels
from torchrl_llm.functional.head_tiles import (
    HeadGradients,
    HeadSettings,
    HeadTiles,
    KeptTiles,
    empty_gradients,
    matmul_dtype,
    without_autocast,
)
from torchrl_llm.functional.logit_form import LogitForm


class HeadScores(NamedTuple):
    """Scores of tokens under a language-model head.

    Attributes:
        log_probs: float32 ``[N]``, nats; float64 for states in float64.
        entropy: ``[N]`` in the same dtype, nats; ``None`` if it was not requested.
    """

    log_probs: Tensor
    entropy: Tensor | None


def chunked_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_size: int | None = None,
    in_place_head_grad: bool = False,
) -> HeadScores:
    r"""Compute log-probs (and entropy) of target tokens, without storing all logits.

    With :math:`z = s (h W^\top + u B^\top + b)`, capped to :math:`c \tanh(z / c)` where a soft-cap
    is given, the result is :math:`\log \mathrm{softmax}(z / \tau)` at the target. Gradients reach
    ``hidden_ND``, ``weight_VD``, ``bias`` and both parts of ``low_rank``, through the log-probs and
    through the entropy. Gradients are exact, because logits that were not kept are computed again.

    Everything but the matrix products is float32. The products are float32 on a CPU; on a CUDA
    device they use the autocast dtype if there is one, otherwise the promoted dtype of states and
    weight, and return float32. States or weights in float64 make everything float64.

    Args:
        hidden_ND: ``[N, D]`` hidden states; each state predicts its target.
        weight_VD: ``[V, D]`` weight of the head.
        targets_N: int64 ``[N]`` token ids.
        bias: ``[V]`` bias of the head.
        low_rank: ``(u, B)``, ``[N, R]`` and ``[V, R]``: an adapter's contribution ``u @ B.T``.
        scale: factor on the logits.
        softcap: cap of the scaled logits.
        temperature: a positive number, or float32 ``[N]``, one per token.
        entropy: also return the entropy of each distribution.
        chunk_size: largest number of logits in memory at once (tokens x vocabulary entries).
            ``None`` chooses a number for the device, and keeps up to 256 MiB of logits for the
            backward.
        in_place_head_grad: add the weight's gradient to ``weight_VD.grad`` in the backward. This
            saves one tensor of the weight's size, which autograd would hold otherwise. The weight
            must be a leaf. Its gradient hooks do not run, so use this in a single process only.
            Ignored under ``torch.compile``.

    Returns:
        The scores; ``entropy`` is ``None`` unless requested.

    Raises:
        ValueError: for shapes that do not fit, a temperature that is not positive, or
            ``in_place_head_grad`` with a weight that is not a leaf requiring gradients.

    Example:
        >>> h, w = torch.randn(5, 8), torch.randn(11, 8)
        >>> scores = chunked_log_probs(h, w, torch.tensor([0, 3, 10, 2, 2]), chunk_size=12)
        >>> full = (h @ w.T).log_softmax(-1)
        >>> torch.allclose(scores.log_probs, full[range(5), [0, 3, 10, 2, 2]], atol=1e-5)
        True
    """
    _check(hidden_ND, weight_VD, targets_N, bias, low_rank, temperature)
    if in_place_head_grad and not (weight_VD.is_leaf and weight_VD.requires_grad):
        raise ValueError("in_place_head_grad needs a leaf weight that requires gradients")
    settings = HeadSettings(
        LogitForm(scale, softcap),
        entropy,
        chunk_size,
        in_place_head_grad,
        _will_return(hidden_ND, weight_VD) and softcap is None,
        matmul_dtype(hidden_ND, weight_VD),
    )
    adapter, adapter_weight = low_rank if low_rank is not None else (None, None)
    inputs = (hidden_ND, weight_VD, bias, adapter, adapter_weight)
    if torch.compiler.is_compiling():
        return _compiled(inputs, targets_N, temperature, settings)
    return HeadScores(*_ChunkedHead.apply(*inputs, targets_N, temperature, settings))


@torch.no_grad()
def chunked_greedy_ids(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the most likely token after each hidden state, without storing all logits.

    Args:
        hidden_ND: ``[N, D]`` hidden states.
        weight_VD: ``[V, D]`` weight of the head.
        bias: ``[V]`` bias of the head.
        low_rank: see :func:`chunked_log_probs`.
        scale: factor on the logits, above 0.
        softcap: cap of the scaled logits.
        chunk_size: largest number of logits in memory at once; chosen by device when ``None``.

    Returns:
        int64 ``[N]``; among equal logits, the lowest id.

    Example:
        >>> h, w = torch.eye(2), torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
        >>> chunked_greedy_ids(h, w, chunk_size=2)
        tensor([1, 0])
    """
    dtype = matmul_dtype(hidden_ND, weight_VD)
    settings = HeadSettings(LogitForm(scale, softcap), False, chunk_size, False, False, dtype)
    adapter, adapter_weight = low_rank if low_rank is not None else (None, None)
    best = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.int64)
    top = hidden_ND.new_full(best.shape, -torch.inf, dtype=settings.sum_dtype)
    with without_autocast(hidden_ND.device.type):
        head = HeadTiles(hidden_ND, weight_VD, bias, adapter, adapter_weight, 1.0, settings)
        for columns in head.columns:
            weight = head.slice_of_weight(columns)
            for rows in head.rows:
                buffer = head.buffer(rows, columns)
                highest, index = head.logits(rows, columns, weight, buffer).max(0)
                best[rows] = torch.where(highest > top[rows], index + columns.start, best[rows])
                top[rows] = torch.maximum(highest, top[rows])
    return best


def check_head(hidden: Tensor, weight: Tensor, temperature: Any, whose: str = "") -> None:
    """Check that the shapes of states, weight and temperature match.

    Args:
        hidden: must be ``[N, D]``.
        weight: must be ``[V, D]``.
        temperature: must be a number above 0 or ``[N]``.
        whose: suffix for the error message, such as ``" of the teacher"``.

    Raises:
        ValueError: when the shapes do not match.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden states{whose} must be [N, D] and the weight{whose} [V, D], got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if isinstance(temperature, Tensor):
        if temperature.shape != hidden.shape[:1]:
            raise ValueError(
                f"temperature must be a number or [{hidden.shape[0]}], got "
                f"{tuple(temperature.shape)}"
            )
    elif not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _check(hidden, weight, targets, bias, low_rank, temperature) -> None:
    check_head(hidden, weight, temperature)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be [{hidden.shape[0]}], one per hidden state, got {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if low_rank is not None:
        states, columns = low_rank
        expected = (*hidden.shape[:1], *weight.shape[:1])
        if (states.shape[0], columns.shape[0]) != expected or states.shape[1] != columns.shape[1]:
            raise ValueError(
                f"low_rank must be [{expected[0]}, R] and [{expected[1]}, R], got "
                f"{tuple(states.shape)} and {tuple(columns.shape)}"
            )


def _will_return(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether a backward will need the tiles."""
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        adapter,
        adapter_weight,
        targets,
        temperature,
        settings: HeadSettings,
    ):
        ctx.set_materialize_grads(False)
        inputs = (hidden, weight, bias, adapter, adapter_weight)
        log_probs, entropy, log_sum, ctx.kept = _score(inputs, targets, temperature, settings)
        temperature_N = temperature if isinstance(temperature, Tensor) else None
        ctx.temperature = None if temperature_N is not None else temperature
        ctx.settings = settings
        ctx.leaf = weight if settings.in_place else None
        ctx.save_for_backward(*inputs, targets, temperature_N, log_sum, entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        (*inputs, targets, temperature_N, log_sum, entropy) = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 8
        temperature = temperature_N if temperature_N is not None else ctx.temperature
        # The first backward overwrites the kept tiles. Kept tiles do not contain log p.
        kept, ctx.kept = ctx.kept, None
        upstream = _Upstream(targets, log_sum, grad_log_probs, grad_entropy, entropy)
        grads = _gradients(
            inputs, upstream, temperature, ctx.settings, ctx.needs_input_grad[:5], ctx.leaf, kept
        )
        return (*grads, None, None, None)


def _score(inputs, targets, temperature, settings: HeadSettings):
    """Return the log-probs, entropy, log-sum-exp and the kept tiles."""
    with without_autocast(inputs[0].device.type):
        head = HeadTiles(*inputs, temperature, settings)
        kept = KeptTiles.of(head, inputs[1]) if settings.keep else None
        return *_scan(head, targets, settings.entropy, kept), kept


def _gradients(inputs, upstream: _Upstream, temperature, settings, needs, leaf=None, kept=None):
    """Return the gradients of the five inputs; ``None`` for inputs that need none."""
    with without_autocast(inputs[0].device.type):
        head = HeadTiles(*inputs, temperature, settings)
        grads = HeadGradients(head, inputs, needs, leaf, kept)
        for columns in head.columns:
            weight = head.slice_of_weight(columns)
            for rows in head.rows:
                gradient = _kernel_gradient if head.fused else _tile_gradient
                # Not named: a tile is freed before the next one is made.
                grads.add(
                    gradient(head, rows, columns, weight, upstream, kept), rows, columns, weight
                )
        return grads.finish()


def _scan(head: HeadTiles, targets: Tensor, with_entropy: bool, kept: KeptTiles | None):
    """Log-probs, entropy and log-sum-exp ``[N]``, by one pass over the tiles.

    Running sums relative to the running maximum ``m``: ``s = sum exp(x - m)`` and, for the entropy
    ``log s - a / s``, ``a = sum exp(x - m) (x - m)``.
    """
    count = targets.shape[0]
    top = targets.new_full((count,), -torch.inf, dtype=head.settings.sum_dtype)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    picked = torch.zeros_like(top)
    for columns in head.columns:
        weight = head.slice_of_weight(columns)
        for rows in head.rows:
            tile = kept and kept.tile(rows, columns)
            into = head.buffer(rows, columns) if tile is None or with_entropy else tile
            logits = head.logits(rows, columns, weight, into)
            if head.fused:
                sums = (top[rows], total[rows], moment[rows], picked[rows])
                head_kernels.fold(logits, targets[rows], columns.start, sums, entropy=with_entropy)
                continue
            inside, index = _index(targets, rows, columns)
            picked[rows] = torch.where(inside, logits.gather(0, index[None])[0], picked[rows])
            old = top[rows]
            new = torch.maximum(old, logits.amax(0))
            shift = old - new
            decay = shift.exp()
            logits.sub_(new)
            if with_entropy:
                weights = logits.exp() if tile is None else torch.exp(logits, out=tile)
                carried = torch.where(decay > 0, (moment[rows] + shift * total[rows]) * decay, 0.0)
                moment[rows] = carried + logits.mul_(weights).sum(0)
            else:
                weights = logits.exp_()
            total[rows] = total[rows] * decay + weights.sum(0)
            top[rows] = new
            if tile is not None:
                kept.tops[rows.start, columns.start] = new
    log_total = total.log()
    log_sum = top + log_total
    # Rounding may make the log-prob of a certain token slightly positive.
    log_probs = (picked - log_sum).clamp_(max=0.0)
    entropy = (log_total - moment / total).clamp_(min=0.0) if with_entropy else None
    return log_probs, entropy, log_sum


def _index(targets: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the columns, and at which index; valid for all targets."""
    index = targets[rows] - columns.start
    size = columns.stop - columns.start
    return (index >= 0) & (index < size), index.clamp_(0, size - 1)


class _Upstream(NamedTuple):
    targets: Tensor
    log_sum: Tensor
    log_probs: Tensor | None
    entropy: Tensor | None
    entropy_value: Tensor | None


def _kernel_gradient(
    head: HeadTiles, rows: slice, columns: slice, weight: Tensor, upstream: _Upstream, _kept: None
) -> Tensor:
    """Same as :func:`_tile_gradient`, in the dtype of the products."""
    logits = head.logits(rows, columns, weight, head.buffer(rows, columns))
    own = [None if x is None else x[rows] for x in upstream]
    targets, log_sum, log_probs, slope, entropy = own
    return head_kernels.gradient(
        logits, targets, columns.start, log_sum, entropy, log_probs, slope, head.settings.dtype
    )


def _tile_gradient(
    head: HeadTiles,
    rows: slice,
    columns: slice,
    weight: Tensor,
    upstream: _Upstream,
    kept: KeptTiles | None,
) -> Tensor:
    """Gradient of a tile's logits, ``g (1[v = target] - p) - g_H p (log p + H)``, ``[v, n]``."""
    into = head.buffer(rows, columns)
    log_sum = upstream.log_sum[rows]
    grad_log_probs = None if upstream.log_probs is None else upstream.log_probs[rows]
    tile = kept.tile(rows, columns) if kept is not None and upstream.entropy is None else None
    capped = None
    if tile is not None:
        rescale = (kept.tops[rows.start, columns.start] - log_sum).exp_()
        grad = torch.mul(tile, rescale.mul_(grad_log_probs).neg_(), out=into)
    else:
        logits = head.logits(rows, columns, weight, into)
        if head.settings.form.squashes:
            capped = logits.clone()
        log_p = logits.sub_(log_sum)
        if upstream.entropy is None:
            grad = log_p.exp_().mul_(grad_log_probs.neg())
        else:
            slope = upstream.entropy[rows]
            offset = slope * upstream.entropy_value[rows]
            if grad_log_probs is not None:
                offset = offset + grad_log_probs
            grad = log_p.exp().neg_().mul_(log_p.mul_(slope).add_(offset))
    if grad_log_probs is not None:
        inside, index = _index(upstream.targets, rows, columns)
        value = torch.where(inside, grad_log_probs, 0.0)
        grad.scatter_add_(0, index[None], value[None])
    return grad if capped is None else head.uncap(grad, capped, rows)


# -- operators that torch.compile does not trace ----------------------------------------------

_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? adapter, Tensor? adapter_weight, "
    "Tensor targets, Tensor? temperature_N, float temperature, float scale, float? softcap, "
    "bool entropy, int? chunk_size, ScalarType dtype"
)


def _compiled(inputs, targets, temperature, settings: HeadSettings) -> HeadScores:
    per_row = isinstance(temperature, Tensor)
    log_probs, entropy, _ = _operator(
        *inputs,
        targets,
        temperature if per_row else None,
        1.0 if per_row else temperature,
        *settings.form,
        settings.entropy,
        settings.chunk_size,
        settings.dtype,
    )
    return HeadScores(log_probs, entropy if settings.entropy else None)


def _read(arguments):
    """Read inputs, targets, temperature and settings from the arguments of an operator."""
    *inputs, targets, temperature_N, temperature = arguments[:8]
    scale, softcap, entropy, chunk_size, dtype = arguments[8:13]
    settings = HeadSettings(LogitForm(scale, softcap), entropy, chunk_size, False, False, dtype)
    return inputs, targets, temperature if temperature_N is None else temperature_N, settings


@torch.library.custom_op(
    "torchrl_llm::chunked_head",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor log_probs, Tensor entropy, Tensor log_sum)",
)
def _operator(*arguments):
    log_probs, entropy, log_sum, _ = _score(*_read(arguments))
    return log_probs, log_probs.new_empty(0) if entropy is None else entropy, log_sum


@_operator.register_fake
def _(*arguments):
    (hidden, *_), *_, settings = _read(arguments)
    sums = hidden.new_empty(hidden.shape[0], dtype=settings.sum_dtype)
    entropy = torch.empty_like(sums) if settings.entropy else sums.new_empty(0)
    return sums, entropy, torch.empty_like(sums)


@torch.library.custom_op(
    "torchrl_llm::chunked_head_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor log_sum, Tensor entropy_value, Tensor grad_log_probs, "
    "Tensor grad_entropy, bool[] needs) -> Tensor[]",
)
def _backward_operator(*arguments):
    inputs, targets, temperature, settings = _read(arguments)
    log_sum, entropy, grad_log_probs, grad_entropy, needs = arguments[13:]
    of_entropy = (grad_entropy, entropy) if settings.entropy else (None, None)
    upstream = _Upstream(targets, log_sum, grad_log_probs, *of_entropy)
    grads = _gradients(inputs, upstream, temperature, settings, needs)
    return [grad for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(*arguments):
    return empty_gradients(arguments[:5], arguments[-1])


def _save(ctx, inputs, output):
    _, entropy, log_sum = output
    ctx.save_for_backward(*inputs[:7], log_sum, entropy)
    ctx.rest = inputs[7:]


def _backward(ctx, grad_log_probs, grad_entropy, _):
    *inputs, log_sum, entropy = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    upstream = (log_sum, entropy, grad_log_probs, grad_entropy)
    grads = iter(_backward_operator(*inputs, *ctx.rest, *upstream, needs))
    return *(next(grads) if need else None for need in needs), *(None,) * 8


_operator.register_autograd(_backward, setup_context=_save)

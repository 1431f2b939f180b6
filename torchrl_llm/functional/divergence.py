r"""Computes the divergence of two models over the whole vocabulary from their hidden states.

An estimate from a sampled token compares one entry of two distributions. These functions compare
all entries, exactly and without noise. They compute the logits of both models one tile at a time
(as in :mod:`torchrl_llm.functional.chunked_head`, also under ``torch.compile``), so no tensor ``[N,
V]`` is stored. The backward computes the tiles again. Only the first model gets a gradient; the
second model is a constant.

Shape legend: ``N`` tokens, ``V`` vocabulary, ``D`` hidden size of the model, ``E`` hidden size of
the teacher, ``R`` rank of an adapter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.functional.chunked_head import check_head
from torchrl_llm.functional.head_tiles import (
    HeadGradients,
    HeadSettings,
    HeadTiles,
    empty_gradients,
    matmul_dtype,
    without_autocast,
)
from torchrl_llm.functional.logit_form import LogitForm

Direction = Literal["reverse", "forward"]


def divergence_from_logits(
    logits_NV: Tensor, teacher_logits_NV: Tensor, *, direction: Direction = "reverse"
) -> Tensor:
    r"""Compute the KL divergence between a model and its teacher from all their logits.

    ``"reverse"`` is :math:`\mathrm{KL}(p \| q) = \sum_v p_v (\log p_v - \log q_v)` with the model
    :math:`p` and the teacher :math:`q`, ``"forward"`` is :math:`\mathrm{KL}(q \| p)`. The reverse
    divergence seeks the teacher's modes; on-policy distillation minimises it (arXiv:2306.13649,
    arXiv:2306.08543 equation 1). The forward divergence covers all modes of the teacher. They are
    the two ends (beta 1 and 0) of the generalised Jensen-Shannon divergence of TRL's
    ``GKDTrainer``.

    Args:
        logits_NV: ``[..., V]``, logits of the model.
        teacher_logits_NV: ``[..., V]``, logits of the teacher, a constant.
        direction: ``"reverse"`` or ``"forward"``.

    Returns:
        ``[...]``, nats.

    Raises:
        ValueError: for an unknown direction or shapes that differ.

    Example:
        >>> even, sure = torch.zeros(2), torch.tensor([0.0, 1e9])
        >>> divergence_from_logits(sure, even)
        tensor(0.6931)
    """
    _check_direction(direction)
    if logits_NV.shape != teacher_logits_NV.shape:
        raise ValueError(
            f"the logits of model and teacher must have one shape, got {tuple(logits_NV.shape)} "
            f"and {tuple(teacher_logits_NV.shape)}"
        )
    model, teacher = logits_NV.log_softmax(-1), teacher_logits_NV.detach().log_softmax(-1)
    first, second = (model, teacher) if direction == "reverse" else (teacher, model)
    return (first.exp() * (first - second)).sum(-1)


def chunked_divergence(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_weight_VE: Tensor,
    *,
    direction: Direction = "reverse",
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    teacher_bias: Tensor | None = None,
    teacher_low_rank: tuple[Tensor, Tensor] | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Compute the KL divergence between a model and its teacher, without storing all logits.

    The value and the gradient are the same as for :func:`divergence_from_logits` on the logits of
    :func:`~torchrl_llm.functional.chunked_log_probs`. With :math:`g` the gradient of the result,
    the gradient of the logits is :math:`g\, p_v (\log p_v - \log q_v - \mathrm{KL})` for the
    reverse direction and :math:`g\, (p_v - q_v)` for the forward direction. Dtypes are the same as
    for ``chunked_log_probs``.

    Args:
        hidden_ND: ``[N, D]`` hidden states of the model; each state predicts a token.
        weight_VD: ``[V, D]`` weight of the model's head.
        teacher_hidden_NE: ``[N, E]`` hidden states of the teacher at the same positions.
        teacher_weight_VE: ``[V, E]`` weight of the teacher's head, over the same vocabulary.
        direction: ``"reverse"``, KL(model || teacher), or ``"forward"``, KL(teacher || model).
        bias: ``[V]`` bias of the head.
        low_rank: ``(u, B)``, ``[N, R]`` and ``[V, R]``: an adapter's contribution ``u @ B.T``.
        scale: factor on the logits.
        softcap: cap of the scaled logits.
        teacher_bias: the teacher's ``bias``.
        teacher_low_rank: the teacher's ``low_rank``.
        teacher_scale: the teacher's ``scale``.
        teacher_softcap: the teacher's ``softcap``.
        temperature: temperature of both models: a positive number, or float32 ``[N]``.
        chunk_size: the most logits of each model that are alive at once.

    Returns:
        float32 ``[N]``, nats; float64 for states in float64.

    Raises:
        ValueError: for an unknown direction or shapes that do not fit.

    Example:
        >>> h, w, teacher = torch.randn(5, 8), torch.randn(11, 8), torch.randn(5, 4)
        >>> v = torch.randn(11, 4)
        >>> got = chunked_divergence(h, w, teacher, v, chunk_size=12)
        >>> torch.allclose(got, divergence_from_logits(h @ w.T, teacher @ v.T), atol=1e-5)
        True
    """
    _check_direction(direction)
    _check(hidden_ND, weight_VD, teacher_hidden_NE, teacher_weight_VE, temperature)
    dtype = matmul_dtype(hidden_ND, weight_VD)
    settings = HeadSettings(LogitForm(scale, softcap), False, chunk_size, False, False, dtype)
    teacher = _Head(
        teacher_hidden_NE.detach(),
        teacher_weight_VE.detach(),
        _detached(teacher_bias),
        *((None, None) if teacher_low_rank is None else map(_detached, teacher_low_rank)),
    )
    teacher_settings = settings._replace(form=LogitForm(teacher_scale, teacher_softcap))
    if dtype is not torch.float64:
        kind = matmul_dtype(teacher.hidden, teacher.weight)
        teacher_settings = teacher_settings._replace(dtype=kind)
    adapter, adapter_weight = low_rank if low_rank is not None else (None, None)
    tensors = (hidden_ND, weight_VD, bias, adapter, adapter_weight, *teacher)
    if torch.compiler.is_compiling():
        return _compiled(tensors, temperature, settings, teacher_settings, direction)
    return _ChunkedDivergence.apply(*tensors, temperature, settings, teacher_settings, direction)


class _Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    adapter: Tensor | None
    adapter_weight: Tensor | None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _check_direction(direction: str) -> None:
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be reverse or forward, got {direction!r}")


def _check(hidden, weight, teacher_hidden, teacher_weight, temperature) -> None:
    check_head(hidden, weight, temperature, " of the model")
    check_head(teacher_hidden, teacher_weight, 1.0, " of the teacher")
    if hidden.shape[0] != teacher_hidden.shape[0] or weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"model and teacher must predict the same tokens over one vocabulary, got "
            f"{hidden.shape[0]} and {teacher_hidden.shape[0]} tokens, {weight.shape[0]} and "
            f"{teacher_weight.shape[0]} ids"
        )


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *tensors, temperature, settings, teacher_settings, direction = arguments
        value, *log_sums = _diverge(tensors, temperature, settings, teacher_settings, direction)
        temperature_N = temperature if isinstance(temperature, Tensor) else None
        ctx.temperature = None if temperature_N is not None else temperature
        ctx.rest = (settings, teacher_settings, direction)
        ctx.save_for_backward(*tensors, temperature_N, value, *log_sums)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        *tensors, temperature_N, value, log_sum, teacher_log_sum = ctx.saved_tensors
        temperature = temperature_N if temperature_N is not None else ctx.temperature
        results = (value, log_sum, teacher_log_sum)
        needs = ctx.needs_input_grad[:5]
        grads = _gradients(tensors, temperature, *ctx.rest, results, grad, needs)
        return (*grads, *[None] * 9)


def _diverge(tensors, temperature, settings, teacher_settings, direction):
    """Return the divergence, and the log-sum-exps of the model and of the teacher."""
    with without_autocast(tensors[0].device.type):
        model, teacher = _tiles(tensors, temperature, settings, teacher_settings)
        if direction == "reverse":
            return _scan(model, teacher)
        value, teacher_log_sum, log_sum = _scan(teacher, model)
        return value, log_sum, teacher_log_sum


def _gradients(tensors, temperature, settings, teacher_settings, direction, results, grad, needs):
    """Return the gradients of the model's five inputs, ``None`` where none is needed."""
    value, log_sum, teacher_log_sum = results
    with without_autocast(grad.device.type):
        model, teacher = _tiles(tensors, temperature, settings, teacher_settings)
        grads = HeadGradients(model, tensors[:5], needs, None, None)
        for columns in model.columns:
            weight = model.slice_of_weight(columns)
            teacher_weight = teacher.slice_of_weight(columns)
            for rows in model.rows:
                logits = model.logits(rows, columns, weight, model.buffer(rows, columns))
                capped = logits.clone() if settings.form.squashes else None
                log_p = logits.sub_(log_sum[rows])
                into = teacher.buffer(rows, columns)
                log_q = teacher.logits(rows, columns, teacher_weight, into)
                log_q = log_q.sub_(teacher_log_sum[rows])
                if direction == "reverse":
                    slope = torch.sub(log_p, log_q, out=into).sub_(value[rows])
                    tile = log_p.exp_().mul_(slope)
                else:
                    tile = log_p.exp_().sub_(log_q.exp_())
                tile.mul_(grad[rows])
                if capped is not None:
                    tile = model.uncap(tile, capped, rows)
                grads.add(tile, rows, columns, weight)
        return grads.finish()


def _tiles(tensors, temperature, settings, teacher_settings) -> tuple[HeadTiles, HeadTiles]:
    """Return tiles of both heads with the same boundaries."""
    model = HeadTiles(*tensors[:5], temperature, settings)
    return model, HeadTiles(*tensors[5:10], temperature, teacher_settings)


def _scan(first: HeadTiles, second: HeadTiles) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the divergence and both log-sum-exps, all ``[N]``, in one pass.

    With running maxima ``m`` and ``n`` of the logits ``x`` and ``y``: ``s = sum exp(x - m)``, ``r =
    sum exp(y - n)`` and ``a = sum exp(x - m) ((x - m) - (y - n))``; then ``KL = a / s - log s +
    log r``. Differences to the maxima stay precise for large logits.
    """
    count = first.hidden.shape[0]
    top = first.hidden.new_full((count,), -torch.inf, dtype=first.settings.sum_dtype)
    other_top = top.clone()
    total, other_total, moment = (torch.zeros_like(top) for _ in range(3))
    for columns in first.columns:
        weight, other_weight = first.slice_of_weight(columns), second.slice_of_weight(columns)
        for rows in first.rows:
            x = first.logits(rows, columns, weight, first.buffer(rows, columns))
            y = second.logits(rows, columns, other_weight, second.buffer(rows, columns))
            new, other_new = torch.maximum(top[rows], x.amax(0)), y.amax(0)
            other_new = torch.maximum(other_top[rows], other_new)
            shift, other_shift = top[rows] - new, other_top[rows] - other_new
            decay = shift.exp()
            x.sub_(new)
            y.sub_(other_new)
            other_total[rows] = other_total[rows] * other_shift.exp() + y.exp().sum(0)
            gap = torch.sub(x, y, out=y)
            weights = x.exp_()
            moved = (moment[rows] + (shift - other_shift) * total[rows]) * decay
            # In the first tile the old maxima are minus infinity.
            moment[rows] = torch.where(decay > 0, moved, 0.0) + gap.mul_(weights).sum(0)
            total[rows] = total[rows] * decay + weights.sum(0)
            top[rows], other_top[rows] = new, other_new
    log_total, other_log_total = total.log(), other_total.log()
    # Rounding may make the divergence of equal distributions slightly negative.
    value = (moment / total - log_total + other_log_total).clamp_(min=0.0)
    return value, top + log_total, other_top + other_log_total


# -- operators that torch.compile does not trace ----------------------------------------------

_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? adapter, Tensor? adapter_weight, "
    "Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, Tensor? teacher_adapter, "
    "Tensor? teacher_adapter_weight, Tensor? temperature_N, float temperature, "
    "float scale, float? softcap, ScalarType dtype, float teacher_scale, float? teacher_softcap, "
    "ScalarType teacher_dtype, int? chunk_size, str direction"
)


def _compiled(tensors, temperature, settings, teacher_settings, direction) -> Tensor:
    per_row = isinstance(temperature, Tensor)
    value, _, _ = _operator(
        *tensors,
        temperature if per_row else None,
        1.0 if per_row else temperature,
        *settings.form,
        settings.dtype,
        *teacher_settings.form,
        teacher_settings.dtype,
        settings.chunk_size,
        direction,
    )
    return value


def _read(arguments):
    """Read tensors, temperature, settings and direction from the arguments of an operator."""
    temperature_N, temperature, *heads, chunk_size, direction = arguments[10:20]
    settings, teacher_settings = (
        HeadSettings(LogitForm(scale, softcap), False, chunk_size, False, False, dtype)
        for scale, softcap, dtype in (heads[:3], heads[3:])
    )
    temperature = temperature if temperature_N is None else temperature_N
    return arguments[:10], temperature, settings, teacher_settings, direction


@torch.library.custom_op(
    "torchrl_llm::chunked_divergence",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor value, Tensor log_sum, Tensor teacher_log_sum)",
)
def _operator(*arguments):
    return _diverge(*_read(arguments))


@_operator.register_fake
def _(*arguments):
    tensors, _, settings, teacher_settings, direction = _read(arguments)
    first = settings if direction == "reverse" else teacher_settings
    sums = tensors[0].new_empty(tensors[0].shape[0], dtype=first.sum_dtype)
    return sums, torch.empty_like(sums), torch.empty_like(sums)


@torch.library.custom_op(
    "torchrl_llm::chunked_divergence_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor value, Tensor log_sum, Tensor teacher_log_sum, Tensor grad, "
    "bool[] needs) -> Tensor[]",
)
def _backward_operator(*arguments):
    *results, grad, needs = arguments[20:]
    grads = _gradients(*_read(arguments), results, grad, needs)
    return [grad for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(*arguments):
    return empty_gradients(arguments[:5], arguments[-1])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:11], *output)
    ctx.rest = inputs[11:]


def _backward(ctx, grad, *_):
    *inputs, value, log_sum, teacher_log_sum = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    results = (value, log_sum, teacher_log_sum)
    grads = iter(_backward_operator(*inputs, *ctx.rest, *results, grad, needs))
    return *(next(grads) if need else None for need in needs), *(None,) * 15


_operator.register_autograd(_backward, setup_context=_save)

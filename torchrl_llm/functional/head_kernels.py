"""Triton kernels that read a float32 tile of logits once, for products in bfloat16 or float16.

Without these kernels, torch reads or writes each tile more than ten times in a forward and
backward. On an H100 this takes longer than the matrix products: one pass over 8,192 x 151,936
float32 numbers takes 1.7 ms, and one product with 1,536 channels takes 5 ms. Triton is installed
together with torch for GPUs.

Next: :mod:`torchrl_llm.functional.chunked_head` has the same arithmetic in torch operations, for
all other devices and dtypes.

Shape legend: a tile is ``v`` vocabulary entries by ``n`` tokens; in memory a token's logits lie
next to each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_BLOCK = 2048
tl: Any = None  # triton.language, from the first use on


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels run for tiles on a device; the first call per device tests them.

    Args:
        device: device of the tile.
        dtype: dtype of the factors of the matrix products.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.is_available() and find_spec("triton") is not None and works(device, dtype)


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on a device and match torch's operations.

    Logs a warning if they do not, because the head is slower without them.

    Args:
        device: a device that Triton supports.
        dtype: dtype of the gradients.
    """
    width, targets = 300, torch.tensor([0, 150, 299], device=device)
    tile = torch.linspace(-9.0, 9.0, 3 * width, device=device).view(3, width).t()
    zeros = torch.zeros(3, device=device)
    sums = (zeros - torch.inf, zeros.clone(), zeros.clone(), zeros.clone())
    probs = tile.softmax(0)
    slope = torch.nn.functional.one_hot(targets, width).t() - probs
    try:
        fold(tile, targets, 0, sums, entropy=True)
        top, total, moment, picked = sums
        log_sum = top + total.log()
        got = gradient(tile, targets, 0, log_sum, None, torch.ones_like(zeros), None, dtype)
        close = torch.allclose(got.float(), slope, atol=1e-2)
        close &= torch.allclose(log_sum, tile.logsumexp(0), atol=1e-4)
        close &= torch.allclose(
            total.log() - moment / total, -(probs * probs.log()).sum(0), atol=1e-3
        )
        close &= torch.equal(picked, tile.gather(0, targets[None])[0])
        problem = "give other values than torch"
    except Exception as error:  # Triton needs a compiler at run time, which a machine may not have
        close, problem = False, f"do not run: {error}"
    if not close:
        warnings.warn(f"the kernels of the chunked head {problem}; torch's operations take over")
    return close


def fold(
    tile_VN: Tensor,
    targets_N: Tensor,
    first: int,
    sums: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    entropy: bool,
) -> None:
    """Add a tile to the running sums of its tokens, in place.

    Args:
        tile_VN: float32 ``[v, n]``, logits.
        targets_N: int64 ``[n]``.
        first: vocabulary entry of the tile's first row.
        sums: float32 ``[n]`` each: the maximum ``m``, the sums of ``exp(x - m)`` and of
            ``exp(x - m) (x - m)``, and the logit of the target.
        entropy: whether to compute the third sum.
    """
    width, count = tile_VN.shape
    assert tile_VN.t().is_contiguous()
    with torch.cuda.device_of(tile_VN):
        _compiled(_fold)[(count,)](
            tile_VN, targets_N.contiguous(), *sums, first, width, ENTROPY=entropy, BLOCK=_BLOCK
        )


def gradient(
    tile_VN: Tensor,
    targets_N: Tensor,
    first: int,
    log_sum_N: Tensor,
    entropy_N: Tensor | None,
    grad_log_probs_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of a tile's logits, ``g (1[v = target] - p) - g_H p (log p + H)``.

    Args:
        tile_VN: float32 ``[v, n]``, logits.
        targets_N: int64 ``[n]``.
        first: vocabulary entry of the tile's first row.
        log_sum_N: float32 ``[n]``, log-sum-exp of all logits of a token.
        entropy_N: ``H``, float32 ``[n]``; needed with ``grad_entropy_N``.
        grad_log_probs_N: ``g``, float32 ``[n]``, or ``None`` for 0.
        grad_entropy_N: ``g_H``, float32 ``[n]``, or ``None`` for 0.
        dtype: dtype of the result.

    Returns:
        ``[v, n]``.
    """
    width, count = tile_VN.shape
    assert tile_VN.t().is_contiguous()
    result = torch.empty_like(tile_VN, dtype=dtype)
    has_log_probs, has_entropy = grad_log_probs_N is not None, grad_entropy_N is not None
    # Masked entries are not read.
    grads = [log_sum_N if g is None else g.contiguous() for g in (grad_log_probs_N, grad_entropy_N)]
    with torch.cuda.device_of(tile_VN):
        _compiled(_gradient)[(count, -(-width // _BLOCK))](
            tile_VN,
            result,
            targets_N.contiguous(),
            log_sum_N,
            entropy_N if has_entropy else log_sum_N,
            *grads,
            first,
            width,
            LOG_PROBS=has_log_probs,
            ENTROPY=has_entropy,
            BLOCK=_BLOCK,
        )
    return result


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    global tl
    import triton
    import triton.language as tl

    return triton.jit(kernel, do_not_specialize=["first"])


def _fold(
    tile,
    targets,
    tops,
    totals,
    moments,
    picked,
    first,
    width,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token.
    token = tl.program_id(0).to(tl.int64)
    tile += token * width
    top, total = tl.load(tops + token), tl.load(totals + token)
    moment = tl.load(moments + token)
    start = 0
    while start < width:
        entry = start + tl.arange(0, BLOCK)
        logits = tl.load(tile + entry, mask=entry < width, other=-float("inf"))
        new = tl.maximum(top, tl.max(logits, 0))
        shift = top - new
        decay = tl.exp(shift)
        weights = tl.exp(logits - new)
        if ENTROPY:
            carried = tl.where(decay > 0, (moment + shift * total) * decay, 0.0)
            moment = carried + tl.sum(tl.where(entry < width, weights * (logits - new), 0.0), 0)
        total = total * decay + tl.sum(weights, 0)
        top = new
        start += BLOCK
    tl.store(tops + token, top)
    tl.store(totals + token, total)
    if ENTROPY:
        tl.store(moments + token, moment)
    target = tl.load(targets + token) - first
    if (target >= 0) & (target < width):
        tl.store(picked + token, tl.load(tile + target))


def _gradient(
    tile,
    result,
    targets,
    log_sums,
    entropies,
    grad_log_probs,
    grad_entropies,
    first,
    width,
    LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token and block of entries.
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(tile + token * width + entry, mask=entry < width, other=0.0)
    log_p = logits - tl.load(log_sums + token)
    p = tl.exp(log_p)
    grad = tl.zeros((BLOCK,), tl.float32)
    if LOG_PROBS:
        hit = entry + first == tl.load(targets + token)
        grad += tl.load(grad_log_probs + token) * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY:
        grad -= tl.load(grad_entropies + token) * p * (log_p + tl.load(entropies + token))
    grad = grad.to(result.dtype.element_ty)
    tl.store(result + token * width + entry, grad, mask=entry < width)

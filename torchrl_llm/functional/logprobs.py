r"""Log-probs and entropy of tokens over the whole vocabulary or over the ids that sampling kept.

Use the functions on logits if you have logits (small vocabularies, tests, output of another
library). From a model's hidden states,
:func:`~torchrl_llm.functional.chunked_head.chunked_log_probs` computes the same numbers without
storing all logits.

The alignment is the same everywhere in torchrl_llm: entry ``t`` belongs to token ``t`` and is ``log
p(x_t | x_<t)``. The model's output at position ``t - 1`` predicts token ``t``. So token 0 has no
prediction, and entry 0 is 0.0.

Top-k, top-p or min-p sampling draws from the kept ids :math:`K` with probability
:math:`\exp z_x / \sum_{v \in K} \exp z_v`. If a loss divides by the sum over the whole vocabulary,
the ratio is not one, even for the policy that sampled. Scoring on the kept ids is also cheaper,
because it reads only their rows of the weight. A support consists of two flat tensors:
``token_ids`` ``[S]``, the concatenated kept ids of all tokens, and ``counts`` ``[N]``, the number
of kept ids of each token. A count of 0 means the whole vocabulary.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary, ``N`` flat tokens, ``S`` kept ids of all
tokens together, ``D`` hidden size, ``R`` rank of an adapter; in a chunk, ``n`` tokens and ``k``
ids, padded to the largest number of ids of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm.functional.chunked_head import HeadScores, chunked_log_probs
from torchrl_llm.functional.head_tiles import matmul_dtype, without_autocast
from torchrl_llm.functional.logit_form import LogitForm


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Compute the log-softmax at one index per row, without storing the whole log-softmax.

    Args:
        logits: ``[..., V]`` of any floating dtype; the sum is computed in float32.
        index: int64 ``[...]``.

    Returns:
        float32 ``[...]``, nats.

    Example:
        >>> selective_log_softmax(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
        tensor([0.5000])
    """
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).float()
    return picked - torch.logsumexp(logits.float(), dim=-1)


def token_log_probs(logits_BTV: Tensor, ids_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute the log-prob of each token of a sequence given its prefix.

    Args:
        logits_BTV: ``[B, T, V]`` logits; the logits at position ``t`` predict token ``t + 1``.
        ids_BT: int64 ``[B, T]`` token ids.
        temperature: divisor of the logits.

    Returns:
        float32 ``[B, T]`` in nats, log p(x_t | x_<t); index 0 is 0.0.

    Raises:
        ValueError: for shapes that do not fit or a temperature that is not positive.

    Example:
        >>> logits = torch.zeros(1, 3, 4)
        >>> token_log_probs(logits, torch.tensor([[0, 1, 2]])).exp()
        tensor([[1.0000, 0.2500, 0.2500]])
    """
    if logits_BTV.shape[:-1] != ids_BT.shape:
        raise ValueError(
            f"logits must be [B, T, V] and ids [B, T], got {tuple(logits_BTV.shape)} "
            f"and {tuple(ids_BT.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logits = logits_BTV[:, :-1]
    if temperature != 1.0:
        logits = logits.float() / temperature
    scores = selective_log_softmax(logits, ids_BT[:, 1:])
    return torch.nn.functional.pad(scores, (1, 0))


def entropy_from_logits(logits: Tensor) -> Tensor:
    r"""Compute the entropy of the softmax, :math:`H = -\sum_v p_v \log p_v`.

    Args:
        logits: ``[..., V]``; entries of minus infinity have probability zero and add nothing.

    Returns:
        float32 ``[...]``, nats, between 0 and log V.

    Example:
        >>> entropy_from_logits(torch.zeros(4)).exp()
        tensor(4.)
    """
    log_probs = logits.float().log_softmax(-1)
    return torch.special.entr(log_probs.exp()).sum(-1)


# Largest number of gathered weights in memory at once (ids x hidden size).
_GATHERED = {"cpu": 1 << 22, "cuda": 1 << 26}


def kept_ids(log_probs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the support of distributions from their log-probs.

    Args:
        log_probs_NV: ``[N, V]``, ``-inf`` for ids that were dropped.

    Returns:
        ``token_ids`` int32 ``[S]`` and ``counts`` int32 ``[N]``; a token that kept the whole
        vocabulary has count 0 and no ids.

    Example:
        >>> log_probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).log()
        >>> kept_ids(log_probs)
        (tensor([0, 1], dtype=torch.int32), tensor([2, 0], dtype=torch.int32))
    """
    kept = log_probs_NV > -torch.inf
    kept &= ~kept.all(-1, keepdim=True)
    return kept.nonzero()[:, 1].to(torch.int32), kept.sum(-1, dtype=torch.int32)


def take_support(token_ids_S: Tensor, counts_N: Tensor, index_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the support of some of the tokens, in any order.

    Args:
        token_ids_S: ``[S]``.
        counts_N: ``[N]``.
        index_M: int64 ``[M]`` positions, or bool ``[N]``.

    Returns:
        The ``token_ids`` and the ``counts`` ``[M]`` of these tokens.

    Example:
        >>> ids, counts = torch.tensor([4, 5, 6]), torch.tensor([2, 0, 1])
        >>> take_support(ids, counts, torch.tensor([2, 0]))
        (tensor([6, 4, 5]), tensor([1, 2]))
    """
    counts_M = counts_N[index_M]
    first_M = (counts_N.long().cumsum(0) - counts_N)[index_M]
    # Position s of the result is the (s - begin of its token)-th id of that token.
    begins = counts_M.long().cumsum(0) - counts_M
    shift = (first_M - begins).repeat_interleave(counts_M)
    return token_ids_S[torch.arange(shift.shape[0], device=shift.device) + shift], counts_M


def restrict_logits(logits_NV: Tensor, token_ids_S: Tensor, counts_N: Tensor) -> Tensor:
    """Set logits outside the support to ``-inf``; slow, see :func:`support_log_probs`.

    Args:
        logits_NV: ``[N, V]``.
        token_ids_S: ``[S]``.
        counts_N: ``[N]``; rows with count 0 are unchanged.

    Example:
        >>> restrict_logits(torch.zeros(1, 3), torch.tensor([0, 2]), torch.tensor([2]))
        tensor([[0., -inf, 0.]])
    """
    rows = torch.arange(counts_N.shape[0], device=counts_N.device).repeat_interleave(counts_N)
    dropped = (counts_N > 0)[:, None].expand(logits_NV.shape).clone()
    dropped[rows, token_ids_S.long()] = False
    return logits_NV.masked_fill(dropped, -torch.inf)


def support_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    token_ids_S: Tensor,
    counts_N: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> HeadScores:
    r"""Compute log-probs (and entropy) of targets under the softmax over each token's kept ids.

    :math:`\log p = z_x / \tau - \log \sum_{v \in K} \exp(z_v / \tau)` with the logits :math:`z` of
    :func:`~torchrl_llm.functional.chunked_log_probs`, which also computes the tokens of count 0.
    Gradients are exact and reach the same five tensors as in that function; dtypes are also the
    same.

    Args:
        hidden_ND: ``[N, D]`` hidden states, each the one that predicts its target.
        weight_VD: ``[V, D]`` weight of the head.
        targets_N: int64 ``[N]``.
        token_ids_S: int32 or int64 ``[S]``, the concatenated kept ids of all tokens.
        counts_N: int32 or int64 ``[N]``, number of kept ids; 0 for the whole vocabulary.
        bias: ``[V]``.
        low_rank: ``(u, B)``, ``[N, R]`` and ``[V, R]``: an adapter's contribution ``u @ B.T``.
        scale: factor on the logits.
        softcap: cap of the scaled logits.
        temperature: a positive number, or float32 ``[N]``.
        entropy: also return the entropy of each restricted distribution.
        chunk_size: largest number of logits in memory at once; chosen by device when ``None``.

    Returns:
        The scores ``[N]``; a target outside its support has log-prob ``-inf``.

    Raises:
        ValueError: for ids and counts that do not match each other or the targets.

    Example:
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [5.0]])
        >>> ids, counts = torch.tensor([0, 1]), torch.tensor([2])
        >>> support_log_probs(hidden, weight, torch.tensor([1]), ids, counts).log_probs.exp()
        tensor([0.5000])
    """
    if counts_N.shape != targets_N.shape or int(counts_N.sum()) != token_ids_S.shape[0]:
        raise ValueError(
            f"a support needs a count per target and an id per count, got {tuple(counts_N.shape)} "
            f"counts of {int(counts_N.sum())} ids, {token_ids_S.shape[0]} ids and "
            f"{tuple(targets_N.shape)} targets"
        )
    head = {"bias": bias, "scale": scale, "softcap": softcap, "entropy": entropy}
    cut = counts_N > 0
    if bool(cut.all()):
        settings = _Settings(
            LogitForm(scale, softcap), entropy, chunk_size, matmul_dtype(hidden_ND, weight_VD)
        )
        adapter, adapter_weight = low_rank if low_rank is not None else (None, None)
        return HeadScores(
            *_SupportHead.apply(
                hidden_ND,
                weight_VD,
                bias,
                adapter,
                adapter_weight,
                targets_N,
                token_ids_S.long(),
                counts_N.long(),
                temperature,
                settings,
            )
        )
    parts = []
    for index in (cut.nonzero()[:, 0], (~cut).nonzero()[:, 0]):
        some = {
            **head,
            "low_rank": None if low_rank is None else (low_rank[0][index], low_rank[1]),
            "temperature": temperature[index] if isinstance(temperature, Tensor) else temperature,
            "chunk_size": chunk_size,
        }
        args = (hidden_ND[index], weight_VD, targets_N[index])
        if not index.numel():
            continue
        if not parts and bool(cut.any()):
            support = take_support(token_ids_S, counts_N, index)
            parts.append((index, support_log_probs(*args, *support, **some)))
        else:
            parts.append((index, chunked_log_probs(*args, **some)))
    if not parts:
        return chunked_log_probs(
            hidden_ND, weight_VD, targets_N, low_rank=low_rank, temperature=temperature, **head
        )
    place = torch.cat([index for index, _ in parts]).argsort()
    columns = zip(*(scores for _, scores in parts), strict=True)
    return HeadScores(*(None if c[0] is None else torch.cat(c)[place] for c in columns))


class _Settings(NamedTuple):
    form: LogitForm
    entropy: bool
    chunk_size: int | None
    factors: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.factors is torch.float64 else torch.float32


class _Chunk(NamedTuple):
    """Tokens with similar counts: their indices, ids, the mask of real ids, and slices."""

    index_n: Tensor
    ids_nk: Tensor
    valid_nk: Tensor
    slices: list[slice]


def _chunks(ids_S: Tensor, counts_N: Tensor, size: int) -> Iterator[_Chunk]:
    order = counts_N.argsort(descending=True, stable=True)
    firsts = counts_N.cumsum(0) - counts_N
    sizes = counts_N[order].tolist()
    start = 0
    while start < len(sizes):
        longest = sizes[start]
        index = order[start : start + max(1, size // longest)]
        start += index.shape[0]
        column = torch.arange(longest, device=ids_S.device)
        valid = column < counts_N[index, None]
        place = (firsts[index, None] + column).clamp_(max=ids_S.shape[0] - 1)
        step = max(1, size // index.shape[0])
        slices = [slice(k, min(k + step, longest)) for k in range(0, longest, step)]
        yield _Chunk(index, ids_S[place], valid, slices)


class _SupportHead(torch.autograd.Function):
    """Computes with gathered rows of the head; stores the kept ids' logits for the backward."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, adapter, adapter_weight, targets, ids, counts, temperature, s
    ):
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        size = s.chunk_size or max(1, _GATHERED.get(kind, _GATHERED["cuda"]) // hidden.shape[1])
        log_probs = torch.empty(hidden.shape[0], dtype=s.sums, device=hidden.device)
        entropies = torch.empty_like(log_probs) if s.entropy else None
        tensors = (hidden, weight, bias, adapter, adapter_weight)
        ctx.kept = []
        with without_autocast(kind):
            for chunk in _chunks(ids, counts, size):
                capped = _capped_logits(chunk, tensors, s)
                tau = _per_token(temperature, chunk.index_n)
                scaled = (capped / tau).masked_fill(~chunk.valid_nk, -torch.inf)
                log_p = scaled.log_softmax(-1)
                hit = (chunk.ids_nk == targets[chunk.index_n, None]) & chunk.valid_nk
                own = log_p.masked_fill(~hit, 0.0).sum(-1)
                log_probs[chunk.index_n] = own.masked_fill(~hit.any(-1), -torch.inf)
                if entropies is not None:
                    entropies[chunk.index_n] = torch.special.entr(log_p.exp()).sum(-1)
                if any(ctx.needs_input_grad):
                    ctx.kept.append((chunk, hit, log_p, capped if s.form.squashes else None))
        ctx.settings = s
        ctx.temperature = temperature
        ctx.save_for_backward(*tensors)
        return log_probs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        tensors, s = ctx.saved_tensors, ctx.settings
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 10
        grads = [
            torch.zeros(x.shape, dtype=s.sums, device=x.device) if need else None
            for x, need in zip(tensors, ctx.needs_input_grad, strict=False)
        ]
        with without_autocast(tensors[0].device.type):
            for chunk, hit, log_p, capped in ctx.kept:
                probs = log_p.exp()
                grad = torch.zeros_like(log_p)
                if grad_log_probs is not None:
                    grad += grad_log_probs[chunk.index_n, None] * (hit.to(s.sums) - probs)
                if grad_entropy is not None:
                    # dH/dz_v = -p_v (log p_v + H); a probability of zero adds nothing.
                    entr = torch.special.entr(probs)
                    slope = entr - probs * entr.sum(-1, keepdim=True)
                    grad += grad_entropy[chunk.index_n, None] * slope
                grad *= s.form.scale
                grad /= _per_token(ctx.temperature, chunk.index_n)
                if capped is not None:
                    grad *= s.form.slope(capped)
                _add_gradients(grads, chunk, grad.masked_fill(~chunk.valid_nk, 0.0), tensors, s)
        found = [None if g is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)]
        return (*found, None, None, None, None, None)


def _per_token(temperature: float | Tensor, index: Tensor) -> float | Tensor:
    return temperature[index, None] if isinstance(temperature, Tensor) else temperature


def _capped_logits(chunk: _Chunk, tensors: tuple, s: _Settings) -> Tensor:
    """Logits of the kept ids before the temperature, ``[n, k]``; undefined where not valid."""
    hidden, weight, bias, adapter, adapter_weight = tensors
    kind = s.sums
    logits = torch.empty(chunk.ids_nk.shape, dtype=kind, device=hidden.device)
    state = hidden[chunk.index_n].to(s.factors).to(kind)
    for part in chunk.slices:
        ids = chunk.ids_nk[:, part]
        rows = weight[ids].to(s.factors).to(kind)
        logits[:, part] = torch.bmm(rows, state[:, :, None])[:, :, 0]
        if adapter is not None:
            low = adapter_weight[ids].to(s.factors).to(kind)
            own = adapter[chunk.index_n].to(s.factors).to(kind)
            logits[:, part] += torch.bmm(low, own[:, :, None])[:, :, 0]
        if bias is not None:
            logits[:, part] += bias[ids].to(kind)
    logits *= s.form.scale
    return s.form.squash_(logits)


def _add_gradients(
    grads: list[Tensor | None], chunk: _Chunk, grad_nk: Tensor, tensors: tuple, s: _Settings
) -> None:
    hidden, weight, _, adapter, adapter_weight = tensors
    pairs = [(hidden, weight, grads[0], grads[1])]
    if adapter is not None:
        pairs.append((adapter, adapter_weight, grads[3], grads[4]))
    for part in chunk.slices:
        ids, grad = chunk.ids_nk[:, part], grad_nk[:, part]
        for states, matrix, grad_states, grad_matrix in pairs:
            if grad_states is not None:
                rows = matrix[ids].to(s.factors).to(grad.dtype)
                grad_states.index_add_(0, chunk.index_n, torch.bmm(grad[:, None], rows)[:, 0])
            if grad_matrix is not None:
                own = states[chunk.index_n].to(s.factors).to(grad.dtype)
                outer = grad[:, :, None] * own[:, None]
                grad_matrix.index_add_(0, ids.flatten(), outer.flatten(0, 1))
        if grads[2] is not None:
            grads[2].index_add_(0, ids.flatten(), grad.flatten())

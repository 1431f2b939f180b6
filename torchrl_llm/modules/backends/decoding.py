"""Decoding loop: draw a token, record its log-prob, feed it back, until every row has ended.

The loop keeps only the logits of the last step, and removes finished rows from the batch. The last
id and the length of a row determine its finish reason. A :class:`Decoder` produces the logits.

Shape legend: ``B`` rows at the start, ``b`` rows still decoded, ``V`` vocabulary, ``R`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.functional import kept_ids, take_support
from torchrl_llm.modules.backends.backend_port import Cancelled, Completion, SamplingParams
from torchrl_llm.modules.backends.sampling import draw, penalize_repetition, sampling_log_probs

# A smaller batch must save more than copying the caches of the remaining rows costs.
_COMPACT_BELOW = 0.75
# On a GPU, checking whether all rows have ended waits for the device. On the CPU the check is free.
_GPU_SYNC_EVERY = 8

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


class Decoder(Protocol):
    """A model that decodes a batch of rows."""

    def advance(self, token_ids: Tensor) -> Tensor:
        """Append one id per row, int64 ``[b]``, and return the logits after it, ``[b, V]``."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, int64 indices into the current batch."""


class StopStrings:
    """Finds stop strings at the end of the sampled text.

    Args:
        tokenizer: decodes ids.
        stop: the strings.

    Raises:
        ConfigError: when there are strings but no tokenizer.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        if stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer to decode with; pass tokenizer= or stop_token_ids="
            )
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Each token contains at least one byte of text. Four more bytes cover a split character.
        self._window = max((len(s.encode()) for s in self._stop), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._stop)

    def ended(self, ids_bR: Tensor) -> Tensor:
        """Return whether the last token of each row completed a stop string.

        Args:
            ids_bR: int64 ``[b, R]``, sampled ids so far.

        Returns:
            bool ``[b]`` on the CPU.
        """
        tails = ids_bR[:, -self._window :].tolist()
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False)
        return torch.tensor([any(s in text for s in self._stop) for text in texts])


class _Context:
    """Input of penalties and native processors: prompts and sampled ids of the live rows."""

    def __init__(
        self, prompts: Sequence[Tensor], logits_BV: Tensor, penalty: float, pad_id: int
    ) -> None:
        device = logits_BV.device
        self.ids = torch.nn.utils.rnn.pad_sequence(
            list(prompts), batch_first=True, padding_value=pad_id, padding_side="left"
        ).to(device)
        self._penalty = penalty
        self._seen = torch.zeros(logits_BV.shape, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):  # pads do not count as seen
            self._seen[row, prompt.to(device)] = True

    def process(self, logits_BV: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
        if self._penalty != 1:
            logits_BV = penalize_repetition(logits_BV, self._seen, self._penalty)
        for processor in processors:
            logits_BV = processor(self.ids, logits_BV)
        return logits_BV

    def append(self, token_ids: Tensor) -> None:
        self.ids = torch.cat([self.ids, token_ids[:, None]], dim=1)
        self._seen.scatter_(1, token_ids[:, None], True)

    def keep(self, rows: Tensor) -> None:
        self.ids, self._seen = self.ids[rows], self._seen[rows]


def decode(
    decoder: Decoder,
    logits_BV: Tensor,
    prompts: Sequence[Tensor],
    params: SamplingParams,
    *,
    max_tokens: Tensor,
    end_ids: Sequence[int],
    stop_strings: StopStrings,
    processors: Sequence[LogitsProcessor] = (),
    pad_id: int = 0,
    cancelled: Cancelled = (),
) -> list[Completion]:
    """Decode every row to its end, or until it is cancelled.

    A cancelled row stays in the batch, unused, while other rows run, because a different batch size
    would change the last bits of their log-probs.

    Args:
        decoder: a decoder that has read the prompts.
        logits_BV: ``[B, V]``, its logits after the prompts.
        prompts: ``B`` int64 tensors, for penalties and processors.
        params: how to sample; the caller has already applied ``num_samples``.
        max_tokens: int64 ``[B]`` on the CPU, most tokens of each row, at least 1.
        end_ids: ids that end a row.
        stop_strings: strings that end a row.
        processors: functions from ids ``[b, T]`` and logits ``[b, V]`` to logits.
        pad_id: padding before shorter prompts in the ids for processors.
        cancelled: one function per prompt, which returns whether its rows are cancelled; or an
            empty sequence. On a GPU it is called every eighth step.

    Returns:
        ``B`` completions.

    Raises:
        BackendError: when the model's logits are not finite.
    """
    device, num_rows, longest = logits_BV.device, logits_BV.shape[0], int(max_tokens.max())
    generator = None
    if params.seed is not None:
        generator = torch.Generator(device).manual_seed(params.seed)
    ends = torch.tensor(sorted(set(end_ids)), dtype=torch.int64, device=device)
    limits = max_tokens.to(device)
    ids_BR = torch.zeros(num_rows, longest, dtype=torch.int64, device=device)
    log_probs_BR = torch.zeros(num_rows, longest, device=device)
    text_ends = torch.full((num_rows,), longest + 1)
    cuts = text_ends.clone()
    rows = torch.arange(num_rows, device=device)
    live = torch.ones(num_rows, dtype=torch.bool, device=device)
    needs_context = params.repetition_penalty != 1 or processors
    context = (
        _Context(prompts, logits_BV, params.repetition_penalty, pad_id) if needs_context else None
    )
    kept = _KeptIds() if params.record_support else None
    sync_every = 1 if device.type == "cpu" or stop_strings else _GPU_SYNC_EVERY

    for step in range(longest):
        raw_bV = logits_BV.float()
        used_bV = context.process(raw_bV, processors) if context else raw_bV
        if params.greedy:
            token_ids, log_probs_bV = used_bV.argmax(-1), sampling_log_probs(raw_bV, params)
        else:
            log_probs_bV = sampling_log_probs(used_bV, params)
            token_ids = draw(log_probs_bV, generator).clamp_max_(log_probs_bV.shape[-1] - 1)
        ids_BR[rows, step] = token_ids
        log_probs_BR[rows, step] = log_probs_bV.gather(-1, token_ids[:, None]).squeeze(-1)
        if kept is not None and params.keeps_ids:
            kept.append(rows, step, log_probs_bV)
        live &= ~(token_ids[:, None] == ends).any(-1)
        live &= limits > step + 1
        if stop_strings:
            hit = stop_strings.ended(ids_BR[rows, : step + 1].cpu())
            at = rows.cpu()[hit]
            text_ends[at] = text_ends[at].clamp_max(step + 1)
            live &= ~hit.to(device)
        if step + 1 == longest:
            break
        if (step + 1) % sync_every == 0:
            num_live = int(live.sum())
            if num_live == 0:
                break
            if cancelled:
                gone = torch.tensor([ask() for ask in cancelled])
                gone = gone.repeat_interleave(params.num_samples)
                cuts[gone] = cuts[gone].clamp_max(step + 1)
                if bool(gone[rows[live].cpu()].all()):
                    break
            if num_live <= _COMPACT_BELOW * live.shape[0]:
                staying = live.nonzero().squeeze(-1)
                decoder.keep(staying)
                rows, limits, live = rows[staying], limits[staying], live[staying]
                token_ids = token_ids[staying]
                if context:
                    context.keep(staying)
        if context:
            context.append(token_ids)
        logits_BV = decoder.advance(token_ids)

    return _completions(
        ids_BR.cpu(), log_probs_BR.cpu(), ends.cpu(), max_tokens, text_ends, cuts, kept
    )


class _KeptIds:
    """The supports of all steps so far, in sampling order."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def append(self, rows_b: Tensor, step: int, log_probs_bV: Tensor) -> None:
        parts = (rows_b, torch.full_like(rows_b, step), *kept_ids(log_probs_bV))
        self._parts.append(tuple(part.cpu() for part in parts))

    def split(self, lengths: Sequence[int]) -> list[Support]:
        """Return the supports of the first ``lengths[row]`` tokens of each row."""
        if not self._parts:
            return [Support.whole(length) for length in lengths]
        rows, steps, all_ids, all_counts = (
            torch.cat(column) for column in zip(*self._parts, strict=True)
        )
        # Sorting by row keeps the steps of each row in order.
        order = rows.argsort(stable=True)
        sizes = torch.tensor(lengths)
        order = order[steps[order] < sizes[rows[order]]]
        ids, counts = take_support(all_ids, all_counts, order)
        per_row = torch.zeros(len(lengths), dtype=torch.int64)
        per_row.index_add_(0, torch.arange(len(lengths)).repeat_interleave(sizes), counts.long())
        columns = zip(ids.split(per_row.tolist()), counts.split(lengths), strict=True)
        return [Support(some, own) for some, own in columns]


def _completions(
    ids_BR: Tensor,
    log_probs_BR: Tensor,
    ends: Tensor,
    limits: Tensor,
    text_ends: Tensor,
    cuts: Tensor,
    kept: _KeptIds | None,
) -> list[Completion]:
    """Cut each row after its first end or at its cancellation, and discard later steps."""
    is_end = torch.isin(ids_BR, ends)
    never = ids_BR.shape[1] + 1
    id_ends = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, never)
    stops = torch.minimum(id_ends, text_ends)
    own_ends = torch.minimum(stops, limits)
    lengths = torch.minimum(own_ends, cuts).tolist()
    reasons = torch.where(stops <= limits, int(FinishReason.STOP), int(FinishReason.LENGTH))
    reasons[cuts < own_ends] = int(FinishReason.ABORT)
    supports = [None] * len(lengths) if kept is None else kept.split(lengths)
    # One copy for all rows, without the tokens after their ends.
    inside = torch.arange(ids_BR.shape[1]) < torch.tensor(lengths)[:, None]
    recorded = log_probs_BR[inside]
    if not bool(torch.isfinite(recorded).all()):
        raise BackendError(
            "the model's logits are not finite numbers; its weights or its dtype are broken"
        )
    columns = (ids_BR[inside].split(lengths), recorded.split(lengths), reasons.tolist(), supports)
    return [
        Completion(ids, scores, FinishReason(reason), support)
        for ids, scores, reason, support in zip(*columns, strict=True)
    ]

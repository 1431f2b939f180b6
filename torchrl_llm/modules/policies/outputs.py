"""Answers and scores as the columns of a batch: ragged rows, masks from provenance, padded once.

Every column is cut from one flat tensor for the whole batch, which is many times cheaper than
building it row by row. Nothing here ever compares an id with a pad id.

Shape legend: ``B`` rows, ``S`` tokens of all rows together, ``T_b`` tokens of row ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.data.containers import LogProbs, Masks, Tokens, TokenSupport, TokenTrace
from torchrl_llm.data.enums import FinishReason, MaskReason, Source
from torchrl_llm.data.ragged import pad_rows, ragged_rows, read_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.scoring import Support
from torchrl_llm.modules.backends.base import Completion, SamplingParams
from torchrl_llm.modules.policies.rows import KeyNames, continues

__all__ = ["answered_columns", "pad_columns", "respond", "scored_columns", "with_tool_calls"]

_PAD: dict[str, tuple[float, Literal["left", "right"]]] = {
    "response": (0.0, "right"),
    "full": (0.0, "right"),
    "prompt": (0.0, "left"),
    "all_attention_mask": (False, "right"),
    "all_assistant_mask": (False, "right"),
    "source": (-1, "right"),
    "turn": (-1, "right"),
    "policy_version": (-1, "right"),
    "mask_reason": (int(MaskReason.NOT_SAMPLED), "right"),
    "token_ids": (0, "right"),
    "counts": (0, "right"),
}


def respond(
    prompts: Sequence[TokenRecord], completions: Sequence[Completion], policy_version: int
) -> list[TokenRecord]:
    """Append a completion to each prompt; the batched form of ``TokenRecord.respond``.

    Args:
        prompts: ``B`` records.
        completions: ``B`` sampled responses.
        policy_version: version of the weights that sampled them, where a completion does not say it
            itself.

    Returns:
        ``B`` records, whose tensors are views of one tensor a field.

    Example:
        >>> prompt = TokenRecord.from_prompt(torch.tensor([5]), torch.tensor([1]), 1)
        >>> done = Completion(torch.tensor([7]), torch.tensor([-0.5]), FinishReason.STOP)
        >>> [record] = respond([prompt], [done], 3)
        >>> record.policy_version.tolist(), record.turn.tolist(), record.num_messages
        ([-1, 3], [-1, 0], 2)
    """
    sizes = [completion.token_ids.shape[0] for completion in completions]
    longest = max(sizes, default=0)
    turns = [_turn(prompt) for prompt in prompts]
    # One tensor of each turn number serves every row: slices of it are free.
    by_turn = {t: torch.full((longest,), t, dtype=torch.int16) for t in set(turns)}
    sampled = torch.full((longest,), int(Source.SAMPLED), dtype=torch.int8)
    versions = torch.full((longest,), policy_version, dtype=torch.int32)
    fields = {
        "token_ids": [c.token_ids for c in completions],
        "source": [sampled[:size] for size in sizes],
        "turn": [by_turn[t][:size] for t, size in zip(turns, sizes, strict=True)],
        "policy_version": [
            versions[:size] if c.versions is None else c.versions
            for c, size in zip(completions, sizes, strict=True)
        ],
        "log_probs": [c.log_probs for c in completions],
    }
    lengths = [p.token_ids.shape[0] + size for p, size in zip(prompts, sizes, strict=True)]
    columns = {
        name: _join([getattr(p, name) for p in prompts], new).split(lengths)
        for name, new in fields.items()
    }
    return [
        TokenRecord(
            **{name: column[row] for name, column in columns.items()},
            num_messages=prompt.num_messages + (not continues(prompt)),
            finish_reason=completion.finish_reason,
            response_start=_response_start(prompt),
            fork_cause=prompt.fork_cause,
            support=prompt.support_with(completion.support, sizes[row]),
            earlier_turns=prompt.earlier_turns,
        )
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def _turn(prompt: TokenRecord) -> int:
    # A response that was cut goes on in the same turn; one that was only forced begins a turn.
    begun = continues(prompt) and bool((prompt.turn[prompt.response_start :] >= 0).any())
    return prompt.num_turns - begun


def _response_start(prompt: TokenRecord) -> int:
    return prompt.response_start if continues(prompt) else prompt.token_ids.shape[0]


def _join(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    return torch.cat([part for pair in zip(before, after, strict=True) for part in pair])


def answered_columns(
    prompts: Sequence[TokenRecord],
    completions: Sequence[Completion],
    records: Sequence[TokenRecord],
    params: SamplingParams,
    names: KeyNames,
    *,
    unscored: Sequence[bool],
    overlong: Sequence[bool],
    log_probs: bool = True,
) -> TensorDict:
    """The columns of answered prompts.

    Args:
        prompts: ``B`` records of the prompts.
        completions: ``B`` answers.
        records: ``B`` records of both.
        params: how they were sampled.
        names: names of the nodes.
        unscored: rows whose earlier turns have no known log-probs; these tokens are marked invalid.
        overlong: rows whose prompt was cut or dropped; earlier turns in it are marked overlong.
        log_probs: whether to write the log-probs.

    Returns:
        A dense root ``[B]`` with ragged nodes: tokens, masks, trace, log-probs, and the support
        where it was recorded. Earlier turns whose kept ids are not known (text and token prompts
        carry none) are marked off support.
    """
    lengths = [record.token_ids.shape[0] for record in records]
    sampled = torch.cat([record.source for record in records]) == Source.SAMPLED
    size = len(records)
    reasons = [completion.finish_reason for completion in completions]
    nodes: dict[str, Any] = {
        names.tokens: Tokens._from_tensordict(
            ragged_rows(
                {
                    "prompt": [prompt.token_ids for prompt in prompts],
                    "response": [completion.token_ids for completion in completions],
                    "full": [record.token_ids for record in records],
                    "finish_reason": torch.tensor(reasons, dtype=torch.int8).unbind(0),
                    "temperature": torch.full((size,), params.scoring_temperature).unbind(0),
                    "truncated_support": torch.full((size,), params.truncates_support).unbind(0),
                }
            )
        ),
        names.masks: _masks(lengths, sampled),
        names.trace: TokenTrace._from_tensordict(
            ragged_rows(
                {
                    "source": [record.source for record in records],
                    "turn": [record.turn for record in records],
                    "policy_version": [record.policy_version for record in records],
                    "mask_reason": _mask_reasons(
                        prompts,
                        completions,
                        sampled,
                        lengths,
                        {
                            MaskReason.OFF_SUPPORT: [
                                params.keeps_ids and prompt.support is None for prompt in prompts
                            ],
                            MaskReason.INVALID: unscored,
                            MaskReason.OVERLONG: overlong,
                        },
                    ),
                }
            )
        ),
    }
    if log_probs:
        nodes[names.log_probs] = LogProbs._from_tensordict(
            ragged_rows(
                {
                    "response": [completion.log_probs for completion in completions],
                    "full": [record.log_probs for record in records],
                }
            )
        )
    if params.record_support or any(record.support is not None for record in records):
        nodes[names.support] = _support(records)
    return TensorDict._new_unsafe(nodes, batch_size=torch.Size([size]))


def _support(records: Sequence[TokenRecord]) -> TokenSupport:
    known = [
        Support.whole(record.token_ids.shape[0]) if record.support is None else record.support
        for record in records
    ]
    columns = {name: [getattr(one, name) for one in known] for name in Support._fields}
    return TokenSupport._from_tensordict(ragged_rows(columns))


def _masks(lengths: Sequence[int], assistant: Tensor) -> Masks:
    return Masks._from_tensordict(
        ragged_rows(
            {
                "all_attention_mask": torch.ones_like(assistant).split(lengths),
                "all_assistant_mask": assistant.split(lengths),
            }
        )
    )


def _mask_reasons(
    prompts: Sequence[TokenRecord],
    completions: Sequence[Completion],
    sampled: Tensor,
    lengths: Sequence[int],
    earlier: Mapping[MaskReason, Sequence[bool]],
) -> list[Tensor]:
    """A reason a token; ``earlier`` flags rows whose prompt's sampled tokens get another one."""
    flat = torch.where(sampled, int(MaskReason.TRAINED), int(MaskReason.NOT_SAMPLED)).to(torch.int8)
    rows = list(flat.split(lengths))
    masks = sampled.split(lengths)
    for row, prompt in enumerate(prompts):
        start = prompt.token_ids.shape[0]
        for reason, flags in earlier.items():
            if flags[row]:
                rows[row][:start][masks[row][:start]] = int(reason)
        if completions[row].finish_reason == FinishReason.ABORT:
            rows[row][start:] = int(MaskReason.TRUNCATED)
    return rows


def scored_columns(
    token_ids: Sequence[Tensor],
    assistant: Sequence[Tensor],
    log_probs: Tensor,
    names: KeyNames,
) -> TensorDict:
    """The columns of scored rows.

    Args:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        assistant: ``B`` bool tensors ``[T_b]``.
        log_probs: float32, all but the first token of each row, row after row.
        names: names of the nodes.

    Returns:
        A dense root ``[B]`` with ragged nodes: tokens, masks, log-probs (0.0 at index 0).
    """
    lengths = [ids.shape[0] for ids in token_ids]
    scores = log_probs.split([max(length - 1, 0) for length in lengths])
    zero = log_probs.new_zeros(1)
    nodes = {
        names.tokens: Tokens._from_tensordict(ragged_rows({"full": token_ids})),
        names.masks: _masks(lengths, torch.cat(list(assistant))),
        names.log_probs: LogProbs._from_tensordict(
            ragged_rows(
                {
                    "full": [
                        torch.cat([zero, row]) if length else row
                        for row, length in zip(scores, lengths, strict=True)
                    ]
                }
            )
        ),
    }
    return TensorDict._new_unsafe(nodes, batch_size=torch.Size([len(lengths)]))


def pad_columns(flat: TensorDict, pad_token_id: int, names: KeyNames) -> TensorDict:
    """Make the ragged nodes dense: prompts padded on the left, everything else on the right.

    Args:
        flat: as the other functions here return it.
        pad_token_id: fills token columns; what is padding is said by the masks alone.
        names: names of the nodes.
    """
    out = flat.copy()
    for name in (names.tokens, names.masks, names.log_probs, names.trace, names.support):
        view = flat.get(name, None)
        if view is None:
            continue
        node = view._tensordict
        dense = {}
        for column in sorted(node.keys()):
            rows = read_rows(node, column)
            if rows[0].ndim == 0:
                dense[column] = torch.stack(rows)
                continue
            value, side = _PAD[column]
            if name == names.tokens:
                value = pad_token_id
            dense[column] = pad_rows(rows, value, side=side)
        padded = TensorDict._new_unsafe(dense, batch_size=flat.batch_size)
        out.set(name, type(view)._from_tensordict(padded))
    return out


def with_tool_calls(
    completions: Sequence[Completion], messages: Sequence[Mapping[str, Any]]
) -> list[Completion]:
    """Say so where a finished response asks for tools.

    Args:
        completions: ``B`` responses.
        messages: ``B`` messages that they were read as.
    """
    return [
        completion._replace(finish_reason=FinishReason.TOOL_CALLS)
        if message.get("tool_calls") and completion.finish_reason == FinishReason.STOP
        else completion
        for completion, message in zip(completions, messages, strict=True)
    ]

"""Columns that a policy writes: ragged rows, with masks from provenance, padded once if requested.

Every column is cut from one flat tensor for the whole batch, which is many times cheaper than
building it row by row. This module never compares an id with a pad id.

Shape legend: ``B`` rows, ``S`` tokens of all rows together, ``T_b`` tokens of row ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.data import token_facts
from torchrl_llm.data.enums import FinishReason, MaskReason, Source
from torchrl_llm.data.ragged import pad_rows, ragged_rows, read_rows, spread_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.views import LogProbs, Masks, Tokens, TokenSupport, TokenTrace
from torchrl_llm.modules.backends.backend_port import Completion, SamplingParams
from torchrl_llm.modules.policies.row_readers import KeyNames


def answered_columns(
    prompts: Sequence[TokenRecord],
    completions: Sequence[Completion],
    records: Sequence[TokenRecord],
    params: Sequence[SamplingParams],
    names: KeyNames,
    *,
    unscored: Sequence[bool],
    overlong: Sequence[bool],
    log_probs: bool = True,
) -> TensorDict:
    """Return the columns of answered prompts.

    Args:
        prompts: ``B`` records of the prompts.
        completions: ``B`` answers.
        records: ``B`` records of prompts and answers.
        params: sampling parameters of each.
        names: names of the nodes.
        unscored: rows whose earlier turns have no known log-probs; the tokens of these turns are
            marked invalid.
        overlong: rows whose prompt was cut or dropped; earlier turns in the prompt are marked
            overlong.
        log_probs: whether to write the log-probs.

    Returns:
        A dense root ``[B]`` with ragged nodes: tokens, masks, trace, log-probs, registered facts,
        and the support if it was recorded. A response is a slice of ``full``. Earlier turns without
        known kept ids (text and token prompts have none) are marked off support.
    """
    lengths = [record.token_ids.shape[0] for record in records]
    sampled = torch.cat([record.source for record in records]) == Source.SAMPLED
    size = len(records)
    starts = [prompt.token_ids.shape[0] for prompt in prompts]
    reasons = [completion.finish_reason for completion in completions]
    full = [record.token_ids for record in records]
    tokens = {
        "prompt": [prompt.token_ids for prompt in prompts],
        "response": _responses(full, starts),
        "full": full,
        "finish_reason": torch.tensor(reasons, dtype=torch.int8).unbind(0),
        "temperature": torch.tensor([own.scoring_temperature for own in params]).unbind(0),
        "truncated_support": torch.tensor([own.truncates_support for own in params]).unbind(0),
    }
    trace = {
        fact.key[1]: [getattr(record, fact.name) for record in records]
        for fact in map(token_facts.find_fact, token_facts.RECORD_COLUMNS)
        if fact.key[0] == "trace"
    }
    asked = zip(params, prompts, strict=True)
    not_kept = [own.keeps_ids and prompt.support is None for own, prompt in asked]
    earlier = {
        MaskReason.OFF_SUPPORT: not_kept,
        MaskReason.INVALID: unscored,
        MaskReason.OVERLONG: overlong,
    }
    trace["mask_reason"] = _mask_reasons(prompts, completions, sampled, lengths, earlier)
    nodes: dict[str, Any] = {
        names.tokens: _node(Tokens, tokens),
        names.masks: _masks(lengths, sampled),
        names.trace: _node(TokenTrace, trace),
    }
    if log_probs:
        scores = [record.log_probs for record in records]
        nodes[names.log_probs] = _node(
            LogProbs, {"response": _responses(scores, starts), "full": scores}
        )
    kept = any(record.support is not None for record in records)
    if kept or any(own.record_support for own in params):
        nodes[names.support] = _support(records)
    nodes |= _added_nodes(records, starts)
    return TensorDict._new_unsafe(nodes, batch_size=torch.Size([size]))


def _node(cls: Any, columns: Mapping[str, Sequence[Tensor]]) -> Any:
    return cls._from_tensordict(ragged_rows(columns))


def _responses(rows: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Return the responses of whole rows, as views."""
    return [row[start:] for row, start in zip(rows, starts, strict=True)]


def _added_nodes(records: Sequence[TokenRecord], starts: Sequence[int]) -> dict[str, Any]:
    """Return the nodes of registered facts."""
    columns: dict[tuple[str, str], Sequence[Tensor]] = {}
    for fact in token_facts.added_facts():
        rows = [record.facts[fact.name] for record in records]
        columns[fact.key] = rows
        if fact.parts:
            columns[fact.key[0], "response"] = _responses(rows, starts)
    return {node: ragged_rows(rows) for node, rows in token_facts.by_node(columns).items()}


def _support(records: Sequence[TokenRecord]) -> TokenSupport:
    known = [
        Support.whole(record.token_ids.shape[0]) if record.support is None else record.support
        for record in records
    ]
    columns = {name: [getattr(one, name) for one in known] for name in Support._fields}
    return _node(TokenSupport, columns)


def _masks(lengths: Sequence[int], assistant: Tensor) -> Masks:
    attended = torch.ones_like(assistant).split(lengths)
    return _node(
        Masks, {"all_attention_mask": attended, "all_assistant_mask": assistant.split(lengths)}
    )


def _mask_reasons(
    prompts: Sequence[TokenRecord],
    completions: Sequence[Completion],
    sampled: Tensor,
    lengths: Sequence[int],
    earlier: Mapping[MaskReason, Sequence[bool]],
) -> list[Tensor]:
    """Return a reason per token; ``earlier`` sets the reason of sampled tokens in prompts."""
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
    token_ids: Sequence[Tensor], assistant: Sequence[Tensor], log_probs: Tensor, names: KeyNames
) -> TensorDict:
    """Return the columns of scored rows.

    Args:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        assistant: ``B`` bool tensors ``[T_b]``.
        log_probs: float32, for all tokens but the first of each row, row after row.
        names: names of the nodes.

    Returns:
        A dense root ``[B]`` with ragged nodes: tokens, masks, log-probs (0.0 at index 0).
    """
    lengths = [ids.shape[0] for ids in token_ids]
    scores = log_probs.split([max(length - 1, 0) for length in lengths])
    zero = log_probs.new_zeros(1)
    full = [
        torch.cat([zero, row]) if length else row
        for row, length in zip(scores, lengths, strict=True)
    ]
    nodes = {
        names.tokens: _node(Tokens, {"full": token_ids}),
        names.masks: _masks(lengths, torch.cat(list(assistant))),
        names.log_probs: _node(LogProbs, {"full": full}),
    }
    return TensorDict._new_unsafe(nodes, batch_size=torch.Size([len(lengths)]))


def pad_columns(
    flat: TensorDict, pad_token_id: int, names: KeyNames, places: Tensor | None = None
) -> TensorDict:
    """Make the ragged nodes dense, so that ``full[:, P:]`` is the response.

    Prompts are padded on the left to ``P`` tokens, responses on the right. ``full`` and the columns
    aligned with it contain the prompt, then the response. Kept ids are padded on the right.

    Args:
        flat: result of :func:`answered_columns` or :func:`scored_columns`.
        pad_token_id: fills token columns. Only the masks identify the padding.
        names: names of the nodes.
        places: bool ``[B, T]``, positions of the tokens of ``full``, for rows without a response.
    """
    out = flat.copy()
    if places is None:
        full, response = (read_rows(flat, (names.tokens, part)) for part in ("full", "response"))
        sizes = [
            (ids.shape[0], answer.shape[0]) for ids, answer in zip(full, response, strict=True)
        ]
        ones = [torch.ones(n, dtype=torch.bool).tensor_split([n - r]) for n, r in sizes]
        prompts, responses = zip(*ones, strict=True)
        places = torch.cat((pad_rows(prompts, False, side="left"), pad_rows(responses, False)), 1)
    for node in ("tokens", "log_probs", "trace", "support"):
        name = getattr(names, node)
        view = flat.get(name, None)
        if view is not None:
            dense = _dense(view._tensordict, node, pad_token_id, places)
            padded = TensorDict._new_unsafe(dense, batch_size=flat.batch_size)
            out.set(name, type(view)._from_tensordict(padded))
    masks = _dense(flat.get(names.masks)._tensordict, "masks", pad_token_id, places)
    out.set(names.masks, _node(Masks, _rows_of(masks)))
    for name in dict.fromkeys(fact.key[0] for fact in token_facts.added_facts()):
        view = flat.get(name, None)
        if view is not None:
            out.set(name, ragged_rows(_rows_of(_dense(view, name, pad_token_id, places))))
    return out


def _rows_of(dense: dict[str, Tensor]) -> dict[str, Sequence[Tensor]]:
    """Return rows of one length, for a lazy stack.

    A dense node would not work: an assignment to a row of a mask would not reach the batch, and the
    ragged next prompts of an environment would not fit into the node of an added fact.
    """
    return {column: rows.unbind(0) for column, rows in dense.items()}


def _dense(node: TensorDictBase, name: str, pad_token_id: int, places: Tensor) -> dict[str, Tensor]:
    dense = {}
    for column in sorted(node.keys()):
        rows = read_rows(node, column)
        if rows[0].ndim == 0:
            dense[column] = torch.stack(rows)
            continue
        value, side = token_facts.padding_of(name, column)
        value = pad_token_id if name == "tokens" else value
        own = column in ("prompt", "response") or (name, column) == ("support", "token_ids")
        if own:
            dense[column] = pad_rows(rows, value, side=side)
        else:
            dense[column] = spread_rows(rows, places, value)
    return dense


def with_tool_calls(
    completions: Sequence[Completion], messages: Sequence[Mapping[str, Any]]
) -> list[Completion]:
    """Mark finished responses that call tools.

    Args:
        completions: ``B`` responses.
        messages: the responses as ``B`` messages.
    """
    return [
        completion._replace(finish_reason=FinishReason.TOOL_CALLS)
        if message.get("tool_calls") and completion.finish_reason == FinishReason.STOP
        else completion
        for completion, message in zip(completions, messages, strict=True)
    ]

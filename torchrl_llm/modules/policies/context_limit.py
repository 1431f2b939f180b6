"""Handles prompts that do not fit into the model's context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchrl_llm.data.overlong import OnOverlong
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.errors import OverlongError

_GREW = (
    ". It grew over the turns of a conversation: append torchrl_llm.envs.transforms.ContextLimit("
    "policy.longest_prompt, policy.formatter) to the environment, which ends such an episode in "
    "time"
)


class Fitted(NamedTuple):
    """Prompts after :func:`fit_context`.

    Attributes:
        records: ``B`` records, shorter for truncated prompts.
        overlong: ``B`` flags of prompts that did not fit.
        answered: ``B`` flags of prompts that are sent to the model.
    """

    records: list[TokenRecord]
    overlong: list[bool]
    answered: list[bool]


def fit_context(
    records: Sequence[TokenRecord],
    max_length: int | None,
    max_prompt_length: int | None,
    max_new_tokens: int,
    on_overlong: OnOverlong,
    asked: Sequence[bool] | None = None,
) -> Fitted:
    """Handle prompts that leave no room for one token, or exceed ``max_prompt_length``.

    Args:
        records: ``B`` prompts.
        max_length: tokens of the context; ``None`` without a limit.
        max_prompt_length: most tokens of a prompt; ``None`` if only the context limits it.
        max_new_tokens: number of tokens that a truncated prompt leaves free, if the context is
            large enough.
        on_overlong: ``"error"`` raises; ``"drop"`` gives the row an empty, aborted response;
            ``"truncate"`` cuts the beginning of the prompt off.
        asked: ``B`` flags of the rows to answer; the others pass unchanged.

    Raises:
        OverlongError: for the first such prompt under ``"error"``.
    """
    limit = longest_prompt(max_length, max_prompt_length)
    asked = [True] * len(records) if asked is None else list(asked)
    longest = math.inf if limit is None else limit
    overlong = [
        wanted and record.token_ids.shape[0] > longest
        for record, wanted in zip(records, asked, strict=True)
    ]
    if not any(overlong):
        return Fitted(list(records), overlong, asked)
    if on_overlong == "error":
        row = overlong.index(True)
        reason = f"the model's context holds {max_length}, of which a response needs at least one"
        if limit == max_prompt_length:
            reason = f"max_prompt_length is {max_prompt_length}"
        raise OverlongError(
            f"the prompt of row {row} has {records[row].token_ids.shape[0]} tokens and {reason}; "
            'shorten it, or set on_overlong="drop" or "truncate"'
            + _GREW
            * bool(records[row].num_turns)
        )
    if on_overlong == "drop":
        fits = [yes and not flag for yes, flag in zip(asked, overlong, strict=True)]
        return Fitted(list(records), overlong, fits)
    kept = limit if max_length is None else min(limit, max(1, max_length - max_new_tokens))
    fitted = [
        _last(record, kept) if flag else record
        for record, flag in zip(records, overlong, strict=True)
    ]
    return Fitted(fitted, overlong, asked)


def longest_prompt(max_length: int | None, max_prompt_length: int | None) -> int | None:
    """Return the most tokens of a prompt; ``None`` without a limit.

    Args:
        max_length: tokens of the context, of which a response needs at least one.
        max_prompt_length: the configured limit.

    Example:
        >>> longest_prompt(2048, None), longest_prompt(2048, 512), longest_prompt(None, None)
        (2047, 512, None)
    """
    room = None if max_length is None else max_length - 1
    return min((n for n in (room, max_prompt_length) if n is not None), default=None)


def _last(record: TokenRecord, kept: int) -> TokenRecord:
    start = record.response_start
    cut = record.token_ids.shape[0] - kept
    return record.cut(
        cut,
        cut + kept,
        response_start=None if start is None else max(start - cut, 0),
        fork_cause="overlong",
        earlier_turns=record.num_turns,
    )

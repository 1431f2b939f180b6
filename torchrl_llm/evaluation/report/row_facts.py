"""The facts of one row for display: texts, numbers, and columns of facts per token.

If a row lacks advantages, trace or rewards, these facts are empty.
:func:`~torchrl_llm.evaluation.report.explain` and the page of rollouts use these facts.

Shape legend: ``T`` tokens of ``("tokens", "full")`` without padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.failures import failures_of
from torchrl_llm.data.messages import message_text
from torchrl_llm.errors import DataError

MASKS = {
    MaskReason.TRAINED: "trained",
    MaskReason.NOT_SAMPLED: "the model did not choose it",
    MaskReason.TRUNCATED: "its response was cut by a limit, and such ones are left out",
    MaskReason.STALE: "sampled by weights that are too old",
    MaskReason.FILTERED: "its row was filtered out",
    MaskReason.INVALID: "its row has no valid reward",
    MaskReason.OFF_SUPPORT: "outside what sampling could choose from",
    MaskReason.OVERLONG: "beyond the longest row that is trained",
}
"""Why a token is or is not trained, in words."""

# Texts that are shown separately or are too long for a label.
_SHOWN = {"query", "answer", "text", "error"}
_LONGEST_LABEL = 40
_no_tokens = partial(np.zeros, 0, np.int8)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """The facts of one row; ``None``, NaN or an empty text if unknown.

    Attributes:
        step: step of training.
        group_id: id of the group of answers to one prompt.
        traj_id: id of the episode.
        turn: turn of the episode.
        reward: reward, summed over the response; NaN without a valid reward.
        parts: maps the name of each component of the reward to its value; NaN if it failed.
        finish: how the response ended.
        truncation: why the environment cut the episode.
        errors: failures, with tracebacks.
        labels: short texts for filtering rows: agent, origin, fate.
        messages: role and text of each message.
        prompt: text of the prompt.
        response: text of the last response.
        expected: the answer in the data.
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of ``Source``.
        turns: int16 ``[T]``, turn of each token; -1 where not sampled.
        policy_version: int32 ``[T]``, version of the policy that sampled the token; -1 where not
            sampled.
        mask_reason: int8 ``[T]``, codes of ``MaskReason``.
        log_probs: float32 ``[T]`` in nats; NaN where not sampled.
        advantage: float32 ``[T]``; NaN where not trained.
        ratio: float32 ``[T]``, p(trainer before its updates) / p(sampler); NaN where unknown.
    """

    step: int | None = None
    group_id: int | None = None
    traj_id: int | None = None
    turn: int | None = None
    reward: float = math.nan
    parts: dict[str, float] = field(default_factory=dict)
    finish: str = ""
    truncation: str = ""
    errors: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    messages: list[tuple[str, str]] = field(default_factory=list)
    prompt: str = ""
    response: str = ""
    expected: str = ""
    token_ids: np.ndarray = field(default_factory=_no_tokens)
    source: np.ndarray = field(default_factory=_no_tokens)
    turns: np.ndarray = field(default_factory=_no_tokens)
    policy_version: np.ndarray = field(default_factory=_no_tokens)
    mask_reason: np.ndarray = field(default_factory=_no_tokens)
    log_probs: np.ndarray = field(default_factory=_no_tokens)
    advantage: np.ndarray = field(default_factory=_no_tokens)
    ratio: np.ndarray = field(default_factory=_no_tokens)

    @classmethod
    def of(cls, row: TensorDictBase) -> RowFacts:
        """Read a row.

        Args:
            row: a row without batch dimension, from a policy, a collector, a buffer (also padded)
                or a store.

        Raises:
            DataError: when the argument is not a single row, has no token ids, or has columns of a
                different length.
        """
        if not isinstance(row, TensorDictBase) or row.batch_dims:
            raise DataError(
                "a row is a tensordict without batch dimension, got "
                f"{getattr(row, 'batch_size', type(row).__name__)}; index the rows, as in rows[0]"
            )
        history = row.get(("history", "full"), None)
        chat = () if history is None else history.chats[0]
        messages = [(str(each.get("role", "")), message_text(dict(each))) for each in chat]
        answers = [text for role, text in messages[-1:] if role not in ("system", "user", "tool")]
        asked = [text for role, text in messages if role == "user"]
        finish = _number(row, ("tokens", "finish_reason"))
        cut = _number(row, ("next", "truncation_reason"))
        return cls(
            **{name: _number(row, name) for name in ("step", "group_id", "traj_id", "turn")},
            reward=_sum(_get(row, ("next", "reward")), _get(row, ("next", "reward_valid"))),
            parts={
                name: _sum(_get(part, "value"), _get(part, "valid"))
                for name, part in (row.get(("next", "rewards"), None) or {}).items()
            },
            finish="" if finish is None else name_of(FinishReason, finish),
            truncation="" if cut in (None, -1) else name_of(TruncationReason, cut),
            errors=[str(failure) for failure in failures_of(row)],
            labels={name: text for name in row.keys() if _is_label(name, text := _get(row, name))},
            messages=messages,
            prompt=_text(row, "query") or (asked[0] if asked else _text(row, ("text", "prompt"))),
            response=answers[0] if answers else _text(row, ("text", "response")),
            expected=_text(row, "answer"),
            **_token_columns(row),
        )

    @classmethod
    def of_record(
        cls, record: Mapping[str, Any], group_id: int, labels: Mapping[str, str]
    ) -> RowFacts:
        """Read an answer of an evaluation, which has no tokens.

        Args:
            record: record of :func:`~torchrl_llm.evaluation.answer_record`.
            group_id: id of the group of answers to one prompt.
            labels: further labels, before the labels of the record.
        """
        chat = record.get("messages") or ()
        messages = [(str(each.get("role", "")), message_text(each)) for each in chat]
        outcome = "invalid" if not record["valid"] else "right" if record["success"] else "wrong"
        texts = {name: text for name, text in record.items() if _is_label(name, text)}
        return cls(
            group_id=group_id,
            reward=float(record["reward"]) if record["valid"] else math.nan,
            finish=name_of(FinishReason, FinishReason.LENGTH) if record.get("cut") else "",
            errors=[] if record["valid"] else [str(record.get("error", ""))],
            labels={"answer is": outcome, **labels, **texts},
            messages=messages,
            prompt=prompt_of(record),
            response=messages[-1][1] if messages else str(record.get("text", "")),
            expected=str(record.get("answer", "")),
        )

    @property
    def sampled(self) -> np.ndarray:
        """Which tokens the model sampled, bool ``[T]``."""
        return self.source == Source.SAMPLED

    @property
    def mask_counts(self) -> dict[int, int]:
        """Count the sampled tokens that are not trained, by the code of the reason."""
        codes, counts = np.unique(self.mask_reason[self.sampled], return_counts=True)
        return {int(c): int(n) for c, n in zip(codes, counts, strict=True) if c}


def prompt_of(record: Mapping[str, Any]) -> str:
    """Return the prompt of an evaluation's answer; empty if its record does not have it.

    Args:
        record: record of the answer.
    """
    asked = (m for m in record.get("messages") or () if m.get("role") == "user")
    return str(record["query"]) if "query" in record else message_text(next(asked, {}))


def name_of(codes: type[IntEnum], code: int) -> str:
    """Return the word for a code.

    Args:
        codes: enumeration of the codes.
        code: a code; for an unknown code the result is its number.

    Example:
        >>> name_of(MaskReason, 6), name_of(MaskReason, 77)
        ('off support', 'code 77')
    """
    known = {int(each): each.name.lower().replace("_", " ") for each in codes}
    return known.get(int(code), f"code {code}")


def _is_label(name: str, value: Any) -> bool:
    return isinstance(value, str) and name not in _SHOWN and 0 < len(value) <= _LONGEST_LABEL


def _get(row: TensorDictBase, key: NestedKey) -> Any:
    value = row.get(key, None)
    return value if isinstance(value, Tensor) else getattr(value, "data", value)


def _number(row: TensorDictBase, key: NestedKey) -> int | None:
    value = _get(row, key)
    return int(value.flatten()[-1]) if isinstance(value, Tensor) and value.numel() else None


def _text(row: TensorDictBase, key: NestedKey) -> str:
    value = _get(row, key)
    if isinstance(value, (Chat, list, tuple)):
        value = message_text(dict(value[-1])) if len(value) else ""
    return "" if value is None else str(value.tolist() if isinstance(value, Tensor) else value)


def _sum(values: Tensor | None, valid: Tensor | None) -> float:
    known = values is not None and (valid is None or bool(valid.all()))
    return float(values.double().sum()) if known else math.nan


def _token_columns(row: TensorDictBase) -> dict[str, np.ndarray]:
    ids = _get(row, ("tokens", "full"))
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        keys = sorted(".".join(key) if isinstance(key, tuple) else key for key in row.keys(True))
        raise DataError(f"a row needs its token ids [T] at ('tokens', 'full'); it has {keys}")
    count = ids.shape[0]

    def column(*key: str) -> Tensor | None:
        value = _get(row, key)
        if value is None or value.numel() not in (1, count):
            if value is None:
                return None
            raise DataError(f"{key} has {value.numel()} values, and the row has {count} tokens")
        return value.flatten().expand(count)

    source, reason = column("trace", "source"), column("trace", "mask_reason")
    if source is None:  # a row of TorchRL, or a row made by hand
        chosen, prompt = column("masks", "all_assistant_mask"), _get(row, ("tokens", "prompt"))
        if chosen is None:
            chosen = torch.arange(count) >= (count if prompt is None else prompt.shape[0])
        source = torch.where(chosen, int(Source.SAMPLED), int(Source.PROMPT))
    sampled = source == Source.SAMPLED
    if reason is None:
        reason = torch.where(sampled, int(MaskReason.TRAINED), int(MaskReason.NOT_SAMPLED))
    there = column("masks", "all_attention_mask")
    there = source >= 0 if there is None else there.bool()
    log_probs, scored = column("log_probs", "full"), column("prox_log_probs", "full")
    ratio = None if scored is None or log_probs is None else (scored - log_probs).exp()
    nothing = torch.full((count,), -1)

    def known(values: Tensor | None, where: Tensor) -> Tensor:
        return nothing.float() * math.nan if values is None else values.where(where, math.nan)

    columns = {
        "token_ids": ids,
        "source": source.to(torch.int8),
        "turns": column("trace", "turn"),
        "policy_version": column("trace", "policy_version"),
        "mask_reason": reason.to(torch.int8),
        "log_probs": known(log_probs, sampled),
        "advantage": known(column("advantage"), sampled & (reason == MaskReason.TRAINED)),
        "ratio": known(ratio, sampled),
    }
    return {k: (nothing if v is None else v)[there].numpy() for k, v in columns.items()}

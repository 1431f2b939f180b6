"""One row as people look at it: numbers and words for what happened, and a column for each fact.

Nothing is guessed: a row without advantages, trace or rewards has none here. Both
:func:`~torchrl_llm.evaluation.report.explain` and the page of rollouts are made of this.

Shape legend: ``T`` tokens of ``("tokens", "full")`` without padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.column import Chat
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.failures import failures_of
from torchrl_llm.data.messages import message_text
from torchrl_llm.errors import DataError

MASKS = {
    MaskReason.TRAINED: "trained",
    MaskReason.NOT_SAMPLED: "not sampled: the model did not choose it",
    MaskReason.TRUNCATED: "its response was cut by a limit, and such ones are left out",
    MaskReason.STALE: "sampled by weights that are too old",
    MaskReason.FILTERED: "its row was filtered out",
    MaskReason.INVALID: "its row has no valid reward",
    MaskReason.OFF_SUPPORT: "outside what sampling could choose from",
    MaskReason.OVERLONG: "beyond the longest row that is trained",
}
"""Why a token is or is not trained, in words."""

# Texts of a row that are shown by themselves, or that say nothing to choose rows by.
_SHOWN = {"query", "answer", "text", "history"}
# A text that is longer is no label.
_LONGEST_LABEL = 40


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What one row says of itself; ``None``, NaN or an empty text where it says nothing.

    Attributes:
        step: of training.
        group_id: of the answers to one prompt.
        traj_id: of the episode.
        turn: of the episode.
        reward: summed over tokens; NaN without a valid one.
        parts: name to value of each component of the reward; NaN where it failed.
        finish: how the last response ended.
        truncation: why the environment cut the episode.
        errors: what failed, a line each.
        labels: short texts by which rows can be told apart: agent, origin, domain.
        messages: role and text of each message.
        prompt: what was asked last.
        response: what was answered.
        expected: the answer that the data has.
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of ``Source``.
        turns: int16 ``[T]``, -1 where not sampled.
        policy_version: int32 ``[T]``, -1 where not sampled.
        mask_reason: int8 ``[T]``, codes of ``MaskReason``.
        log_probs: float32 ``[T]`` in nats; NaN where not sampled.
        advantage: float32 ``[T]``; NaN where not trained.
        ratio: float32 ``[T]``, p(trainer) / p(sampler); NaN where not sampled.
    """

    step: int | None
    group_id: int | None
    traj_id: int | None
    turn: int | None
    reward: float
    parts: dict[str, float]
    finish: str
    truncation: str
    errors: list[str]
    labels: dict[str, str]
    messages: list[tuple[str, str]]
    prompt: str
    response: str
    expected: str
    token_ids: np.ndarray
    source: np.ndarray
    turns: np.ndarray
    policy_version: np.ndarray
    mask_reason: np.ndarray
    log_probs: np.ndarray
    advantage: np.ndarray
    ratio: np.ndarray

    @property
    def sampled(self) -> np.ndarray:
        """Which tokens the model chose, bool ``[T]``."""
        return self.source == Source.SAMPLED

    @classmethod
    def of(cls, row: TensorDictBase) -> RowFacts:
        """Read a row.

        Args:
            row: without batch dimension; of a policy, a collector, a buffer (padded too) or a
                store.

        Raises:
            DataError: it is no single row, or has no token ids.
        """
        if not isinstance(row, TensorDictBase) or row.batch_dims:
            shape = list(getattr(row, "batch_size", ()))
            raise DataError(
                f"a row is a tensordict without batch dimension, got {type(row).__name__} {shape}; "
                "pass a stack of rows and the index of one"
            )
        columns = _token_columns(row)
        messages = _messages(row)
        query, asked, said = _text(row, "query"), "", ""
        if messages:
            answered = messages[-1][0] not in ("system", "user", "tool")
            said = messages[-1][1] if answered else ""
            asked = next((t for r, t in reversed(messages) if r in ("user", "tool")), "")
            asked = next((t for r, t in messages if r == "user"), asked)
        truncation = _number(row, ("next", "truncation_reason"))
        finish = _number(row, ("tokens", "finish_reason"))
        return cls(
            step=_number(row, "step"),
            group_id=_number(row, "group_id"),
            traj_id=_number(row, "traj_id"),
            turn=_number(row, "turn"),
            reward=_reward(row),
            parts=_parts(row),
            finish="" if finish is None else name_of(FinishReason, finish),
            truncation=""
            if truncation in (None, TruncationReason.NONE)
            else name_of(TruncationReason, truncation),
            errors=_errors(row),
            labels=_labels(row),
            messages=messages,
            prompt=query or asked or _text(row, ("text", "prompt")),
            response=said or _text(row, ("text", "response")),
            expected=_text(row, "answer"),
            **columns,
        )

    @property
    def mask_counts(self) -> dict[int, int]:
        """Code of each reason to how many sampled tokens are not trained for it."""
        codes, counts = np.unique(self.mask_reason[self.sampled], return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return {code: count for code, count in pairs if code != MaskReason.TRAINED}


def _get(row: TensorDictBase, key: NestedKey) -> Any:
    value = row.get(key, None)
    return value if isinstance(value, Tensor) else getattr(value, "data", value)


def _number(row: TensorDictBase, key: NestedKey) -> int | None:
    value = _get(row, key)
    if isinstance(value, Tensor):
        return int(value.flatten()[-1]) if value.numel() else None
    return value if isinstance(value, int) else None


def _text(row: TensorDictBase, key: NestedKey) -> str:
    value = _get(row, key)
    if isinstance(value, (Chat, list, tuple)):
        value = message_text(dict(value[-1])) if len(value) else ""
    return "" if value is None or isinstance(value, Tensor) else str(value)


def name_of(codes: type[IntEnum], code: int) -> str:
    """The word for a code.

    Args:
        codes: what the code is of.
        code: one that is not known is named by its number.
    """
    known = {int(each): each.name.lower() for each in codes}
    return known.get(code, f"code {code}")


def _reward(row: TensorDictBase) -> float:
    reward, valid = _get(row, ("next", "reward")), _get(row, ("next", "reward_valid"))
    if reward is None or (valid is not None and not bool(valid.all())):
        return math.nan
    return float(reward.double().sum())


def _parts(row: TensorDictBase) -> dict[str, float]:
    node = row.get(("next", "rewards"), None)
    found = {}
    for name in () if node is None else node.keys():
        value, valid = _get(node, (name, "value")), _get(node, (name, "valid"))
        known = value is not None and (valid is None or bool(valid.all()))
        found[name] = float(value.double().sum()) if known else math.nan
    return found


def _errors(row: TensorDictBase) -> list[str]:
    found = [str(failure) for failure in failures_of(row)]
    kind = _text(row, ("error", "type"))
    if kind and not any(kind in each for each in found):
        found.append(f"{kind}: {_text(row, ('error', 'message'))}")
    return found


def _labels(row: TensorDictBase) -> dict[str, str]:
    found = {}
    for name in row.keys():
        value = None if name in _SHOWN else _get(row, name)
        if isinstance(value, str) and 0 < len(value) <= _LONGEST_LABEL:
            found[name] = value
    return found


def _messages(row: TensorDictBase) -> list[tuple[str, str]]:
    history = row.get(("history", "full"), None)
    if history is None:
        return []
    return [(str(each.get("role", "")), _told(each)) for each in history.chats[0]]


def _told(message: Mapping[str, Any]) -> str:
    text = message_text(dict(message))
    calls = () if message.get("raw") is not None else message.get("tool_calls") or ()
    return "\n".join([*([text] if text else []), *(str(call) for call in calls)])


def _token_columns(row: TensorDictBase) -> dict[str, np.ndarray]:
    ids = _get(row, ("tokens", "full"))
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        raise DataError(
            "a row needs its token ids [T] at ('tokens', 'full'); it has "
            f"{sorted(map(str, row.keys(True, True)))}"
        )
    count = ids.shape[0]

    def column(key: NestedKey) -> Tensor | None:
        value = _get(row, key)
        if value is None:
            return None
        if value.shape[:1] != (count,):
            raise DataError(f"{key} has {list(value.shape)} and ('tokens', 'full') {count} tokens")
        return value.reshape(count)

    source, reason = column(("trace", "source")), column(("trace", "mask_reason"))
    if source is None:
        chosen = column(("masks", "all_assistant_mask"))
        if chosen is None:
            prompt = _get(row, ("tokens", "prompt"))
            begin = count if prompt is None else prompt.shape[0]
            chosen = torch.arange(count) >= begin
        source = torch.where(chosen, int(Source.SAMPLED), int(Source.PROMPT)).to(torch.int8)
    sampled = source == Source.SAMPLED
    if reason is None:
        reason = torch.where(sampled, 0, int(MaskReason.NOT_SAMPLED)).to(torch.int8)
    there = column(("masks", "all_attention_mask"))
    there = source >= 0 if there is None else there.bool()

    def shown(values: Tensor | None, where: Tensor) -> np.ndarray:
        if values is None:
            values = torch.full((count,), math.nan)
        values = torch.where(where, values.float(), math.nan)
        return values[there].numpy()

    def whole(values: Tensor | None, dtype: torch.dtype) -> np.ndarray:
        values = torch.full((count,), -1) if values is None else values
        return values.to(dtype)[there].numpy()

    scored, log_probs = column(("train_log_probs", "full")), column(("log_probs", "full"))
    known = scored is not None and log_probs is not None
    advantage = _get(row, "advantage")
    if advantage is not None:
        advantage = advantage.flatten()
        advantage = advantage.expand(count) if advantage.numel() == 1 else advantage
        if advantage.shape[0] != count:
            raise DataError(f"advantage has {advantage.shape[0]} values and the row {count} tokens")
    return {
        "token_ids": ids[there].numpy(),
        "source": whole(source, torch.int8),
        "turns": whole(column(("trace", "turn")), torch.int16),
        "policy_version": whole(column(("trace", "policy_version")), torch.int32),
        "mask_reason": whole(reason, torch.int8),
        "log_probs": shown(log_probs, sampled),
        "advantage": shown(advantage, sampled & (reason == MaskReason.TRAINED)),
        "ratio": shown((scored - log_probs).exp() if known else None, sampled),
    }

"""The text fields of a message dict, wherever they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a message, under any of its names."""
    for key in REASONING_KEYS:
        if isinstance(value := message.get(key), str):
            return value
    return None


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message; a single one may stand without a list."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    return [calls] if isinstance(calls, Mapping) else list(calls)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Reasoning, text parts and called names of a message: what a template copies as it is."""
    reasoning, content = reasoning_of(message), message.get("content")
    texts = [reasoning] if reasoning else []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, (list, tuple)):
        parts = [p if isinstance(p, str) else p.get("text") for p in content]
        texts += [p for p in parts if isinstance(p, str)]
    for call in calls_of(message):
        function = call.get("function") if isinstance(call, Mapping) else None
        if function or isinstance(call, Mapping):
            texts.append(str((function or call).get("name")))
    return texts

"""Functions for message dicts: keys, content items, tool calls, reasoning and spoken text.

A message is a plain dict with ``role`` and ``content`` (a string or a list of content items). It
may also have ``is_complete`` (only if false), ``tool_calls``, ``tool_responses``, ``tool_call_id``,
``name``, ``reasoning_content`` and any other key that a template reads.

Next: :mod:`torchrl_llm.data.text` renders messages, and reads them from sampled ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torchrl_llm.data import content as contents
from torchrl_llm.errors import DataError

_THINK_MARKS = re.compile("<think>|</think>")


def canonical_message(message: Mapping[str, Any], where: str = "message") -> dict[str, Any]:
    """Convert one message to the form that this package stores; the input is not changed.

    ``content=None`` becomes ``""``. Fields without a value are left out. Tool calls become
    ``{"type": "function", "function": {"name", "arguments"}}``, with their ``id`` if they have one;
    JSON arguments become a mapping.

    Args:
        message: a mapping with ``role`` and ``content``.
        where: name of the message in errors.

    Raises:
        DataError: the message has no role, or its content or a tool call has the wrong form.

    Example:
        >>> call = {"name": "add", "arguments": '{"a": 1}'}
        >>> canonical_message({"role": "assistant", "content": None, "tool_calls": [call]})
        {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': \
{'name': 'add', 'arguments': {'a': 1}}}]}
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{where} must be a mapping with role and content, got {message!r:.100}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f"{where} has no role: {dict(message)!r:.200}")
    if isinstance(content, str) and len(message) == 2:
        return {"role": role, "content": content}
    if content is None:
        content = ""
    elif isinstance(content, contents.ContentBase):
        content = contents.content_items(content)
    elif isinstance(content, (list, tuple)) and all(
        isinstance(part, (Mapping, contents.ContentBase)) for part in content
    ):
        content = [item for part in content for item in contents.content_items(part)]
    elif not isinstance(content, str):
        raise DataError(
            f"{where} ({role}): content must be a string or a list of content items (mappings "
            f"with a type), got {type(content).__name__}"
        )
    out = {"role": role, "content": content}
    for key, value in message.items():
        empty = value is None or (key in ("tool_calls", "tool_responses") and not value)
        if key not in out and not empty and not (key == "is_complete" and value):
            out[key] = value
    if "tool_calls" in out:
        calls = out["tool_calls"]
        calls = [calls] if isinstance(calls, Mapping) else calls
        out["tool_calls"] = [_canonical_call(call, f"{where} ({role})") for call in calls]
    return out


def _canonical_call(call: Any, where: str) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call is a mapping with name and arguments, got {call!r}")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    else:
        try:
            arguments = json.loads(json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the arguments of {function['name']} are not JSON: {error}"
            ) from error
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **out} if call.get("id") is not None else out


def _loaded(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


# -- texts of a message ----------------------------------------------------------------------------

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of a message, under any of its names."""
    for key in REASONING_KEYS:
        if isinstance(value := message.get(key), str):
            return value
    return None


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message; a single call need not be in a list."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    return [calls] if isinstance(calls, Mapping) else list(calls)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the parts that a template copies: reasoning, texts and names of called tools."""
    reasoning, content = reasoning_of(message), message.get("content")
    texts = [reasoning] if reasoning else []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, (list, tuple)):
        parts = [p if isinstance(p, str) else p.get("text") for p in content]
        texts += [p for p in parts if isinstance(p, str)]
    for call in calls_of(message):
        if isinstance(call, Mapping):
            texts.append(str((call.get("function") or call).get("name")))
    return texts


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a message: the model's raw output if it is known, else its content.

    Args:
        message: a message dict. If reasoning or tool calls were split off, ``raw`` (the decoded
            sample) is the text; otherwise the content is. The text items of a list are joined.
            Separate reasoning without ``raw`` is added in ``<think>`` marks.

    Example:
        >>> message_text({"role": "assistant", "content": "4", "reasoning_content": "2+2"})
        '<think>2+2</think>4'
    """
    split = message.get("reasoning_content") is not None or message.get("tool_calls")
    if split and message.get("raw") is not None:
        return message["raw"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, str) else part.get("text") or "" for part in content]
        content = "".join(parts)
    reasoning = message.get("reasoning_content")
    return f"<think>{reasoning}</think>{content}" if reasoning else content


# -- reasoning and spoken text ---------------------------------------------------------------------


def split_thoughts(text: str) -> list[tuple[str, bool]]:
    """Split a text into thoughts and spoken parts.

    A thought is ``<think>`` ... ``</think>``, or the text before a first ``</think>`` without an
    opening mark (which may be in the prompt). Marks inside double quotes are ignored, because they
    belong to an argument of a call. A thought that does not end counts as spoken, because a model
    may call a tool while it thinks.

    Args:
        text: any text.

    Returns:
        All pieces of the text in order, each with a flag whether it is a thought.

    Example:
        >>> split_thoughts("<think>no</think> yes")
        [('<think>no</think>', True), (' yes', False)]
    """
    pieces: list[tuple[str, bool]] = []
    at, opened = 0, -1
    seen, quoted = 0, False
    for mark in _THINK_MARKS.finditer(text):
        closes = mark[0] == "</think>"
        if opened < 0:
            quoted = _quoted(text, seen, mark.start(), quoted)
            seen = mark.start()
            if quoted:
                continue
        if opened < 0 and not closes:
            opened = mark.start()
        elif closes and (opened >= 0 or not pieces):
            pieces += [(text[at : max(opened, 0)], False)] if opened > at else []
            pieces.append((text[max(opened, at) : mark.end()], True))
            at, opened = mark.end(), -1
    return pieces + ([(text[at:], False)] if at < len(text) or not pieces else [])


def _quoted(text: str, seen: int, at: int, quoted: bool) -> bool:
    """Return whether a place is inside a double-quoted string, which ends with its line.

    ``quoted`` is the result at the earlier place ``seen``, so each character is read only once.
    """
    line = text.rfind("\n", seen, at) + 1
    begin = line or seen
    quotes = text.count('"', begin, at) - text.count('\\"', begin, at)
    return (quotes + (quoted and not line)) % 2 == 1


def thoughts_of(message: Mapping[str, Any]) -> list[str]:
    """Return a message's reasoning: its field, or a ``<think>`` block of its content."""
    own = reasoning_of(message)
    content = message.get("content")
    if own or not isinstance(content, str) or "</think>" not in content:
        return [own] if own else []
    return [content.split("</think>")[0].split("<think>")[-1]]


def spoken_text(message: Mapping[str, Any]) -> str:
    """Return a message's text without reasoning: the part that is searched for calls.

    Reasoning is the text that was already split off, and the thoughts that
    :func:`~torchrl_llm.data.messages.split_thoughts` finds.

    Example:
        >>> spoken_text({"role": "assistant", "content": "<think>no</think> yes"})
        ' yes'
    """
    text = message_text(dict(message))
    thought = message.get("reasoning_content")
    if isinstance(thought, str) and "unclosed_reasoning" not in (message.get("flags") or ()):
        text = text.partition(thought)[2] if thought.strip() and thought in text else text
    return "".join(piece for piece, is_thought in split_thoughts(text) if not is_thought)

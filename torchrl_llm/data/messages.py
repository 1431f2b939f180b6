"""What a message may hold: the keys, multimodal content items, and one form of a tool call.

A message is a plain dict: ``role``, ``content`` (a string or a list of content items) and, where
they have a value, ``is_complete`` (only when false), ``tool_calls``, ``tool_responses``,
``tool_call_id``, ``name``, ``reasoning_content`` and whatever else a template reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torchrl_llm.errors import DataError

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]
_FIELDS = frozenset(
    ("type", "text", "url", "data", "mime_type", "name", "size", "function_name", "function_args")
)


class ContentBase(dict):
    """One item of a multimodal content: a dict that checks its keys and reads as attributes.

    Being a dict, it goes to templates, JSON and processors as it is. Fields without a value are
    left out and read as ``None``.

    Args:
        type: ``"text"``, ``"image"``, ``"audio"``, ``"video"``, ``"file"`` or ``"function_call"``.
        text: the text of a text item.
        url: where the data is.
        data: the data itself, encoded as a string, or an object that a processor takes.
        mime_type: for instance ``"image/png"``.
        name: name of a file.
        size: size of a file in bytes.
        function_name: name of the called function.
        function_args: its arguments.

    Raises:
        DataError: the type is none of these.

    Example:
        >>> item = ContentBase(type="image", url="https://example.org/cat.png")
        >>> item, item.text
        ({'type': 'image', 'url': 'https://example.org/cat.png'}, None)
    """

    def __init__(
        self,
        type: ContentType,
        text: str | None = None,
        url: str | None = None,
        data: Any = None,
        mime_type: str | None = None,
        name: str | None = None,
        size: int | None = None,
        function_name: str | None = None,
        function_args: Mapping[str, Any] | None = None,
    ) -> None:
        if type not in get_args(ContentType):
            raise DataError(f"content type must be one of {get_args(ContentType)}, got {type!r}")
        given = {
            "text": text,
            "url": url,
            "data": data,
            "mime_type": mime_type,
            "name": name,
            "size": size,
            "function_name": function_name,
            "function_args": function_args,
        }
        super().__init__(type=type, **{k: v for k, v in given.items() if v is not None})

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple:
        return rebuild_content, (dict(self),)


def rebuild_content(fields: dict[str, Any]) -> ContentBase:
    """A part of a message's content from its pickle."""
    return ContentBase(**fields)


def canonical_message(message: Mapping[str, Any], where: str = "message") -> dict[str, Any]:
    """One message in the form that this package stores; the input is not changed.

    ``content=None`` becomes ``""``, fields without a value are left out, and tool calls become
    ``{"type": "function", "function": {"name", "arguments"}}`` (with their ``id`` if they have one)
    with JSON arguments as a mapping.

    Args:
        message: a mapping with ``role`` and ``content``.
        where: names the message in errors.

    Raises:
        DataError: there is no role, or the content or a tool call has the wrong form.

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
    elif isinstance(content, ContentBase):
        content = [content]
    elif isinstance(content, (list, tuple)) and all(isinstance(x, Mapping) for x in content):
        content = list(content)
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
    out = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return {"id": call["id"], **out} if call.get("id") is not None else out


def _loaded(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments

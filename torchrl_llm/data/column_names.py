"""Finds columns by the usual names of public datasets, and reads conversations from cells.

Next: :class:`torchrl_llm.data.demonstrations.Demonstrations` and
:class:`torchrl_llm.envs.datasets.RowsEnv` read rows with these functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchrl_llm.data.table_cells import plain_value
from torchrl_llm.errors import DataError

PROMPTS = ("prompt", "question", "query", "problem", "instruction", "input")
"""Default columns of the user's message; the first one that exists is used."""

MESSAGES = ("messages", "conversations")
"""Default columns of whole conversations; the first one that exists is used."""

_BEFORE = ("system", "history")

# Roles of ShareGPT conversations, whose messages have ``from`` and ``value``.
_SHAREGPT = {"human": "user", "observation": "tool"}
_SHAREGPT |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")


def first_column(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of the names that is a column of a row; ``None`` if none is.

    Args:
        row: of the table.
        names: names in the order of preference.
    """
    return next((name for name in names if name in row), None)


def prompt_columns(row: Mapping[str, Any], named: str | None = None) -> tuple[str, ...]:
    """Return the columns that form the user's message.

    ``input`` (Alpaca) or ``context`` (Dolly) follows ``instruction``.

    Args:
        row: of the table.
        named: a column that the user named; no other column is then returned.

    Returns:
        The names; empty if no column has a usual name of a prompt.
    """
    found = named or first_column(row, PROMPTS)
    below = first_column(row, ("input", "context"))
    if found == "instruction" and named is None and below is not None:
        return found, below
    return () if found is None else (found,)


def columns_before(row: Mapping[str, Any], *used: str | None) -> tuple[str, ...]:
    """Return the columns with messages before the user's message, as in some Alpaca rows.

    Args:
        row: of the table.
        used: columns that have a different use.

    Returns:
        ``system`` (a text) and ``history`` (earlier turns), if they exist.
    """
    return tuple(name for name in _BEFORE if name in row and name not in used)


def joined_prompt(
    row: Mapping[str, Any], columns: Sequence[str], before: Sequence[str] = ()
) -> Any:
    """Return the prompt of a row: its cells, joined by an empty line if there are several.

    Args:
        row: of the table.
        columns: result of :func:`prompt_columns`.
        before: result of :func:`columns_before`. If one of these cells is not empty, messages are
            returned.

    Raises:
        DataError: a column before the prompt contains neither text nor turns, or the prompt has a
            different system message.
    """
    parts = [row.get(name) for name in columns]
    texts = [str(part) for part in parts if part or part == 0]
    asked = parts[0] if len(parts) == 1 else "\n\n".join(t for t in texts if t.strip())
    earlier = [message for name in before for message in _earlier(name, row.get(name))]
    if not earlier or not asked:
        return asked
    messages = chat_in(asked) or as_messages(asked, "user")
    are_two = {earlier[0]["role"], messages[0].get("role")} == {"system"}
    if are_two and earlier.pop(0) != messages[0]:
        raise DataError(
            "the column 'system' holds a system message, and the conversation has another; leave "
            "one of the two out"
        )
    return [*earlier, *messages]


def _earlier(name: str, value: Any) -> list[dict[str, Any]]:
    """Read the messages in a cell of ``system`` or ``history``."""
    if isinstance(value, str) and name == "system":
        return [{"role": name, "content": value}] if value.strip() else []
    value = _loaded(value) if isinstance(value, str) and value.strip() else value
    value = plain_value(value) or []
    if name == "history" and isinstance(value, list):
        if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value):
            roles = ("user", "assistant")
            return [_text(*said) for pair in value for said in zip(roles, pair, strict=True)]
        if all(isinstance(message, Mapping) for message in value):
            return as_messages(value)
    elif not value:
        return []
    expected = "pairs of question and answer" if name == "history" else "the system message"
    raise DataError(
        f"the column {name!r} must hold {expected}, got {value!r:.200}; if it is something else, "
        "rename it"
    )


def _text(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": str(content)}


def check_named(row: Mapping[str, Any], **named: str | None) -> None:
    """Check that named columns exist.

    Args:
        row: of the table.
        named: column name for each key of the group ``data``; ``None`` if the key is not set.

    Raises:
        DataError: a column is missing; the error names the existing ones.
    """
    for key, name in named.items():
        if name is not None and name not in row:
            raise DataError(f"data.{key}={name}: there is no such column; there are {sorted(row)}")


def as_messages(value: Any, role: str | None = None) -> list[dict[str, Any]]:
    """Read the messages in a cell of a table.

    Args:
        value: a list of messages, each with ``role`` and ``content``, or ``from`` and ``value``
            (ShareGPT, with calls as JSON in messages from ``function_call``); such a list as JSON,
            as in a CSV file; or, with a ``role``, the content of a single message: a text or a
            number.
        role: role of the message if the value is a text or a number.

    Raises:
        DataError: anything else.

    Example:
        >>> as_messages([{"from": "human", "value": "Hi"}])
        [{'role': 'user', 'content': 'Hi'}]
        >>> as_messages(4, "assistant")
        [{'role': 'assistant', 'content': '4'}]
    """
    if role is not None and isinstance(value, (str, int, float)):
        return [{"role": role, "content": str(value)}]
    expected = "a list of messages" if role is None else "a text or a list of messages"
    return [_message(message) for message in as_mappings(value, expected)]


def chat_in(value: Any) -> list[dict[str, Any]] | None:
    """Read the messages in a cell, plain or as JSON; ``None`` for any other content.

    Args:
        value: of a table.
    """
    if isinstance(value, str) and not value.lstrip().startswith("[{"):
        return None
    with suppress(DataError):
        found = as_messages(value)
        return found if found and all("role" in message for message in found) else None
    return None


def as_mappings(value: Any, expected: str) -> list[Mapping[str, Any]]:
    """Read a list of mappings, from a list or from JSON.

    Args:
        value: of a table.
        expected: description of a correct value, for the error.

    Raises:
        DataError: anything else.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _loaded(value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(m, Mapping) for m in value):
        raise DataError(f"expected {expected}, got {value!r:.200}")
    return list(value)


def as_tools(value: Any) -> list[dict[str, Any]]:
    """Read the tools in a cell of a table, in the form that chat templates need.

    Args:
        value: a list of schemas, as a list or as JSON; the outer ``{"type": "function", "function":
            ...}`` of a schema may be missing.

    Raises:
        DataError: anything else.

    Example:
        >>> as_tools('[{"name": "add", "parameters": {}}]')
        [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]
    """
    tools = []
    for number, tool in enumerate(as_mappings(value, "a list of tools")):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"tool {number} must be a schema with a name, got {tool!r:.200}")
        tools.append({"type": "function", "function": function} if function is tool else dict(tool))
    return tools


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of ShareGPT, or with OpenAI's older calls, to this package's form."""
    message = dict(message)
    if "from" in message and "value" in message:
        role, value = message.pop("from"), message.pop("value")
        message = {"role": _SHAREGPT.get(role, role), "content": value, **message}
    if message.get("role") == "function_call":
        message |= {"role": "assistant", "content": "", "tool_calls": _calls(message["content"])}
    elif message.get("role") == "function":
        message["role"] = "tool"
    if (call := message.pop("function_call", None)) is not None:
        message["tool_calls"] = [call]
    return message


def _calls(value: Any) -> list[Any]:
    """Read the calls in a message of the role ``function_call``: one or a list."""
    calls = _loaded(value) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, Mapping) else calls
    return as_mappings(calls, "a tool call as JSON, with name and arguments")


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

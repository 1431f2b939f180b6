"""Rows as readable text: prompt, response and expected answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.messages import message_text

_MOST_CHARS = 300

VERDICTS = ("-> wrong", "-> right")
"""Last line of a held-out conversation that is shown."""


def row_text(row: TensorDictBase, *, indent: str = "  ") -> str:
    """Prompt, response and expected answer of one row, each shortened to 300 characters.

    Args:
        row: without batch dimension, from a policy or a collector.
        indent: before each line.

    Returns:
        Lines ``query:``, ``prompt:`` (the last message that the model read, if it differs from the
        query), ``response:`` and ``answer:``, those that the row has.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(query="What is 1 + 2?", text={"response": "4"}, answer="3")
        >>> print(row_text(row))
          query:    What is 1 + 2?
          response: 4
          answer:   3
    """
    query, (prompt, response) = _content(_value(row, "query")), _last_turn(row)
    shown = {
        "query": query,
        "prompt": None if query is not None and prompt == query else prompt,
        "response": response,
        "answer": _value(row, "answer"),
    }
    told = {name: str(text) for name, text in shown.items() if text is not None}
    width = max(map(len, told), default=0) + 2
    return "\n".join(
        f"{indent}{f'{name}:'.ljust(width)}{_shortened(text)}" for name, text in told.items()
    )


def _last_turn(row: TensorDictBase) -> tuple[str | None, str | None]:
    """The last message that the model read, and its response."""
    history = row.get(("history", "full"), None)
    if history is None:
        return _value(row, ("text", "prompt")), _value(row, ("text", "response"))
    messages = history.chats[0].messages
    if not messages or messages[-1].get("role") in ("system", "user", "tool"):
        return _content(messages), None
    return _content(messages[:-1]), message_text(messages[-1])


def _content(query: Any) -> str | None:
    """The text of a query: a string, or the last of its messages."""
    messages = query.messages if isinstance(query, Chat) else query
    if isinstance(messages, (list, tuple)):
        last = messages[-1] if messages else None
        return message_text(dict(last)) if isinstance(last, Mapping) else None
    return messages


def _value(row: TensorDictBase, key: str | tuple[str, str]) -> Any:
    """A cell of a column of objects; ``None`` if there is no such column."""
    value = row.get(key, None)
    return getattr(value, "data", value)


def _shortened(text: str) -> str:
    """On one line; line breaks are escaped as in Python."""
    text = text.replace("\n", "\\n")
    if not text.strip():
        return "(empty)"
    if len(text) <= _MOST_CHARS:
        return text
    return f"{text[: 2 * _MOST_CHARS // 3]} ... {text[-_MOST_CHARS // 3 :]}"

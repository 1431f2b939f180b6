"""Rules for training conversations: order of turns, calls and results, flags.

``torchrl_llm.data.column_names`` converts rows of a table to messages. Next:
:class:`torchrl_llm.data.demonstrations.Demonstrations` applies these rules to each row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.messages import REASONING_KEYS, calls_of, message_text, reasoning_of, texts_of
from torchrl_llm.errors import DataError, TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a conversation."""

FLAGS = ("weight", "train")
"""Flags of an assistant message: learned if 1 or ``True``, not learned if 0 or ``False``."""

Messages = Sequence[Mapping[str, Any]]
_TEXTS = {"content", "text", *REASONING_KEYS}
_THINK = re.compile("(</?think>)")
_MARK = re.compile("Qz[0-9]+zQ$")


def check_conversation(messages: Messages) -> None:
    """Reject a conversation that has nothing to learn or is impossible.

    Args:
        messages: canonical messages.

    Raises:
        DataError: an unknown role, no assistant turn, an empty turn, two consecutive assistant
            turns, a system message that is not the first message, a call whose arguments are not a
            JSON object, a call without a result, or a result without a call.
    """
    before = None
    for number, message in enumerate(messages):
        role, what = message["role"], None
        text = message_text(dict(message)).strip()
        if role not in ROLES:
            what = f"has the role {role!r}; roles are {', '.join(ROLES)}"
        elif role in ("system", "developer") and number:
            what = f"is a {role} message, which only the first may be"
        elif role == "tool" and before not in ("assistant", "tool"):
            what = f"is a tool's result and follows a message of {before or 'no one'}"
        elif role == "assistant" and before == "assistant":
            what = "is the assistant's, as the one before; make one of the two"
        elif role == "assistant" and not (text or calls_of(message)):
            what = "is the assistant's and empty"
        elif role == "user" and not (text or message["content"]):
            what = "is the user's and empty"
        elif role != "assistant" and calls_of(message):
            what = f"has tool calls, which only the assistant makes, and is the {role}'s"
        elif odd := [call for call in calls_of(message) if not _has_arguments(call)]:
            what = f"calls a tool with arguments that are no JSON object: {odd[0]!r:.200}"
        if what is not None:
            raise DataError(f"message {number} {what}")
        before = role
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"there is no turn of the assistant to learn from, only {', '.join(roles) or 'nothing'}"
        )
    _check_results(messages)


def _has_arguments(call: Mapping[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], Mapping)


def _check_results(messages: Messages) -> None:
    """Check that each call, except a final one, has a result, and that results match calls.

    Calls inside a text are not found, so results without an id may belong to them.
    """
    ids: list[Any] = []
    caller = 0
    for number, message in enumerate(messages):
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and answered is not None and None not in ids:
            if answered not in ids:
                raise DataError(
                    f"message {number} is the result of the call {answered!r}; calls that wait for "
                    f"a result are {ids or 'none'}"
                )
            ids.remove(answered)
        elif message["role"] == "tool":
            ids = ids[1:]
        else:
            if ids:
                raise DataError(
                    f"message {caller} calls a tool, and message {number} ({message['role']}) "
                    f"follows without the result of {ids[0] or 'the call'!r}; put it between them, "
                    "as a message of the role tool"
                )
            ids, caller = [call.get("id") for call in calls_of(message)], number


def learned_turns(messages: Messages) -> list[bool]:
    """Return which assistant turns are learned: all except those flagged 0 or ``False``.

    Args:
        messages: canonical messages.

    Raises:
        DataError: a flag has a different value, a message of a different role is flagged as
            learned, or no turn is left.

    Example:
        >>> turn = {"role": "assistant", "content": "a"}
        >>> learned_turns([turn | {"weight": 0}, turn])
        [False, True]
    """
    learned = []
    for number, message in enumerate(messages):
        flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
        for name, value in flags.items():
            if value not in (0, 1):
                raise DataError(f"message {number}: {name} must be 0 or 1, got {value!r}")
            if value and message["role"] != "assistant":
                raise DataError(
                    f"message {number} ({message['role']}) has {name}={value!r}, and only turns of "
                    "the assistant are learned"
                )
        if message["role"] == "assistant":
            learned.append(all(flags.values()))
    if not any(learned):
        raise DataError("no turn of the assistant is learned: weight or train is 0 for all of them")
    return learned


def keep_turns(assistant: Tensor, learned: Sequence[bool]) -> Tensor:
    """Return which tokens belong to learned turns.

    Args:
        assistant: bool ``[T]``, the tokens of all turns of the assistant.
        learned: whether each turn is learned.

    Raises:
        TemplateError: the number of token runs is not the number of turns.

    Example:
        >>> keep_turns(torch.tensor([0, 1, 1, 0, 1]).bool(), [False, True]).int().tolist()
        [0, 0, 0, 0, 1]
    """
    if all(learned):
        return assistant
    begins = assistant & ~torch.cat([assistant.new_zeros(1), assistant[:-1]])
    if int(begins.sum()) != len(learned):
        raise TemplateError(
            f"the chat template writes {len(learned)} turns of the assistant in "
            f"{int(begins.sum())} pieces, so that weight and train cannot leave one out; choose "
            "another with model.chat_template_name"
        )
    return assistant & torch.tensor([False, *learned])[begins.cumsum(0)]


def with_marks(messages: Messages) -> list[dict[str, Any]]:
    """Add a unique mark at the end of the longest line of each text.

    Args:
        messages: canonical messages.

    Example:
        >>> with_marks([{"role": "user", "content": "Hi"}])
        [{'role': 'user', 'content': 'HiQz0zQ'}]
    """
    numbers = count()

    def marked(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [marked(each) for each in value]
        if isinstance(value, Mapping):
            return {key: marked(each) if key in _TEXTS else each for key, each in value.items()}
        if not isinstance(value, str):
            return value
        parts = _THINK.split(value)
        for at in range(0, len(parts), 2):
            if longest := _longest_line(parts[at]):
                parts[at] = parts[at].replace(longest, f"{longest}Qz{next(numbers)}zQ", 1)
        return "".join(parts)

    return [marked(message) for message in messages]


def _longest_line(text: str) -> str:
    return max((line.strip() for line in text.split("\n")), key=len)


def check_written(messages: Messages, text: str) -> None:
    """Reject a rendering that lacks content, reasoning or a call of its messages.

    White space, and the escapes that JSON needs, may differ. Each text must have its own place in
    the rendering.

    Args:
        messages: canonical messages, with or without the marks of :func:`with_marks`.
        text: their rendering by the chat template.

    Raises:
        TemplateError: a part is missing; the error names it and its message.
    """
    lines = []
    for number, message in enumerate(messages):
        for value in texts_of(message):
            parts = _THINK.split(value)[::2]  # some templates remove all but the last
            is_reasoning = value == reasoning_of(message)
            lines += [(number, _longest_line(each), True) for each in parts[:-1]]
            lines.append((number, _longest_line(parts[-1]), is_reasoning))
    # Search for the longest text first, so that a text is not found inside a longer one.
    for number, line, is_thought in sorted(lines, key=lambda each: -len(each[1])):
        escaped = (json.dumps(line, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
        found = next((form for form in (line, *escaped) if form in text), None)
        if found is None:
            raise TemplateError(
                f"message {number} ({messages[number]['role']}): the chat template does not write "
                f"its {'reasoning' if is_thought else 'text'} {_MARK.sub('', line)!r:.80}; choose "
                "a template that does (model.chat_template_name), or take it out of the data"
            )
        text = text.replace(found, "\0", 1) if line else text

"""Rules for conversations that can be learned from: order of turns, calls and results, flags.

Not here: how rows of a table become messages (``torchrl_llm.data.column_names``). Next:
:class:`torchrl_llm.data.demonstrations.Demonstrations` applies these rules to each row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.messages import calls_of, message_text, reasoning_of, texts_of
from torchrl_llm.errors import DataError, TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a conversation."""

FLAGS = ("weight", "train")
"""Fields of an assistant message that say whether it is learned: 1 or ``True``, 0 or ``False``."""

Messages = Sequence[Mapping[str, Any]]


def check_conversation(messages: Messages) -> None:
    """Refuse a conversation that nothing can be learned from, or that cannot have taken place.

    Args:
        messages: canonical messages.

    Raises:
        DataError: an unknown role, no turn of the assistant, an empty turn, two of the assistant in
            a row, a system message that is not the first, a call whose arguments are no JSON
            object, a call without its result, or a result without its call.
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
    """Each call that is not the end has a result; ids, where results have them, are those of calls.

    Calls that are spelled out in a text are not seen, so results without an id may answer them.
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
    """Which turns of the assistant are learned: all, but for those flagged with 0 or ``False``.

    Args:
        messages: canonical messages.

    Raises:
        DataError: another value, a message that is not the assistant's and flagged to be learned,
            or no turn that is left.

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
    """Tokens of the turns that are learned.

    Args:
        assistant: bool ``[T]``, the tokens of all turns of the assistant.
        learned: whether each turn is learned.

    Raises:
        TemplateError: the tokens do not fall into so many runs.

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


def check_written(messages: Messages, text: str) -> None:
    """Refuse a rendering that lacks a content, a reasoning or a call of its messages.

    White space, and the escapes that JSON needs, may differ.

    Args:
        messages: canonical messages.
        text: what the chat template makes of them.

    Raises:
        TemplateError: names the message and what is lacking.
    """
    for number, message in enumerate(messages):
        for value in texts_of(message):
            *thoughts, rest = re.split("</?think>", value)  # which some templates cut off
            for piece in (*thoughts, rest):
                longest = max((line.strip() for line in piece.split("\n")), key=len)
                escaped = (json.dumps(longest, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
                if longest in text or any(form in text for form in escaped):
                    continue
                is_thought = piece is not rest or value == reasoning_of(message)
                raise TemplateError(
                    f"message {number} ({message['role']}): the chat template does not write its "
                    f"{'reasoning' if is_thought else 'text'} {longest!r:.80}; choose a template "
                    "that does (model.chat_template_name), or take it out of the data"
                )

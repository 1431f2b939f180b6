"""The conversations of one session: finds the conversation that a call continues, or a cause.

A client sends whole conversations. :class:`ConversationTree` finds the longest answered
conversation that the call extends, so that its sampled ids are continued. A call that extends no
conversation starts a new one or edits an old one; for an edit, the tree records the cause.

Next: :mod:`torchrl_llm.gateway.session` makes prompts from the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.messages import message_text

Message = Mapping[str, Any]
BRANCHED, EDITED, OTHER_TOOLS = "branched", "history_changed", "tools_changed"


class Place(NamedTuple):
    """The position of a call in the conversations of its session.

    Attributes:
        chat: the messages of the call; earlier answers of the model are replaced by the recorded
            ones, with their records.
        cause: why the call does not extend the last conversation; ``None`` if it does, and for a
            separate conversation.
        turns: turns of the model in the abandoned part.
        digest: digest of the messages of the call.
        before: digest of the messages before the last one, if the last one is a partial answer to
            be continued.
    """

    chat: Chat
    cause: str | None
    turns: int
    digest: bytes
    before: bytes | None = None


class _Answered:
    """A conversation that ends with an answer of the model."""

    __slots__ = ("before", "chat", "digest", "is_continued")

    def __init__(self, chat: Chat, before: bytes, digest: bytes) -> None:
        self.chat, self.before, self.digest, self.is_continued = chat, before, digest, False


class ConversationTree:
    """Answered conversations, found again by their messages.

    Args:
        max_answers: number of answers to keep, the newest; ``None`` for all.

    Example:
        >>> tree = ConversationTree()
        >>> user = {"role": "user", "content": "Hi"}
        >>> place = tree.find([user])
        >>> answer = {"role": "assistant", "content": "Yes?"}
        >>> tree.add(place, Chat([user, answer]), answer)
        >>> longer = [user, {"role": "assistant", "content": "Yes?"}, user]
        >>> tree.find(longer).cause, tree.find([user, user]).cause
        (None, 'history_changed')
    """

    def __init__(self, max_answers: int | None = None) -> None:
        self._max_answers = max_answers
        self._answers: dict[bytes, _Answered] = {}
        # First messages of conversations, with the digest of their tools and their turns.
        self._begun: dict[bytes, tuple[bytes, int]] = {}
        # Calls that extend no conversation, with the turns of the edited one; all answered calls.
        self._asked: dict[bytes, int] = {}
        self._said: dict[bytes, None] = {}

    def find(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Place:
        """Find the position of a call.

        Args:
            messages: messages of the call, in canonical form.
            tools: schemas of the call; conversations with different tools are different.
        """
        root = _digest(b"", list(tools)) if tools else b""
        above = digest = root
        found, covered = None, 0
        for count, message in enumerate(messages, 1):
            above, digest = digest, _digest(digest, _spoken(message))
            answered = self._answers.get(digest)
            if answered is not None:
                # A client may send an answer back in several forms; they count as the same
                # conversation.
                digest, found, covered = answered.digest, answered, count
        before = above if messages[-1].get("is_complete") is False else None
        if found is None:
            cause, turns = self._edit(messages, root, digest)
            return Place(Chat(messages), cause, turns, digest, before)
        cause = BRANCHED if found.is_continued else None
        found.is_continued = True
        before = found.before if covered == len(messages) else before
        return Place(found.chat + messages[covered:], cause, 0, digest, before)

    def _edit(
        self, messages: Sequence[Message], root: bytes, digest: bytes
    ) -> tuple[str | None, int]:
        """Why a call extends nothing, and the turns of the edited conversation."""
        if digest in self._asked:
            return BRANCHED, self._asked[digest]
        before, turns = self._begun.setdefault(_beginning(messages), (root, 0))
        # A sliding window over a conversation starts differently each time.
        own = sum(_digest(b"", _spoken(message)) in self._said for message in messages)
        turns = self._asked[digest] = max(turns, own)
        if before != root:
            return OTHER_TOOLS, turns
        return (EDITED, turns) if turns else (None, 0)

    def add(
        self, place: Place, chat: Chat, sent: Message, other_forms: Iterable[Message] = ()
    ) -> None:
        """Store an answer.

        Args:
            place: result of :meth:`find` for its call.
            chat: the conversation with the answer, and its record.
            sent: the message sent to the client.
            other_forms: other forms of the answer in which a client may send it back.
        """
        answer, before = chat.messages[-1], place.before or place.digest
        node = _Answered(chat, before, _digest(before, _spoken(answer)))
        forms = [(place.digest, sent, True), (before, answer, True)]
        for above, form, is_own in (*forms, *((before, form, False) for form in other_forms)):
            for each in (form, {**form, "reasoning_content": None}):
                digest = _digest(above, _spoken(each))
                # If the continuation of a cut answer adds no text, the cut answer stays.
                if is_own or digest not in self._answers:
                    self._answers[digest] = node
                self._said[_digest(b"", _spoken(each))] = None
        beginning = _beginning(chat.messages)
        root, turns = self._begun.get(beginning, (b"", 0))
        own = 0 if chat.record is None else chat.record.num_turns
        self._begun[beginning] = (root, max(turns, own, 1))
        for kept in (self._answers, self._begun, self._asked, self._said):
            while self._max_answers is not None and len(kept) > self._max_answers:
                kept.pop(next(iter(kept)))


def _beginning(messages: Sequence[Message]) -> bytes:
    """Digest of a conversation up to its first user message."""
    roles = [message.get("role") for message in messages]
    stop = roles.index("user") + 1 if "user" in roles else len(messages)
    return _digest(b"", [_spoken(message) for message in messages[:stop]])


def _spoken(message: Message) -> list[Any]:
    """The common part of two forms of the same message."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = message_text({"content": content})
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    own = [message.get(name) for name in ("role", "tool_call_id", "reasoning_content")]
    return [*own, content, calls]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_digest(before + text.encode("utf-8", "surrogatepass"))

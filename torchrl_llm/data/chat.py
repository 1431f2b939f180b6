"""One conversation as an immutable cell.

TorchRL's environments copy every non-tensor leaf at each step. A :class:`Chat` never changes, so
its copy is the same object.

Next: :mod:`torchrl_llm.data.column` has columns of chats, :mod:`torchrl_llm.data.history` wraps
them for users, :mod:`torchrl_llm.data.record` defines the token record of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torchrl_llm.data.messages import canonical_message
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.errors import DataError


class Chat:
    """One conversation: an immutable tuple of messages, and optionally the record of its tokens.

    Args:
        messages: mappings with at least ``role`` and ``content``; each is copied.
        record: the tokens of the first ``record.num_messages`` messages.

    ``chat + [message]`` appends a message and keeps the record, because the record stores the
    number of messages that it covers. Equality compares only messages.

    Example:
        >>> chat = Chat([{"role": "user", "content": "Hi"}])
        >>> longer = chat + [{"role": "assistant", "content": "Hello"}]
        >>> len(chat), len(longer), longer[-1]["content"]
        (1, 2, 'Hello')
    """

    __slots__ = ("messages", "record")
    is_single: ClassVar[bool] = False
    messages: tuple[dict[str, Any], ...]
    record: TokenRecord | None
    of_messages: ClassVar[Callable[..., Chat]]
    of_message: ClassVar[Callable[..., Chat]]

    def __init__(
        self, messages: Iterable[Mapping[str, Any]] = (), record: TokenRecord | None = None
    ) -> None:
        object.__setattr__(self, "messages", tuple(dict(message) for message in messages))
        object.__setattr__(self, "record", record)

    @classmethod
    def _of(cls, messages: tuple[dict[str, Any], ...], record: TokenRecord | None) -> Chat:
        # Messages that already belong to a Chat are shared, not copied.
        self = cls.__new__(cls)
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "record", record)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Chat is immutable; build a new one instead of setting {name!r}")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def with_record(self, record: TokenRecord | None) -> Chat:
        """Return the same messages with a different record (``None`` removes it)."""
        return Chat._of(self.messages, record)

    def __add__(self, more: Chat | Iterable[Mapping[str, Any]]) -> Chat:
        tail = more.messages if isinstance(more, Chat) else Chat(more).messages
        return Chat._of(self.messages + tail, self.record)

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return dict(self.messages[index])
        messages = self.messages[index]
        covered = self.record is not None and self.record.num_messages
        keeps = covered and messages[:covered] == self.messages[:covered]
        return Chat._of(messages, self.record if keeps else None)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(message) for message in self.messages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and other.messages == self.messages

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Chat:
        return self

    def __deepcopy__(self, memo: dict) -> Chat:
        return self

    def __reduce__(self) -> tuple:
        return rebuild_chat, (Chat, self.messages, self.record)

    def __repr__(self) -> str:
        shown = ", ".join(f"{m.get('role')}: {str(m.get('content'))[:40]!r}" for m in self.messages)
        return f"Chat([{shown}])"


def rebuild_chat(cls: type[Chat], messages: tuple[dict[str, Any], ...], record: Any) -> Chat:
    """Restore a chat from its pickle; not a method, which would be pickled as a ``getattr``."""
    return cls._of(messages, record)


class Message(Chat):
    """A cell with a single message, as opposed to a conversation of one message."""

    __slots__ = ()
    is_single: ClassVar[bool] = True

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Message:
        """Make the cell of one message, converted to its canonical form."""
        return cls._of((canonical_message(message),), None)

    def __reduce__(self) -> tuple:
        return rebuild_chat, (Message, self.messages, self.record)


# Cells create cells, so that code that works on cells (compat/mixins) need not import their
# classes.
Chat.of_messages, Chat.of_message = Chat._of, Message._of


def chat_of(messages: Chat | Sequence[Mapping[str, Any]], where: str) -> Chat:
    """Make a conversation of canonical messages.

    Args:
        messages: message dicts; a chat is returned unchanged.
        where: name of a message in errors.

    Raises:
        DataError: a message has the wrong form.
    """
    if isinstance(messages, Chat):
        return messages
    if isinstance(messages, (str, Mapping)):
        raise DataError(f"{where}: expected a list of messages, got {messages!r:.100}")
    made = tuple(canonical_message(m, f"{where} {i}") for i, m in enumerate(messages))
    return Chat._of(made, None)

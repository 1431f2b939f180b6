"""Input mode of a chat environment: the interface, and history mode.

A mode defines which keys hold the conversation, how a conversation becomes a prompt at reset, and
how the policy's output becomes the next prompt. No other code in :mod:`torchrl_llm.envs` depends on
the mode.

Next: :mod:`torchrl_llm.data.input_modes.token_modes` has text and tokens mode,
:func:`torchrl_llm.data.input_modes.make_mode` makes a mode by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.history import History
from torchrl_llm.data.messages import message_text
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.views import ChatHistory
from torchrl_llm.errors import DataError

Message = Mapping[str, Any]


class InputMode(ABC):
    """The parts of an environment that differ between history, text and tokens mode.

    Args:
        formatter: renders and encodes conversations; history mode needs none.
        example: a conversation that ends with a user message, for the specs.
        policy_role: role of the model's messages.

    Attributes:
        keeps_history: whether the mode writes ``("history", "prompt")``.
    """

    name: str
    keeps_history: bool = False

    def __init__(self, formatter: ChatFormatter | None, example: Chat, policy_role: str) -> None:
        self.formatter = formatter
        self.example = example
        self.policy_role = policy_role

    @abstractmethod
    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """Return the specs of the keys that reset and step write, for ``size`` rows."""

    @abstractmethod
    def full_specs(self, size: int) -> dict[str, Composite]:
        """Return the specs of the key that the policy writes."""

    @abstractmethod
    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Write the prompts of new conversations, and a placeholder for ``None``."""

    @abstractmethod
    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write the next prompts; rows that are not stepped keep theirs."""

    @abstractmethod
    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """Return the text of each response, without the prompt; raise if there is none."""

    @abstractmethod
    def turns(self, td: TensorDictBase) -> list[Message | None]:
        """Return the model's message in this turn of each row; ``None`` if there is none."""

    @abstractmethod
    def append(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> None:
        """Append messages after the model's turn, in the next prompts that a step has written.

        Sampled ids are not encoded again.

        Args:
            td: the rows after the policy's call.
            out: the result of the step; changed in place.
            added: the messages of each row; an empty list leaves the row unchanged.

        Raises:
            TemplateError: the chat template rejects the messages (text and tokens mode).
        """

    @abstractmethod
    def replace(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
        """Replace conversations in the prompts that a reset or step has written.

        The new conversations are encoded as a whole: nothing in them was sampled.

        Args:
            out: the prompts; changed in place.
            chats: conversations by row.
        """


def merge_rows(new: Sequence[Any], old: Sequence[Any], stepped: Sequence[bool] | None) -> list[Any]:
    """Merge new values of stepped rows (``None`` for all rows) with old values of the others."""
    if stepped is None:
        return list(new)
    return [a if moved else b for a, b, moved in zip(new, old, stepped, strict=True)]


def missing_key(key: tuple[str, str]) -> DataError:
    """Return the error for a policy that did not write the key that the mode reads."""
    return DataError(
        f"the policy did not write {key!r}, which the environment turns into the next prompt; a "
        f"policy sets td[{key!r}]"
    )


# -- history ---------------------------------------------------------------------------------------


def history_spec(field: str, chat: Chat, size: int) -> Composite:
    """Return the spec of ``("history", field)``.

    Args:
        field: ``"prompt"`` or ``"full"``.
        chat: the example that specs return.
        size: rows.
    """
    column = ColumnSpec((size, -1), example_data=chat)
    history = Composite(messages=column, shape=(size,), data_cls=History)
    return Composite({field: history}, shape=(size,), data_cls=ChatHistory)


def read_chats(td: TensorDictBase, field: str) -> list[Chat]:
    """Return the conversations, one per row.

    Args:
        td: rows ``[B]``.
        field: ``"prompt"`` or ``"full"``.

    Raises:
        DataError: the rows have no conversations.
    """
    history = td.get(("history", field), None)
    if history is None and field == "prompt":
        raise DataError(
            "the rows lack ('history', 'prompt'), which the environment keeps up to date; step "
            "rows that come from its reset or from its last step"
        )
    if history is None:
        raise missing_key(("history", field))
    return history.chats


def write_chats(out: TensorDictBase, chats: list[Chat]) -> None:
    """Set ``("history", "prompt")``, and nothing else under ``"history"``.

    Args:
        out: rows ``[B]``; changed in place.
        chats: one per row.
    """
    node = TensorDict._new_unsafe(
        source={"prompt": History.of(chats)}, batch_size=torch.Size([len(chats)])
    )
    out.set("history", ChatHistory._from_tensordict(node))


def append_chats(out: TensorDictBase, added: Sequence[Sequence[Message]]) -> None:
    """Append messages to each conversation of ``("history", "prompt")``."""
    chats = zip(read_chats(out, "prompt"), added, strict=True)
    if any(added):
        write_chats(out, [chat + list(new) if new else chat for chat, new in chats])


def replace_chats(out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
    """Replace conversations in rows of ``("history", "prompt")``."""
    now = read_chats(out, "prompt")
    write_chats(out, [chats.get(row, chat) for row, chat in enumerate(now)])


class HistoryMode(InputMode):
    """Conversations: ``("history", "full")`` becomes the next ``("history", "prompt")``."""

    name = "history"
    keeps_history = True

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``history.prompt``."""
        return {"history": history_spec("prompt", self.example, size)}

    def full_specs(self, size: int) -> dict[str, Composite]:
        """``history.full``."""
        answered = self.example + [{"role": self.policy_role, "content": "An answer."}]
        return {"history": history_spec("full", answered, size)}

    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Write ``history.prompt``."""
        write_chats(out, [Chat() if chat is None else chat for chat in chats])

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``history.prompt``; the token record moves with each chat."""
        full = read_chats(td, "full")
        old = full if stepped is None else read_chats(td, "prompt")
        write_chats(out, merge_rows(full, old, stepped))

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """Return the last message of each conversation, if the model wrote it."""
        missing = f"the conversation does not end with a {self.policy_role!r} message"
        return [DataError(missing) if m is None else message_text(m) for m in self.turns(td)]

    def turns(self, td: TensorDictBase) -> list[Message | None]:
        """Return the last message of each conversation, if the model wrote it."""
        chats = read_chats(td, "full")
        ends = (chat.messages[-1] if len(chat) else {} for chat in chats)
        return [dict(end) if end.get("role") == self.policy_role else None for end in ends]

    def append(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> None:
        """Append to ``history.prompt``; the token record stays with each chat."""
        append_chats(out, added)

    def replace(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
        """Set ``history.prompt``; the policy encodes messages without a record."""
        replace_chats(out, chats)

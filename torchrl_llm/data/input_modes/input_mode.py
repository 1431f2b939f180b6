"""What the three input modes share: the interface, and the text of a message.

A mode knows which keys hold the conversation, how a conversation becomes a prompt at reset, and how
the policy's output becomes the next prompt. Nothing else in :mod:`torchrl_llm.envs` asks which mode
it is in.

Next: :mod:`torchrl_llm.data.input_modes.history_mode` has history mode and makes a mode by name,
:mod:`torchrl_llm.data.input_modes.token_modes` has text and tokens mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import Composite

from torchrl_llm.data.column import Chat
from torchrl_llm.data.formatter import ChatFormatter
from torchrl_llm.errors import DataError

Message = Mapping[str, Any]


def message_text(message: dict[str, Any]) -> str:
    """The text of a message: what the model wrote where that is known, else its content.

    Args:
        message: a message dict. Where reasoning or tool calls were split off, ``raw`` (the decoded
            sample) is the text; else the content is all of it. The text items of a list content are
            joined; separate reasoning without ``raw`` is put back in ``<think>`` marks.

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


class InputMode(ABC):
    """What an environment does differently for history, text and tokens.

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
        """Specs of the keys that reset and step write, for ``size`` rows."""

    @abstractmethod
    def full_specs(self, size: int) -> dict[str, Composite]:
        """Specs of the key that the policy writes."""

    @abstractmethod
    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Write the prompts of new conversations; ``None`` gets a filler."""

    @abstractmethod
    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write the next prompts; rows that are not stepped keep theirs."""

    @abstractmethod
    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """The text of each response, and of nothing before it; an error where there is none."""

    @abstractmethod
    def turns(self, td: TensorDictBase) -> list[Message | None]:
        """The message that the model wrote in this turn of each row; ``None`` where it did not."""

    @abstractmethod
    def append(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> None:
        """Put messages behind the model's turn, in the next prompts that a step has written.

        No id that was sampled is encoded again.

        Args:
            td: the rows as the policy left them.
            out: what the step has made of them; changed in place.
            added: the messages of each row; none leaves the row as it is.

        Raises:
            TemplateError: the chat template refuses the messages (text and tokens mode).
        """

    @abstractmethod
    def replace(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
        """Put other conversations into rows of the prompts that a reset or step has written.

        They are encoded anew: nothing in them was sampled.

        Args:
            out: the prompts; changed in place.
            chats: conversations by row.
        """


def merge_rows(new: Sequence[Any], old: Sequence[Any], stepped: Sequence[bool] | None) -> list[Any]:
    """New values of the rows that are stepped (``None`` for all), old ones of the others."""
    if stepped is None:
        return list(new)
    return [a if moved else b for a, b, moved in zip(new, old, stepped, strict=True)]


def missing_key(key: tuple[str, str]) -> DataError:
    """The error for a policy that did not write what the mode reads."""
    return DataError(
        f"the policy did not write {key!r}, which the environment turns into the next prompt"
    )

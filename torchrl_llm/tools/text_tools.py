"""TorchRL's tool interface with one method, which takes a text and returns answers.

:class:`ToolTransformBase` is for code that parses the model's text itself. For new code use
:class:`~torchrl_llm.tools.ToolTransform`, which handles calls, schemas, time limits and failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

from tensordict import TensorDictBase

from torchrl_llm.data.messages import message_text
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.tool_call import ToolCall, ToolResult
from torchrl_llm.tools.tool_transform import Calls, ToolTransform, Turns


class ParseResult(TypedDict):
    """Result of a text parser.

    Attributes:
        text: the text without its calls.
        calls: the calls, in order.
        meta: further information.
    """

    text: str
    calls: list[ToolCall]
    meta: dict[str, Any]


class LLMToolParser(Protocol):
    """A function that converts a text to a :class:`ParseResult`; a parser for all transforms."""

    def __call__(self, response: str | Mapping[str, Any]) -> ParseResult:
        """Extract the calls from a text."""
        ...


class ToolTransformBase(ToolTransform):
    """Appends answers to a turn; a subclass computes them in ``_process_batch_item``.

    The base class writes the columns. An exception of the subclass ends the step, because it is a
    programming error and not an answer to the model.

    Attributes:
        tool_role: role of the appended messages.
        use_step: always true; the answers are part of the step.

    Raises:
        ConfigError: a subclass has set ``use_step = False``.

    Example:
        >>> class Clock(ToolTransformBase):
        ...     tool_role = "clock"
        ...     def _process_batch_item(self, content, index):
        ...         return ["12:00"] if "time?" in content else None
        >>> Clock().tool_role
        'clock'
    """

    tool_role: str = "tool"
    use_step: bool = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not self.use_step:
            raise ConfigError(
                f"{type(self).__name__}.use_step must be True, got {self.use_step!r}: a transform "
                "answers in the step of an environment; remove use_step = False"
            )

    def _process_batch_item(self, content: str, index: int) -> list[str] | None:
        """Return the answers to a turn, in order.

        Args:
            content: text of the model.
            index: index of the row in the flattened batch.

        Returns:
            A text for each message to append; an empty list or ``None`` for no message.
        """
        raise NotImplementedError(f"{type(self).__name__} must write _process_batch_item")

    def _format_result(self, result: str) -> str:
        """Return the text of a message for an answer; by default the answer itself."""
        return result

    def _found(self, message: Any) -> Calls:
        """Return no calls, so that no other transform answers."""
        return []

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        mode = self._mode()
        turns = Turns.of(tensordict, next_tensordict, mode.turns(tensordict))
        results: list[list[ToolResult]] = []
        for row, (message, active) in enumerate(zip(turns.messages, turns.active, strict=True)):
            said = None
            if active and message is not None:
                said = self._process_batch_item(message_text(dict(message)), row)
            call = ToolCall(self.tool_role)
            results.append([ToolResult(call, self._format_result(text)) for text in said or ()])
        if any(results):
            added = [
                [{"role": self.tool_role, "content": each.content} for each in row]
                for row in results
            ]
            mode.append(tensordict, next_tensordict, added)
        self._write(tensordict, next_tensordict, results, turns)
        return next_tensordict

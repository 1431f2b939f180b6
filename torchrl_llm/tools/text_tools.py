"""Tools of one method, as TorchRL's users write them: a text goes in, answers come out.

:class:`ToolTransformBase` is for code that reads the model's text by itself.
:class:`~torchrl_llm.tools.ToolTransform` knows calls, schemas, time limits and failures: use that
for something new.
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
    """What a parser of a text gives.

    Attributes:
        text: the text without its calls.
        calls: the calls, in order.
        meta: what else there is to say.
    """

    text: str
    calls: list[ToolCall]
    meta: dict[str, Any]


class LLMToolParser(Protocol):
    """A function from a text to a :class:`ParseResult`, which every tool transform takes."""

    def __call__(self, response: str | Mapping[str, Any]) -> ParseResult:
        """Take the calls out of a text."""
        ...


class ToolTransformBase(ToolTransform):
    """Appends what :meth:`_process_batch_item` answers to a turn; a subclass writes that.

    What it writes and when is the base class's. An exception of the subclass ends the step: it is
    the program's own, and no answer to a model.

    Attributes:
        tool_role: role of the appended messages.
        use_step: always true; the answers are a part of the step.

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
        """The answers to a turn, in order.

        Args:
            content: what the model wrote.
            index: the row, in the flattened batch.

        Returns:
            A text for each message to append; nothing, or ``None``, where there is nothing to say.
        """
        raise NotImplementedError(f"{type(self).__name__} must write _process_batch_item")

    def _format_result(self, result: str) -> str:
        """The text of a message for an answer; the answer itself here."""
        return result

    def _found(self, message: Any) -> Calls:
        """No calls that another transform could answer."""
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

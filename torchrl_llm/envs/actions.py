"""How an answer says an action: in a tag, by a tool call, or as a bare word.

A parser reads the message that the model wrote. What it cannot read is an :class:`ActionError`,
whose text goes back to the model; the world itself does not move.

Next: :mod:`torchrl_llm.envs.world` has the environments whose worlds move by actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from torchrl_llm.errors import ConfigError, TorchRLLLMError
from torchrl_llm.rewards.reward_parser import extract_block
from torchrl_llm.tools.call_parsers import MessageCallParser, ToolParser
from torchrl_llm.tools.tool import Tool
from torchrl_llm.tools.tool_call import ToolCall

ActionForm = Literal["tag", "call", "bare"]


class ActionError(TorchRLLLMError, ValueError):
    """An answer holds no action that can be carried out; the message is for the model."""


class ActionParser(ABC):
    """Reads an action from an answer; subclasses write :meth:`parse` and ``help_format``.

    Args:
        name: what an action is called, one word; the name of tag or tool.
        written: how an action is written, for the model: "the number of a free cell".
    """

    form: ClassVar[ActionForm]
    help_format: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "parse" in vars(cls) and not hasattr(cls, "help_format"):
            raise ConfigError(
                f"{cls.__name__} does not say how the model is to answer: expected the class "
                "attribute help_format, got none; write for example "
                'help_format = "Answer with {written}."'
            )

    def __init__(self, name: str, written: str) -> None:
        self.name = name
        self.written = written

    @property
    def help(self) -> str:
        """One sentence that tells the model how to answer, of ``help_format``."""
        return self.help_format.format(name=self.name, written=self.written)

    @abstractmethod
    def parse(self, message: Mapping[str, Any]) -> str:
        """The action that a message says.

        Args:
            message: the model's message: ``content``, and ``tool_calls`` where there are any.

        Raises:
            ActionError: it says none.
        """

    def message(self, action: str) -> dict[str, Any]:
        """The shortest message that says an action, as :meth:`parse` reads it; here the bare one.

        Args:
            action: the action.
        """
        return {"role": "assistant", "content": action}


class TagAction(ActionParser):
    """The last ``<move>...</move>`` of an answer, where ``move`` is what an action is called.

    What stands inside the reasoning does not count, nor does reasoning that is never closed.

    Example:
        >>> answer = "<think><move>1</move>?</think> I take the middle. <move> 5 </move>"
        >>> TagAction("move", "a cell").parse({"role": "assistant", "content": answer})
        '5'
    """

    form = "tag"
    help_format = "Answer with {written} between <{name}> and </{name}>."

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        action = extract_block(_said(message), self.name)
        if not action:
            raise ActionError(f"No <{self.name}>...</{self.name}> in your answer.")
        return action

    def message(self, action: str) -> dict[str, Any]:
        """See :meth:`ActionParser.message`."""
        return {"role": "assistant", "content": f"<{self.name}>{action}</{self.name}>"}


class BareAction(ActionParser):
    """The whole answer is the action, reasoning aside.

    Example:
        >>> BareAction("move", "a cell").parse({"role": "assistant", "content": " 5 "})
        '5'
    """

    form = "bare"
    help_format = "Answer with {written} and nothing else."

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        action = _said(message).strip()
        if not action:
            raise ActionError("Your answer is empty.")
        return action


class ActionTool(Tool):
    """A tool whose call is an action; what comes of it the world tells.

    Args:
        name: name of the tool.
        parameters: JSON schema of its arguments, an object.
        description: what the model reads about it.
    """

    kind = "action"

    def __init__(
        self, name: str, parameters: Mapping[str, Any], description: str = "What you do next."
    ) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.description = description

    def run(self, call: ToolCall) -> str:
        """Say that the call has been read; the message of the world follows."""
        return "Received."


class CallAction(ActionParser):
    """A tool call; by default of a tool with one argument, both called as an action is.

    Calls of other tools are not looked at; of several calls of this one none counts.

    Args:
        name: see :class:`ActionParser`.
        written: see :class:`ActionParser`.
        parameters: JSON schema of the arguments, where there is not just the one.
        calls: reads the calls of a message; the message's own ``tool_calls`` if not given.

    Example:
        >>> parser = CallAction("move", "the number of a cell")
        >>> call = {"type": "function", "function": {"name": "move", "arguments": {"move": "5"}}}
        >>> parser.parse({"role": "assistant", "content": "", "tool_calls": [call]})
        '5'
        >>> parser.tool.schema["function"]["parameters"]["required"]
        ['move']
    """

    form = "call"
    help_format = "Act by calling the tool {name!r} with {written}."

    def __init__(
        self,
        name: str,
        written: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        calls: ToolParser | None = None,
    ) -> None:
        super().__init__(name, written)
        if parameters is None:
            argument = {"type": "string", "description": written}
            parameters = {"type": "object", "properties": {name: argument}, "required": [name]}
        self.tool = ActionTool(name, parameters)
        self.calls = MessageCallParser() if calls is None else calls

    def arguments(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the one call.

        Raises:
            ActionError: there is none, or more than one, or it cannot be read.
        """
        calls = self.calls.parse(message, {self.name: self.tool.parameters})
        mine = [c for c in calls if isinstance(c, ToolCall) and c.tool == self.name]
        broken = [c.problem for c in calls if not isinstance(c, ToolCall)]
        if broken and not mine:
            raise ActionError(f"Your tool call cannot be read: {broken[0]}.")
        if len(mine) != 1:
            got = f"are {len(mine)} calls" if mine else "is no call"
            raise ActionError(f"Call the tool {self.name!r} once; there {got} of it.")
        return mine[0].args

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        value = self.arguments(message).get(self.name)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ActionError(f"The tool {self.name!r} needs the argument {self.name!r}.")
        return str(value)

    def message(self, action: str) -> dict[str, Any]:
        """See :meth:`ActionParser.message`."""
        function = {"name": self.name, "arguments": {self.name: action}}
        calls = [{"type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def make_action_parser(form: ActionForm, name: str, written: str) -> ActionParser:
    """The parser of a form.

    Args:
        form: ``"tag"``, ``"call"`` or ``"bare"``.
        name: see :class:`ActionParser`.
        written: see :class:`ActionParser`.

    Raises:
        ConfigError: for another form.
    """
    parsers = {parser.form: parser for parser in (TagAction, CallAction, BareAction)}
    if form not in parsers:
        raise ConfigError(f"actions must be one of {get_args(ActionForm)}, got {form!r}")
    return parsers[form](name, written)


def _said(message: Mapping[str, Any]) -> str:
    """The content without its reasoning."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(
            part if isinstance(part, str) else part.get("text") or "" for part in content
        )
    _, closed, after = content.rpartition("</think>")
    return after if closed else content.partition("<think>")[0]

"""Forms in which an answer writes its action: a tag, a box, a tool call, or a bare word.

A parser reads the message that the model wrote. If it cannot read a message, it raises an
:class:`ActionError`. The model gets the text of the error; the state of the world does not change.
Parsers are links of a :class:`ParserChain`, and :class:`ParsedScore` scores the parsed action in a
plain task.

Next: :mod:`torchrl_llm.envs.world` has the environments that are driven by actions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from torchrl_llm._checked import In, checked
from torchrl_llm.errors import ConfigError, TorchRLLLMError
from torchrl_llm.rewards.answer_formats import last_boxed
from torchrl_llm.rewards.reward_parser import extract_block
from torchrl_llm.tools.call_parsers import MessageCallParser, ToolParser
from torchrl_llm.tools.tool import Tool
from torchrl_llm.tools.tool_call import ToolCall

ActionForm = Literal["tag", "call", "bare", "boxed"]
_Finite = Annotated[float, In("(-inf, inf)")]


class ActionError(TorchRLLLMError, ValueError):
    """An answer contains no action that can be carried out; the model reads the message.

    Attributes:
        reward: sum over the parsers that have read the answer, including the one that failed.
    """

    reward: float = 0.0


CUT_OFF = "Your answer was cut off."


class IncompleteCompletion(ActionError):
    """An answer was cut at its token limit, so it does not count as an answer."""

    def __init__(self) -> None:
        super().__init__(CUT_OFF)


class Parsed(NamedTuple):
    """Result of a parser.

    Attributes:
        action: the action.
        reward: reward for the form of the answer.
    """

    action: str
    reward: float = 0.0


class ActionParser(ABC):
    """Reads an action from an answer; subclasses write :meth:`parse` and ``help_format``.

    Args:
        name: one word for an action; also the name of the tag or tool.
        written: how the model writes an action: "the number of a free cell".
        reward: reward of an answer that it can read.
        penalty: reward of an answer that it cannot read; usually negative.

    Raises:
        ConfigError: a reward is not finite.
    """

    form: ActionForm
    help_format: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "parse" in vars(cls) and not hasattr(cls, "help_format"):
            raise ConfigError(
                f"{cls.__name__} does not say how the model is to answer: expected the class "
                "attribute help_format, got none; write for example "
                'help_format = "Answer with {written}."'
            )

    @checked
    def __init__(
        self, name: str, written: str, *, reward: _Finite = 0.0, penalty: _Finite = 0.0
    ) -> None:
        self.name = name
        self.written = written
        self.reward = reward
        self.penalty = penalty

    @property
    def help(self) -> str:
        """One sentence, made from ``help_format``, that tells the model how to answer."""
        return self.help_format.format(name=self.name, written=self.written)

    @abstractmethod
    def parse(self, message: Mapping[str, Any]) -> str:
        """The action in a message.

        Args:
            message: the model's message: ``content``, and ``tool_calls`` if there are any.

        Raises:
            ActionError: there is none.
        """

    def read(self, message: Mapping[str, Any]) -> Parsed:
        """The action in a message, with the reward for its form.

        Args:
            message: see :meth:`parse`.

        Raises:
            ActionError: there is none; its ``reward`` is the penalty.
        """
        try:
            return Parsed(self.parse(message), self.reward)
        except ActionError as error:
            error.reward = self.penalty
            raise

    def message(self, action: str) -> dict[str, Any]:
        """The shortest message from which :meth:`parse` reads an action; here the action alone.

        Args:
            action: the action.
        """
        return {"role": "assistant", "content": action}


class TagAction(ActionParser):
    """The last ``<move>...</move>`` of an answer, where ``move`` is the parser's ``name``.

    Text inside the reasoning does not count, even if the reasoning is never closed.

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
    """The whole answer without its reasoning is the action.

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


class BoxedAction(ActionParser):
    r"""The last ``\boxed{...}`` of an answer outside its reasoning; braces inside must match.

    Example:
        >>> answer = r"\boxed{1}, no: \boxed{\frac{1}{2}}"
        >>> BoxedAction("answer", "a number").parse({"role": "assistant", "content": answer})
        '\\frac{1}{2}'
    """

    form = "boxed"
    help_format = "Answer with {written} in \\boxed{{}}."

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        action = last_boxed(_said(message))
        if not action:
            raise ActionError("No \\boxed{...} in your answer.")
        return action

    def message(self, action: str) -> dict[str, Any]:
        """See :meth:`ActionParser.message`."""
        return {"role": "assistant", "content": f"\\boxed{{{action}}}"}


class ThinkPrefix(ActionParser):
    """Requires an answer to begin with reasoning, and passes the rest to the next link of a chain.

    Args:
        reward: see :class:`ActionParser`.
        penalty: see :class:`ActionParser`.

    Example:
        >>> answer = "<think>One and one.</think> 2"
        >>> ThinkPrefix().parse({"role": "assistant", "content": answer})
        '2'
    """

    form = "bare"
    help_format = "Begin with your reasoning between <think> and </think>."

    def __init__(self, *, reward: float = 0.0, penalty: float = 0.0) -> None:
        super().__init__("answer", "your answer", reward=reward, penalty=penalty)

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        content = _content(message).lstrip()
        thought, closed, after = content.partition("</think>")
        if not (thought.startswith("<think>") and closed):
            raise ActionError("Your answer does not begin with <think>...</think>.")
        return after.strip()

    def message(self, action: str) -> dict[str, Any]:
        """See :meth:`ActionParser.message`."""
        return {"role": "assistant", "content": f"<think></think>{action}"}


class ActionTool(Tool):
    """A tool whose call is an action; the world reports its result.

    Args:
        name: name of the tool.
        parameters: JSON schema of its arguments, an object.
        description: description of the tool for the model.
    """

    kind = "action"

    def __init__(
        self, name: str, parameters: Mapping[str, Any], description: str = "What you do next."
    ) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.description = description

    def run(self, call: ToolCall) -> str:
        """Report that the call was read; the message of the world follows."""
        return "Received."


class CallAction(ActionParser):
    """A tool call; by default of a tool with one argument, both named ``name``.

    Calls of other tools are ignored; several calls of this tool are an error.

    Args:
        name: see :class:`ActionParser`.
        written: see :class:`ActionParser`.
        parameters: JSON schema of the arguments, instead of the single default one.
        calls: reads the calls of a message; the message's own ``tool_calls`` if not given.
        reward: see :class:`ActionParser`.
        penalty: see :class:`ActionParser`.

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
        reward: float = 0.0,
        penalty: float = 0.0,
    ) -> None:
        super().__init__(name, written, reward=reward, penalty=penalty)
        if parameters is None:
            argument = {"type": "string", "description": written}
            parameters = {"type": "object", "properties": {name: argument}, "required": [name]}
        self.tool = ActionTool(name, parameters)
        self.calls = MessageCallParser() if calls is None else calls

    def arguments(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the one call.

        Raises:
            ActionError: there is no call, or more than one, or the call cannot be read.
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


class ParserChain(ActionParser):
    r"""Parsers one after the other; each reads the part of the answer that the previous one left.

    The first that fails ends the chain. Rewards add up, including the reward of the failing parser.
    Tool calls are always read from the whole message.

    Args:
        links: one or more parsers; the action of the last one is the result.

    Raises:
        ConfigError: there is no link, or a call is not the last one.

    Example:
        >>> chain = ParserChain(ThinkPrefix(reward=0.1), BoxedAction("answer", "it", reward=0.2))
        >>> answer = r"<think>One and one.</think> It is \boxed{2}."
        >>> parsed = chain.read({"role": "assistant", "content": answer})
        >>> parsed.action, round(parsed.reward, 2)
        ('2', 0.3)
        >>> chain.help
        'Begin with your reasoning between <think> and </think>. Answer with it in \\boxed{}.'
    """

    help_format = ""

    def __init__(self, *links: ActionParser) -> None:
        if not links:
            raise ConfigError("a ParserChain needs at least one parser, got none")
        early = next((link for link in links[:-1] if call_link(link) is not None), None)
        if early is not None:
            raise ConfigError(
                f"{type(early).__name__} must be the last link of a chain: it reads the "
                "arguments of a call, which no further parser can read"
            )
        last = links[-1]
        super().__init__(last.name, last.written)
        self.links = links
        self.form = last.form

    @property
    def help(self) -> str:
        """The sentences of the links."""
        return " ".join(link.help for link in self.links)

    def read(self, message: Mapping[str, Any]) -> Parsed:
        """See :meth:`ActionParser.read`."""
        rewards, parsed, left = [], Parsed(""), message
        for link in self.links:
            try:
                parsed = link.read(left)
            except ActionError as error:
                error.reward = math.fsum([*rewards, error.reward])
                raise
            rewards.append(parsed.reward)
            left = {**message, "content": parsed.action}
        return Parsed(parsed.action, math.fsum(rewards))

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        return self.read(message).action

    def message(self, action: str) -> dict[str, Any]:
        """See :meth:`ActionParser.message`."""
        message = self.links[-1].message(action)
        for link in reversed(self.links[:-1]):
            message = {**message, "content": link.message(message["content"])["content"]}
        return message


def call_link(parser: ActionParser) -> CallAction | None:
    """The tool-call parser that a parser is or ends with; ``None`` if there is none.

    Args:
        parser: a parser or a chain.
    """
    last = parser.links[-1] if isinstance(parser, ParserChain) else parser
    if isinstance(last, ParserChain):
        return call_link(last)
    return last if isinstance(last, CallAction) else None


@dataclass(frozen=True)
class ParsedScore:
    r"""Score function of parsed answers, for the ``reward`` of a plain task.

    An answer that cannot be read gets only the reward of the parsers, and no score.

    Args:
        parser: a parser or a chain without tool calls.
        score: function from the action and the answer (such as the column ``"answer"``) to a
            number.

    Raises:
        ConfigError: the parser reads tool calls.

    Example:
        >>> chain = ParserChain(ThinkPrefix(penalty=-0.5), BoxedAction("answer", "a number"))
        >>> score = ParsedScore(chain, lambda action, answer: float(action == answer))
        >>> score(r"<think>One and one.</think> \boxed{2}", "2"), score(r"\boxed{2}", "2")
        (1.0, -0.5)
    """

    parser: ActionParser
    score: Callable[[str, Any], float]

    def __post_init__(self) -> None:
        if call_link(self.parser) is not None:
            raise ConfigError(
                "ParsedScore reads the text of a response, and its parser reads tool calls: give "
                "the task a ToolTransform, or a parser of text"
            )

    def __call__(self, response: str, answer: Any) -> float:
        """The score of a response, or only the parsers' reward if they cannot read it."""
        try:
            action, reward = self.parser.read({"role": "assistant", "content": response})
        except ActionError as error:
            return error.reward
        return self.score(action, answer) + reward


@checked
def make_action_parser(actions: ActionForm | ActionParser, name: str, written: str) -> ActionParser:
    """The parser of a form.

    Args:
        actions: ``"tag"``, ``"call"``, ``"bare"`` or ``"boxed"``; a parser is returned unchanged.
        name: see :class:`ActionParser`.
        written: see :class:`ActionParser`.

    Raises:
        ConfigError: for an unknown form.
    """
    if isinstance(actions, ActionParser):
        return actions
    parsers = {parser.form: parser for parser in (TagAction, CallAction, BareAction, BoxedAction)}
    return parsers[actions](name, written)


def _said(message: Mapping[str, Any]) -> str:
    """The content without its reasoning."""
    content = _content(message)
    _, closed, after = content.rpartition("</think>")
    return after if closed else content.partition("<think>")[0]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)

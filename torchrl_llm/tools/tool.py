"""The base of the tools: a name, a schema of arguments, and :meth:`Tool.run`.

A tool knows nothing of conversations, batches, time limits or threads. The executor gives it one
:class:`~torchrl_llm.tools.tool_call.ToolCall` after another, several at once from different
threads, and turns whatever happens into data.

Next: :mod:`torchrl_llm.tools.executor` runs them,
:mod:`torchrl_llm.tools.tool_transform` brings them into an environment.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema

from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput

ToolKind = Literal["auxiliary", "action"]


class Tool(ABC):
    """Something that the model can call; a subclass writes :meth:`run`.

    Attributes:
        name: what the model calls it.
        description: what the model reads about it.
        parameters: JSON schema of its arguments, an object.
        kind: ``"auxiliary"`` calls are a part of thinking: they change nothing and take no step of
            the environment. Of an ``"action"`` the call is what the model does in this step.
        stateful: whether a call may depend on earlier calls of the same conversation. Such calls
            run one after another, in the order in which the model wrote them; all others at once.
            Actions always do.
        timeout: seconds that a call may take; ``None`` for the executor's. A tool that has a limit
            of its own sets this a little above it, so that its own says what happened.

    Example:
        >>> class Shout(Tool):
        ...     name, description = "shout", "Says it louder."
        ...     parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        ...     def run(self, call):
        ...         return call.args["text"].upper()
        >>> Shout().run(ToolCall("shout", {"text": "hi"}))
        'HI'
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    kind: ClassVar[ToolKind] | ToolKind = "auxiliary"
    stateful: bool = False
    timeout: float | None = None

    @abstractmethod
    def run(self, call: ToolCall) -> str | ToolOutput:
        """Answer a call.

        Called from several threads at once. What it raises becomes the result's error; arguments
        have been checked against ``parameters``.

        Args:
            call: the call.

        Returns:
            What the model is to read.
        """

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it (a function with name, description, parameters)."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """What arguments are checked against (``parameters``, or something stricter)."""
        return self.parameters

    def start(self) -> None:
        """Get ready (a server, a browser); called before the first call.

        It is called again where the tool is used after :meth:`close`.
        """

    def end_session(self, session: int) -> None:
        """Forget what was kept for a conversation that has ended.

        Args:
            session: its ``traj_id``.
        """

    def close(self) -> None:
        """Let go of processes and connections; may be called twice."""


class Restarted:
    """Base of what is copied or pickled without its processes, threads and connections.

    The copy starts its own. A subclass names those attributes and makes them in :meth:`_begin`,
    which its constructor calls.
    """

    _own: ClassVar[tuple[str, ...]]

    def _begin(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


class FunctionTool(Tool):
    """A Python function as a tool; it runs in the trainer's process, so it must be one you trust.

    Args:
        function: with type hints and a Google-style docstring, of which the schema is made.
        kind: see :class:`Tool`.
        schema: as OpenAI, Anthropic or MCP write it, where the function's signature does not
            say it.

    Raises:
        ConfigError: neither ``schema`` nor the function's signature and docstring describe it.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: one of them.
        ...         b: the other.
        ...     '''
        ...     return a + b
        >>> FunctionTool(add).run(ToolCall("add", {"a": 1, "b": 2}))
        '3'
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: ToolKind = "auxiliary",
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            described = get_json_schema(function) if schema is None else dict(schema)
        except Exception as error:
            raise ConfigError(
                f"{getattr(function, '__name__', function)!r} cannot be described to a model: "
                f"{error}; write type hints and a Google-style docstring, or pass schema=..."
            ) from error
        told = read_schema(described)
        self.function = function
        self.name = told.name or function.__name__
        self.description = told.description or ""
        self.parameters = told.parameters or dict(Tool.parameters)
        self.kind = kind

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """``parameters``, closed where the function takes no other arguments."""
        return closed_schema(self.parameters, self.function)

    def run(self, call: ToolCall) -> str | ToolOutput:
        """Call the function; what is no string is written as one, by ``as_text``."""
        value = self.function(**call.args)
        return value if isinstance(value, ToolOutput) else as_text(value)


class ToolDescription(NamedTuple):
    """What a schema says about a tool; ``None`` where it does not say it.

    Attributes:
        name: what the model calls it.
        description: what the model reads about it.
        parameters: JSON schema of its arguments, or each argument's by its name.
    """

    name: str | None
    description: str | None
    parameters: Mapping[str, Any] | None


# Where OpenAI, Anthropic and MCP write the schema of the arguments.
_ARGUMENTS = ("parameters", "input_schema", "inputSchema")
_DESCRIBES = {"type", "name", "description", "strict", *_ARGUMENTS}
JSON_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))


def read_schema(schema: Mapping[str, Any]) -> ToolDescription:
    """Read the schema of a tool, whoever wrote it.

    Args:
        schema: ``{"type": "function", "function": {...}}``, as OpenAI writes it;
            ``{"name", "description", "parameters"}``, as TorchRL does, or with ``input_schema``
            or ``inputSchema``, as Anthropic and MCP do; or the schema of the arguments alone.

    Example:
        >>> read_schema({"type": "function", "function": {"name": "add", "description": "Adds."}})
        ToolDescription(name='add', description='Adds.', parameters=None)
        >>> read_schema({"name": {"type": "string"}}).parameters
        {'name': {'type': 'string'}}
    """
    inner = schema.get("function")
    if isinstance(inner, Mapping) and (schema.get("type") == "function" or "name" in inner):
        schema = {"type": "function", **inner}
    found = next((schema[k] for k in _ARGUMENTS if isinstance(schema.get(k), Mapping)), None)
    texts = [schema.get("name"), schema.get("description")]
    texts = [text if isinstance(text, str) and text not in JSON_TYPES else None for text in texts]
    whole = found is not None and found.get("type") == "object" and set(schema) <= _DESCRIBES
    arguments = schema.get("type") == "object" or "properties" in schema or "$schema" in schema
    if arguments or not (schema.get("type") == "function" or any(texts) or whole):
        return ToolDescription(None, None, schema)
    return ToolDescription(*texts, found)


def closed_schema(parameters: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """A schema that refuses arguments of other names where a function would, too.

    Args:
        parameters: JSON schema of the arguments.
        function: what they are for.
    """
    if "additionalProperties" in parameters or not parameters.get("properties"):
        return parameters
    try:
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):  # a function written in C
        return parameters
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return parameters
    return {**parameters, "additionalProperties": False}


def as_text(value: Any) -> str:
    """What a model reads of any value.

    Strings stay as they are and bytes are decoded; dicts, lists, ``None`` and bools are JSON;
    anything else is its ``str``.

    Example:
        >>> as_text({"sum": 3}), as_text(2.5), as_text(True)
        ('{"sum": 3}', '2.5', 'true')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if value is None or isinstance(value, (bool, Mapping, list, tuple)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):  # keys or cycles that JSON has no form for
            pass
    return str(value)


def as_output(value: Any) -> ToolOutput:
    """What a tool returned as an output whose content is a text."""
    if isinstance(value, ToolOutput):
        return value._replace(content=as_text(value.content))
    return ToolOutput(as_text(value))


def failure(error: BaseException) -> ToolOutput:
    """What a model reads of an exception that a tool raised, with its name as the error.

    Example:
        >>> failure(ValueError("no such file"))[:2]
        ('ValueError: no such file', 'ValueError')
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # whatever a tool raises may not even have a text
        text = ""
    return ToolOutput(f"{name}: {text}" if text else name, name, failure=Failure.of(error, "tool"))


def no_answer(error: str, text: str, exit_code: int | None = None) -> ToolOutput:
    """What a model reads where a tool gave no answer.

    Args:
        error: name of what went wrong.
        text: what the model is told.
        exit_code: see :class:`~torchrl_llm.tools.tool_call.ToolOutput`.

    Example:
        >>> no_answer("ToolTimeout", "No answer within 1 s.").failure.kind
        'ToolTimeout'
    """
    return ToolOutput(text, error, exit_code, failure=Failure.told(error, text, source="tool"))

"""The base class of tools: a name, a schema of arguments, and :meth:`Tool.run`.

A tool does not handle conversations, batches, time limits or threads. The executor passes each
:class:`~torchrl_llm.tools.tool_call.ToolCall` to the tool, several in parallel from different
threads, and records every outcome as data.

Next: :mod:`torchrl_llm.tools.executor` runs tools; :mod:`torchrl_llm.tools.tool_transform` uses
tools in an environment.
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
    """A tool that the model can call; a subclass defines ``run``.

    Attributes:
        name: name of the tool for the model.
        description: description for the model.
        parameters: JSON schema of the arguments, an object.
        kind: ``"auxiliary"``: calls are part of thinking; they change nothing and are not a step of
            the environment. ``"action"``: a call is the model's action in this step.
        stateful: whether a call may depend on earlier calls of the same conversation. Such calls,
            and all actions, run one after the other in the order of the text; all other calls run
            in parallel.
        timeout: time limit of a call in seconds; ``None`` for the time limit of the executor. A
            tool with its own limit sets this slightly higher, so that its own limit reports the
            cause.

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
        """Run a call.

        The method is called from several threads at once. The arguments have been checked against
        ``parameters``. If it raises, the result has the exception as its error.

        Args:
            call: the call.

        Returns:
            The text for the model.
        """

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of chat templates (function with name, description, parameters)."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """Schema for the check of arguments (``parameters``, or a stricter schema)."""
        return self.parameters

    def start(self) -> None:
        """Prepare the tool (start a server, a browser); called before the first call.

        The method is called again if the tool is used after :meth:`close`.
        """

    def end_session(self, session: int) -> None:
        """Delete the state of a conversation that has ended.

        Args:
            session: its ``traj_id``.
        """

    def close(self) -> None:
        """End processes and connections; may be called twice."""


class Restarted:
    """Base class of objects that are copied or pickled without their processes and connections.

    The copy starts its own processes, threads and connections. A subclass names these attributes
    and creates them in :meth:`_begin`; its constructor calls this method.
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
    """A Python function as a tool; it runs in the trainer's process, so use only trusted functions.

    Args:
        function: function with type hints and a Google-style docstring; the schema is derived from
            them.
        kind: see :class:`Tool`.
        schema: schema in the form of OpenAI, Anthropic or MCP, if the signature does not define the
            schema.

    Raises:
        ConfigError: when neither ``schema`` nor the function's signature and docstring describe the
            arguments.

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
        """``parameters``; unknown arguments are rejected if the function does not take them."""
        return closed_schema(self.parameters, self.function)

    def run(self, call: ToolCall) -> str | ToolOutput:
        """Call the function; ``as_text`` converts the result to a string."""
        value = self.function(**call.args)
        return value if isinstance(value, ToolOutput) else as_text(value)


class ToolDescription(NamedTuple):
    """The parts of a tool's schema; ``None`` if missing.

    Attributes:
        name: name of the tool for the model.
        description: description of the tool for the model.
        parameters: JSON schema of the arguments, or a dict with a schema per argument.
    """

    name: str | None
    description: str | None
    parameters: Mapping[str, Any] | None


# Keys for the schema of the arguments in the forms of OpenAI, Anthropic and MCP.
_ARGUMENTS = ("parameters", "input_schema", "inputSchema")
_DESCRIBES = {"type", "name", "description", "strict", *_ARGUMENTS}
JSON_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))


def read_schema(schema: Mapping[str, Any]) -> ToolDescription:
    """Read the schema of a tool in any of the known forms.

    Args:
        schema: ``{"type": "function", "function": {...}}``, as OpenAI writes it;
            ``{"name", "description", "parameters"}``, as in TorchRL; the same with ``input_schema``
            (Anthropic) or ``inputSchema`` (MCP); or only the schema of the arguments.

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
    """Make a schema reject unknown arguments, if the function would also reject them.

    Args:
        parameters: JSON schema of the arguments.
        function: the function.
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
    """Convert any value to a text for the model.

    Strings are unchanged, and bytes are decoded. Dicts, lists, ``None`` and bools are written as
    JSON. All other values are converted with ``str``.

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
        except (TypeError, ValueError, RecursionError):  # keys or cycles that JSON cannot express
            pass
    return str(value)


def as_output(value: Any) -> ToolOutput:
    """Convert the return value of a tool to an output with a text."""
    if isinstance(value, ToolOutput):
        return value._replace(content=as_text(value.content))
    return ToolOutput(as_text(value))


def failure(error: BaseException) -> ToolOutput:
    """Make the output for an exception of a tool; the error name is the type of the exception.

    Example:
        >>> failure(ValueError("no such file"))[:2]
        ('ValueError: no such file', 'ValueError')
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # even ``str()`` of the exception may raise
        text = ""
    return ToolOutput(f"{name}: {text}" if text else name, name, failure=Failure.of(error, "tool"))


def no_answer(error: str, text: str, exit_code: int | None = None) -> ToolOutput:
    """Make the output for a tool that did not answer.

    Args:
        error: name of the error.
        text: text for the model.
        exit_code: see :class:`~torchrl_llm.tools.tool_call.ToolOutput`.

    Example:
        >>> no_answer("ToolTimeout", "No answer within 1 s.").failure.kind
        'ToolTimeout'
    """
    return ToolOutput(text, error, exit_code, failure=Failure.told(error, text, source="tool"))

"""TorchRL's interface for services and plain functions as tools, and its transforms.

A service is an object with a name. It is called with keyword arguments and returns a dict.
:class:`ServiceTool` turns it into a :class:`~torchrl_llm.tools.tool.Tool`. Use ``Tool`` for new
code, because its interface is richer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from torchrl_llm._registry import did_you_mean
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.call_parsers import PatternParser, ToolParser, ToolTagParser
from torchrl_llm.tools.tool import JSON_TYPES, Tool, as_text, closed_schema, read_schema
from torchrl_llm.tools.tool_call import ToolCall, ToolResult
from torchrl_llm.tools.tool_transform import Calls, ToolTransform

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}


@runtime_checkable
class ToolService(Protocol):
    """An object with a name that takes keyword arguments and returns a dict.

    Attributes:
        name: name of the tool for the model.
        schema_in: the arguments: a JSON schema of an object, a JSON schema or a Python type per
            argument, or a whole description of the tool in the form of OpenAI, Anthropic or MCP.
        schema_out: description of the result, for people.
    """

    name: str
    schema_in: Mapping[str, Any]
    schema_out: Mapping[str, Any]

    def __call__(self, **kwargs: Any) -> dict[str, Any]:
        """Call the service."""
        ...


class ToolRegistry:
    """Services by name, in the order of their registration.

    Args:
        services: initial services.

    Raises:
        ConfigError: for two services with the same name.

    Example:
        >>> class Echo:
        ...     name, schema_in, schema_out = "echo", {"text": str}, {"text": str}
        ...     def __call__(self, text, **kwargs):
        ...         return {"text": text}
        >>> registry = ToolRegistry([Echo()])
        >>> "echo" in registry, registry.get("echo")(text="hi")
        (True, {'text': 'hi'})
    """

    def __init__(self, services: Iterable[ToolService] = ()) -> None:
        self._services: dict[str, ToolService] = {}
        for service in services:
            self.register(service)

    def register(self, service: ToolService) -> None:
        """Add a service.

        Raises:
            ConfigError: when the service has no name or cannot be called, or when its name is
                already used.
        """
        name = getattr(service, "name", None)
        if not isinstance(name, str) or not name or not callable(service):
            raise ConfigError(f"a service has a name and can be called, got {service!r}")
        if name in self._services:
            raise ConfigError(
                f"a service named {name!r} is registered already, and a call must have one meaning"
            )
        self._services[name] = service

    def get(self, name: str) -> ToolService:
        """Look up a service by name.

        Raises:
            KeyError: when there is no such service.
        """
        if name not in self._services:
            hint = did_you_mean(name, self._services)
            raise KeyError(f"no service {name!r}; there are {sorted(self._services)}{hint}")
        return self._services[name]

    def __contains__(self, name: object) -> bool:
        return name in self._services

    def __len__(self) -> int:
        return len(self._services)

    def __iter__(self) -> Iterator[ToolService]:
        return iter(self._services.values())


class RowState(Mapping):
    """The calling row with a dict-like interface; it wraps a locked tensordict.

    All other attributes are the attributes of the tensordict. Writing raises an error.

    Args:
        row: the row after the policy; ``None`` outside an environment.

    Example:
        >>> from tensordict import TensorDict
        >>> state = RowState(TensorDict({"turn": 3}).lock_())
        >>> bool(state), state["turn"].item(), state.get("nothing", 0), bool(RowState(None))
        (True, 3, 0, False)
    """

    def __init__(self, row: TensorDictBase | None) -> None:
        self._row = TensorDict().lock_() if row is None else row

    def __getitem__(self, key: Any) -> Any:
        return self._row[key]

    def __contains__(self, key: object) -> bool:
        return key in self._row.keys(include_nested=isinstance(key, tuple))

    def __iter__(self) -> Iterator[str]:
        return iter(self._row.keys())

    def __len__(self) -> int:
        return len(self._row.keys())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._row[key] = value

    def __getattr__(self, name: str) -> Any:
        if name == "_row":  # during a copy
            raise AttributeError(name)
        return getattr(self._row, name)


class ServiceTool(Tool):
    """A service, or any function with keyword arguments, as a tool.

    Args:
        function: the function.
        name: name of the tool for the model.
        parameters: JSON schema of its arguments.
        description: description of the tool for the model.
        pass_state: pass the calling row as ``_state``, if the function takes it.
        stateful: see :class:`~torchrl_llm.tools.tool.Tool`.

    Example:
        >>> tool = ServiceTool(lambda text: {"loud": text.upper()}, name="shout")
        >>> tool.parameters["required"], tool.run(ToolCall("shout", {"text": "hi"}))
        (['text'], '{"loud": "HI"}')
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        description: str | None = None,
        pass_state: bool = False,
        stateful: bool = False,
    ) -> None:
        self.function = function
        self.name = name
        self.parameters = signature_schema(function) if parameters is None else parameters
        written = inspect.getdoc(function) if inspect.isroutine(function) else None
        self.description = (written or "") if description is None else description
        self.stateful = stateful
        self._pass_state = pass_state and _takes(function, "_state")

    @classmethod
    def of(cls, service: ToolService, *, pass_state: bool, stateful: bool) -> ServiceTool:
        """Create the tool of a service."""
        schema = getattr(service, "schema_in", None)
        told = {} if schema is None else _told(schema, service.name)
        if (description := getattr(service, "description", None)) is not None:
            told["description"] = description
        return cls(service, name=service.name, pass_state=pass_state, stateful=stateful, **told)

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """``parameters``; unknown arguments are rejected if the function does not take them."""
        return closed_schema(self.parameters, self.function)

    def __call__(self, **kwargs: Any) -> Any:
        """Call the function without a conversation."""
        return self.function(**kwargs)

    def run(self, call: ToolCall) -> str:
        """Call the function; its result is written as JSON."""
        state = {"_state": RowState(call.state)} if self._pass_state else {}
        return as_text(self.function(**{**call.args, **state}))


def _told(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the schema of the tool ``name`` to arguments of :class:`ServiceTool`."""
    told = read_schema(schema)
    if told.name not in (None, name):
        raise ConfigError(f"the schema of the tool {name!r} is one of {told.name!r}: name it alike")
    parameters = None if told.parameters is None else json_schema(told.parameters)
    return {"parameters": parameters, "description": told.description}


def json_schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a service's ``schema_in`` to a JSON schema.

    Args:
        arguments: a JSON schema of an object; or a dict that maps argument names to a schema, a
            Python type or the name of a JSON type. In the second form all arguments are required.

    Example:
        >>> json_schema({"n": int})["properties"], json_schema({"n": int})["required"]
        ({'n': {'type': 'integer'}}, ['n'])
    """
    if arguments.get("type") == "object" or "$schema" in arguments or "properties" in arguments:
        return dict(arguments)
    named = {name: _schema_of(kind) for name, kind in arguments.items()}
    return {"type": "object", "properties": named, "required": list(named)}


def signature_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Derive the JSON schema of a function's arguments from its signature only.

    Example:
        >>> signature_schema(lambda a, b=2.0: a)["required"]
        ['a']
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, TypeError, ValueError):  # hints with undefined names, or C code
        return {"type": "object"}
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in rest and p.name != "_state"]
    return {
        "type": "object",
        "properties": {p.name: _schema_of(p.annotation) for p in named},
        "required": [p.name for p in named if p.default is inspect.Parameter.empty],
    }


def _schema_of(kind: Any) -> dict[str, Any]:
    if isinstance(kind, Mapping):
        return dict(kind)
    if isinstance(kind, str) and kind in JSON_TYPES:
        return {"type": kind}
    found = _TYPES.get(kind) if isinstance(kind, type) else None
    return {} if found is None else {"type": found}


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return any_name or name in parameters


class SimpleToolTransform(ToolTransform):
    r"""A :class:`~torchrl_llm.tools.ToolTransform` with plain functions as tools.

    By default, calls have the form ``<tool>name\n{"argument": value}</tool>``.

    Args:
        tools: maps a name to a function; the function is called with keyword arguments.
        tool_schemas: maps a name to a schema, if the signature is not enough: a schema of the
            arguments, or a whole description in the form of OpenAI, Anthropic or MCP.
        parser: parser for a different form of calls.
        tool_call_pattern: a regular expression with two groups, name and JSON arguments, instead of
            a parser.
        tool_name: role of the appended messages.
        timeout: time limit of a call in seconds.
        kwargs: further arguments of the base class.

    Raises:
        ConfigError: when both parser and pattern are given, when a schema belongs to no tool, or
            when a schema has a different tool name.

    Example:
        >>> transform = SimpleToolTransform({"add": lambda a, b: {"sum": a + b}})
        >>> transform.schemas[0]["function"]["name"]
        'add'
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        parser: ToolParser | Callable[[str], Mapping[str, Any]] | None = None,
        tool_call_pattern: str | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
        **kwargs: Any,
    ) -> None:
        if parser is not None and tool_call_pattern is not None:
            raise ConfigError("pass parser or tool_call_pattern, not both")
        schemas = dict(tool_schemas or {})
        if unknown := sorted(set(schemas) - set(tools)):
            raise ConfigError(f"tool_schemas has {unknown}, and tools only {sorted(tools)}")
        if parser is None:
            parser = PatternParser(tool_call_pattern) if tool_call_pattern else ToolTagParser()
        made = [
            ServiceTool(
                function, name=name, **(_told(schemas[name], name) if name in schemas else {})
            )
            for name, function in tools.items()
        ]
        super().__init__(made, parser, tool_name=tool_name, timeout=timeout, **kwargs)
        self.tool_call_pattern, self.tool_schemas = tool_call_pattern, schemas


class ExecuteToolsInOrder(ToolTransform):
    """Runs the calls of a turn strictly in order and reports them in one message.

    The message is ``<tool_results>``, a paragraph for each call, ``</tool_results>``. Calls of
    different conversations still run in parallel.

    Args:
        registry: the services.
        parser: parser of calls.
        stop_on_error: skip the calls after a failed call.
        pass_state_to_tools: pass ``_state``, the calling row (a dict-like ``RowState``), to
            services that take this keyword.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Example:
        >>> from torchrl_llm.tools import XMLBlockParser
        >>> class Search:
        ...     name, schema_in, schema_out = "search", {"query": str}, {"results": list}
        ...     def __call__(self, query, _state=None):
        ...         return {"results": [query, _state["turn"].item()]}
        >>> transform = ExecuteToolsInOrder(ToolRegistry([Search()]), XMLBlockParser())
        >>> list(transform.tools)
        ['search']
    """

    def __init__(
        self,
        registry: ToolRegistry,
        parser: ToolParser | Callable[[str], Mapping[str, Any]],
        stop_on_error: bool = False,
        pass_state_to_tools: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__((), parser, **kwargs)
        self.registry = registry
        self.hands_over_state = self.pass_state_to_tools = pass_state_to_tools
        self.executor.stop_on_error = self.stop_on_error = stop_on_error
        self._add_services()

    def _add_services(self) -> None:
        """Add the tools of services registered since the last call."""
        self.executor.add(
            ServiceTool.of(service, pass_state=self.pass_state_to_tools, stateful=True)
            for service in self.registry
            if service.name not in self.tools
        )

    def _found(self, message: Any) -> Calls:
        """Return the calls, including calls of services that were registered later."""
        self._add_services()
        return super()._found(message)

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Return one message with the results of all calls."""
        lines = ["<tool_results>"]
        for number, result in enumerate(results, start=1):
            name = result.call.tool or "a call"
            tag = "" if result.call.tag is None else f" [{result.call.tag}]"
            state = "" if result.ok else " failed"
            lines.append(f"{number}. {name}{tag}{state}: {result.content}")
        return [{"role": self.tool_name, "content": "\n".join([*lines, "</tool_results>"])}]

"""Tools from a dict of functions: :class:`SimpleToolTransform`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.call_parsers import PatternParser, ToolParser, ToolTagParser
from torchrl_llm.tools.tool_registry import ServiceTool, json_schema
from torchrl_llm.tools.tool_transform import ToolTransform


class SimpleToolTransform(ToolTransform):
    r"""A :class:`~torchrl_llm.tools.ToolTransform` from plain functions.

    Calls are written ``<tool>name\n{"argument": value}</tool>`` by default.

    Args:
        tools: name to function; it is called with the arguments as keywords.
        tool_schemas: name to JSON schema of the arguments, where the signature does not say enough.
        parser: another way to write calls.
        tool_call_pattern: a regular expression with two groups, name and JSON arguments, instead of
            a parser.
        tool_name: role of the results.
        timeout: seconds that a call may take.
        kwargs: further arguments of the base class.

    Raises:
        ConfigError: parser and pattern, or a schema for a tool that there is not.

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
                function,
                name=name,
                parameters=None if name not in schemas else json_schema(schemas[name]),
            )
            for name, function in tools.items()
        ]
        super().__init__(made, parser, tool_name=tool_name, timeout=timeout, **kwargs)

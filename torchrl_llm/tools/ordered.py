"""Services called in the order in which the model wrote the calls: :class:`ExecuteToolsInOrder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_llm.tools.call_parsers import ToolParser
from torchrl_llm.tools.tool_call import ToolResult
from torchrl_llm.tools.tool_registry import ServiceTool, ToolRegistry
from torchrl_llm.tools.tool_transform import ToolTransform


class ExecuteToolsInOrder(ToolTransform):
    """Runs the calls of a turn strictly one after another and reports them in one message.

    The message is ``<tool_results>``, a paragraph for each call, ``</tool_results>``. Calls of
    different conversations still run at once.

    Args:
        registry: the services.
        parser: how calls are written.
        stop_on_error: do not run the calls behind one that failed.
        pass_state_to_tools: call a service with ``_state``, the row that calls as a locked
            tensordict, where it takes that keyword.
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
        tools = [
            ServiceTool.of(service, pass_state=pass_state_to_tools, stateful=True)
            for service in registry
        ]
        super().__init__(tools, parser, **kwargs)
        self.hands_over_state = pass_state_to_tools
        self.executor.stop_on_error = stop_on_error

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """One message with the results of all calls."""
        lines = ["<tool_results>"]
        for number, result in enumerate(results, start=1):
            name = result.call.tool or "a call"
            tag = "" if result.call.tag is None else f" [{result.call.tag}]"
            state = "" if result.ok else " failed"
            lines.append(f"{number}. {name}{tag}{state}: {result.content}")
        return [{"role": self.tool_name, "content": "\n".join([*lines, "</tool_results>"])}]

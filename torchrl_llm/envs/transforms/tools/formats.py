"""Calls that are written in the text of a turn, in the formats that models are trained on.

Take one of these where the policy's chat template has no form for tool calls (or none for this
one); where it has, the formatter reads them better than any text can be read, see
:class:`~torchrl_llm.envs.transforms.tools.parsers.MessageCallParser`.

Next: :mod:`torchrl_llm.data.formatter.calls` reads the syntaxes of chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_llm.data.formatter.calls import CallSyntax, syntax_of
from torchrl_llm.data.formatter.probe import NAME, VALUE
from torchrl_llm.envs.transforms.tools.call import BrokenCall, ToolCall
from torchrl_llm.envs.transforms.tools.parsers import Schemas, ToolParser, spoken_text
from torchrl_llm.errors import ConfigError

__all__ = ["HermesParser", "LlamaParser", "SyntaxParser"]


class SyntaxParser(ToolParser):
    """Calls in the syntax of an example.

    Args:
        example: how a call of the tool ``NAME`` with ``{"key": "VALUE"}`` is written, with these
            very words; what surrounds them is the syntax.

    Raises:
        ConfigError: nothing of the kinds that are known can be made of the example.

    Example:
        >>> parser = SyntaxParser('[CALL]{"name": "NAME", "arguments": {"key": "VALUE"}}[/CALL]')
        >>> text = 'So: [CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]'
        >>> parser.parse({"role": "assistant", "content": text}, {})
        [ToolCall(tool='add', args={'a': 1}, tag=None, id=None, session=None)]
    """

    def __init__(self, example: str) -> None:
        probe = example.replace("NAME", NAME).replace("VALUE", VALUE)
        syntax = syntax_of(probe)
        if syntax is None:
            raise ConfigError(
                f"no syntax of calls can be read from {example!r}: write a call of the tool NAME "
                'with the arguments {"key": "VALUE"}, as JSON between two marks for instance'
            )
        self.example = example
        self._syntax: CallSyntax = syntax

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> list[ToolCall | BrokenCall]:
        """The calls in the text behind the reasoning; broken ones come last."""
        parsed = self._syntax.parse(spoken_text(message), schemas)
        calls = [ToolCall(call.name, call.arguments, id=call.id) for call in parsed.calls]
        return calls + [BrokenCall(error, self.example) for error in parsed.errors]


class HermesParser(SyntaxParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3.

    Example:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> [call.tool for call in HermesParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('<tool_call>{"name": "NAME", "arguments": {"key": "VALUE"}}</tool_call>')


class LlamaParser(SyntaxParser):
    """``{"name": ..., "parameters": {...}}`` and nothing else in the turn: Llama 3.

    Example:
        >>> text = '{"name": "add", "parameters": {"a": 1}}'
        >>> [call.tool for call in LlamaParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('{"name": "NAME", "parameters": {"key": "VALUE"}}')

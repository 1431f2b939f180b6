"""Tools: what a model can call, how it writes a call, and how the answer comes back."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.tools.browser": "BrowserTool BrowserTransform",
    "torchrl_llm.tools.call_parsers": (
        "HermesParser JSONCallParser LlamaParser MessageCallParser MessageOrTagParser "
        "PatternParser SyntaxParser TextParser ToolParser ToolTagParser XMLBlockParser"
    ),
    "torchrl_llm.tools.code_blocks": "CodeBlockParser",
    "torchrl_llm.tools.executor": "ToolExecutor",
    "torchrl_llm.tools.mcp": "MCPServers MCPTool MCPToolTransform",
    "torchrl_llm.tools.process_tool": "ProcessTool",
    "torchrl_llm.tools.python_interpreter": (
        "PersistentPythonProcess PythonExecutorService PythonInterpreter PythonTool"
    ),
    "torchrl_llm.tools.text_tools": "LLMToolParser ParseResult ToolTransformBase",
    "torchrl_llm.tools.tool": "FunctionTool Tool",
    "torchrl_llm.tools.tool_call": "BrokenCall ToolCall ToolOutput ToolResult",
    "torchrl_llm.tools.tool_registry": (
        "ExecuteToolsInOrder SimpleToolTransform ToolRegistry ToolService"
    ),
    "torchrl_llm.tools.tool_transform": "ToolTransform",
}
__getattr__ = lazy(__name__, _LAZY)

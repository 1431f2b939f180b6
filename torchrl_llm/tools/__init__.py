"""Tools: what a model can call, how it writes a call, and how the answer comes back."""

from torchrl_llm.tools.browser import BrowserTool, BrowserTransform
from torchrl_llm.tools.call_parsers import (
    HermesParser,
    JSONCallParser,
    LlamaParser,
    MessageCallParser,
    PatternParser,
    SyntaxParser,
    TextParser,
    ToolParser,
    ToolTagParser,
    XMLBlockParser,
)
from torchrl_llm.tools.code_blocks import CodeBlockParser
from torchrl_llm.tools.executor import ToolExecutor
from torchrl_llm.tools.mcp import MCPServers, MCPTool, MCPToolTransform
from torchrl_llm.tools.process_tool import ProcessTool
from torchrl_llm.tools.python_interpreter import (
    PythonExecutorService,
    PythonInterpreter,
    PythonTool,
)
from torchrl_llm.tools.tool import FunctionTool, Tool
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall, ToolOutput, ToolResult
from torchrl_llm.tools.tool_registry import (
    ExecuteToolsInOrder,
    SimpleToolTransform,
    ToolRegistry,
    ToolService,
)
from torchrl_llm.tools.tool_transform import ToolTransform

__all__ = [
    "BrokenCall",
    "BrowserTool",
    "BrowserTransform",
    "CodeBlockParser",
    "ExecuteToolsInOrder",
    "FunctionTool",
    "HermesParser",
    "JSONCallParser",
    "LlamaParser",
    "MCPServers",
    "MCPTool",
    "MCPToolTransform",
    "MessageCallParser",
    "PatternParser",
    "ProcessTool",
    "PythonExecutorService",
    "PythonInterpreter",
    "PythonTool",
    "SimpleToolTransform",
    "SyntaxParser",
    "TextParser",
    "Tool",
    "ToolCall",
    "ToolExecutor",
    "ToolOutput",
    "ToolParser",
    "ToolRegistry",
    "ToolResult",
    "ToolService",
    "ToolTagParser",
    "ToolTransform",
    "XMLBlockParser",
]

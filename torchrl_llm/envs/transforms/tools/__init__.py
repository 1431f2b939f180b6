"""Tools: what a model can call, how it writes a call, and how the answer comes back."""

from torchrl_llm.envs.transforms.tools.base import ToolTransform
from torchrl_llm.envs.transforms.tools.browser import BrowserTool, BrowserTransform
from torchrl_llm.envs.transforms.tools.call import BrokenCall, ToolCall, ToolOutput, ToolResult
from torchrl_llm.envs.transforms.tools.code_blocks import CodeBlockParser
from torchrl_llm.envs.transforms.tools.executor import ToolExecutor
from torchrl_llm.envs.transforms.tools.formats import (
    HermesParser,
    JSONCallParser,
    LlamaParser,
    PatternParser,
    SyntaxParser,
    ToolTagParser,
    XMLBlockParser,
)
from torchrl_llm.envs.transforms.tools.mcp import MCPServers, MCPTool, MCPToolTransform
from torchrl_llm.envs.transforms.tools.ordered import ExecuteToolsInOrder
from torchrl_llm.envs.transforms.tools.parsers import MessageCallParser, TextParser, ToolParser
from torchrl_llm.envs.transforms.tools.process import ProcessTool
from torchrl_llm.envs.transforms.tools.python_interpreter import PythonInterpreter, PythonTool
from torchrl_llm.envs.transforms.tools.python_service import PythonExecutorService
from torchrl_llm.envs.transforms.tools.registry import ToolRegistry, ToolService
from torchrl_llm.envs.transforms.tools.simple import SimpleToolTransform
from torchrl_llm.envs.transforms.tools.tool import FunctionTool, Tool

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

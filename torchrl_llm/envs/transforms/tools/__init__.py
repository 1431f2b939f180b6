"""Tools: what a model can call, how it writes a call, and how the answer comes back."""

from torchrl_llm.envs.transforms.tools.base import ToolTransform
from torchrl_llm.envs.transforms.tools.call import BrokenCall, ToolCall, ToolOutput, ToolResult
from torchrl_llm.envs.transforms.tools.executor import ToolExecutor
from torchrl_llm.envs.transforms.tools.formats import HermesParser, LlamaParser, SyntaxParser
from torchrl_llm.envs.transforms.tools.parsers import MessageCallParser, ToolParser
from torchrl_llm.envs.transforms.tools.tool import FunctionTool, Tool

__all__ = [
    "BrokenCall",
    "FunctionTool",
    "HermesParser",
    "LlamaParser",
    "MessageCallParser",
    "SyntaxParser",
    "Tool",
    "ToolCall",
    "ToolExecutor",
    "ToolOutput",
    "ToolParser",
    "ToolResult",
    "ToolTransform",
]

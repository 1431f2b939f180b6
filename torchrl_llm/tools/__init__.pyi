from torchrl_llm.tools.browser import (
    BrowserTool as BrowserTool,
    BrowserTransform as BrowserTransform,
)
from torchrl_llm.tools.call_parsers import (
    HermesParser as HermesParser,
    JSONCallParser as JSONCallParser,
    LlamaParser as LlamaParser,
    MessageCallParser as MessageCallParser,
    MessageOrTagParser as MessageOrTagParser,
    PatternParser as PatternParser,
    SyntaxParser as SyntaxParser,
    TextParser as TextParser,
    ToolParser as ToolParser,
    ToolTagParser as ToolTagParser,
    XMLBlockParser as XMLBlockParser,
)
from torchrl_llm.tools.code_blocks import CodeBlockParser as CodeBlockParser
from torchrl_llm.tools.executor import ToolExecutor as ToolExecutor
from torchrl_llm.tools.mcp import (
    MCPServers as MCPServers,
    MCPTool as MCPTool,
    MCPToolTransform as MCPToolTransform,
)
from torchrl_llm.tools.process_tool import ProcessTool as ProcessTool
from torchrl_llm.tools.python_interpreter import (
    PersistentPythonProcess as PersistentPythonProcess,
    PythonExecutorService as PythonExecutorService,
    PythonInterpreter as PythonInterpreter,
    PythonTool as PythonTool,
)
from torchrl_llm.tools.shell import ShellTool as ShellTool, ShellTransform as ShellTransform
from torchrl_llm.tools.text_tools import (
    LLMToolParser as LLMToolParser,
    ParseResult as ParseResult,
    ToolTransformBase as ToolTransformBase,
)
from torchrl_llm.tools.tool import FunctionTool as FunctionTool, Tool as Tool
from torchrl_llm.tools.tool_call import (
    BrokenCall as BrokenCall,
    ToolCall as ToolCall,
    ToolOutput as ToolOutput,
    ToolResult as ToolResult,
)
from torchrl_llm.tools.tool_registry import (
    ExecuteToolsInOrder as ExecuteToolsInOrder,
    SimpleToolTransform as SimpleToolTransform,
    ToolRegistry as ToolRegistry,
    ToolService as ToolService,
)
from torchrl_llm.tools.tool_transform import ToolTransform as ToolTransform

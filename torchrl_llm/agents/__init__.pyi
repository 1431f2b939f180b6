from torchrl_llm.agents.agent import Agent as Agent
from torchrl_llm.agents.program_agent import ProgramAgent as ProgramAgent
from torchrl_llm.agents.react_agent import LastRequest as LastRequest, ReActAgent as ReActAgent
from torchrl_llm.agents.retool_agent import (
    CodeTransform as CodeTransform,
    ReToolAgent as ReToolAgent,
)
from torchrl_llm.agents.tool_agent import ToolAgent as ToolAgent

"""Agents: frozen records that say how a model acts, and bring that into any environment."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.agents.agent": "Agent",
    "torchrl_llm.agents.react_agent": "LastRequest ReActAgent",
    "torchrl_llm.agents.retool_agent": "CodeTransform ReToolAgent",
    "torchrl_llm.agents.tool_agent": "ToolAgent",
}
__getattr__ = lazy(__name__, _LAZY)

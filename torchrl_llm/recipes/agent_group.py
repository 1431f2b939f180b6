"""The group ``agent`` of a recipe: type of the agent, and the arguments of its class as keys."""

from __future__ import annotations

import inspect

from torchrl_llm._registry import find
from torchrl_llm.agents import Agent
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.strict_config import Component, Variants, variant


class AgentConfig(Component):
    """The agent. ``type`` names its class; the keys are the arguments of its constructor.

    ``env.system_prompt`` sets the system prompt of every agent, so it is not a key of this group.
    """

    default = "none"

    @property
    def owns_loop(self) -> bool:
        """Whether the agent has its own loop."""
        return self.target.OWNS_LOOP


def _agent(name: str) -> type[Component]:
    target = find("agents", name)
    if not (inspect.isclass(target) and issubclass(target, Agent)):
        raise ConfigError(f"agent={name} must be a subclass of Agent, got {target!r}")
    # Only agent=tool has a limit of turns for tools, not the plain agent.
    given = ("system_prompt", "tools") if target is Agent else ("system_prompt",)
    if target.OWNS_LOOP:
        given = ("system_prompt", "tools", "accept_cut")
    return variant(AgentConfig, name, target, given=given)


AgentConfig.variants = Variants("agents", _agent)

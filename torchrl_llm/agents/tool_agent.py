"""An agent that calls tools, its own or the environment's, while it thinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm._checked import Ge, Gt, check
from torchrl_llm._registry import register
from torchrl_llm.agents.agent import Agent, tool_transforms
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import Tool, ToolParser, ToolTransform


@register("agents", "tool")
@dataclass(frozen=True, kw_only=True)
class ToolAgent(Agent):
    """A model that may call tools before it answers.

    Args:
        max_auxiliary_turns: maximum number of consecutive turns that only call its own tools. The
            calls of the next turn are rejected, and that turn counts as the answer. For the
            environment's tools, the environment's limit applies.
        calls: form of the calls; by default the form of the chat template.
        timeout: seconds that a call may take.

    Raises:
        ConfigError: a number is invalid; or, when the agent is added to an environment, neither of
            them has a tool.

    Example:
        >>> from torchrl_llm.envs import ArithmeticEnv
        >>> env = ToolAgent(tools=["calculator"]).wrap(ArithmeticEnv(num_envs=1))
        >>> [schema["function"]["name"] for schema in env.tool_schemas]
        ['calculator']
    """

    max_auxiliary_turns: int = 4
    calls: ToolParser | None = None
    timeout: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Not among the fields, because every subclass would inherit it.
        check("max_auxiliary_turns", self.max_auxiliary_turns, Annotated[int, Ge(1)])
        check("timeout", self.timeout, Annotated[float, Gt(0)])

    def tool_transform(self, tools: Sequence[Tool]) -> ToolTransform:
        """See :meth:`Agent.tool_transform`."""
        return ToolTransform(
            tools,
            self.calls,
            timeout=self.timeout,
            max_auxiliary_turns=self.max_auxiliary_turns,
            accept_cut=self.accept_cut,
        )

    def wrap(self, env: EnvBase) -> TransformedEnv:
        """See :meth:`Agent.wrap`."""
        env = super().wrap(env)
        if not any(transform.tools for transform in tool_transforms(env)):
            raise ConfigError(
                f"{type(self).__name__} has no tool to call here: give it tools=[...] (in a "
                f"recipe agent.tools=[NAME]), for {type(env).__name__} has none of its own"
            )
        return env

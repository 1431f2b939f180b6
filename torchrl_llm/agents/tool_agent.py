"""An agent that thinks with tools, of its own or of the environment."""

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
        max_auxiliary_turns: most turns in a row that only call its own tools. The calls of the next
            turn are rejected, and that turn counts as the answer. The environment's limit on its
            own tools stays.
        calls: how calls are written; as the chat template writes them if not given.
        timeout: seconds that a call may take.

    Raises:
        ConfigError: an invalid number, or, when it is added to an environment, no tool in either of
            them.

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
        # Not of the fields, for they are those of every subclass too.
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

"""An agent: the context that a model sees, its tools, and the parser of its answers.

An :class:`Agent` is a frozen record without state. :meth:`Agent.wrap` inserts its transforms at the
correct places of an environment, :meth:`Agent.policy` describes its tools to a policy; collection,
training and evaluation then work as without an agent. The state of an episode is in its rows.

Next: :mod:`torchrl_llm.agents.tool_agent`, :mod:`~torchrl_llm.agents.react_agent` and
:mod:`~torchrl_llm.agents.retool_agent` are agents that call tools. ``docs/source/howto/agents.rst``
shows how to write one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_llm._registry import register
from torchrl_llm.envs.actions import ActionParser
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.envs.datasets.task_env import tool_schemas
from torchrl_llm.envs.layers import innermost, insert, transforms_of
from torchrl_llm.envs.transforms.answer_gates import AnswerGate, CutAnswers, ParseAnswers
from torchrl_llm.envs.transforms.context_strategy import ContextStrategy
from torchrl_llm.envs.transforms.episode_limits import StepCounter
from torchrl_llm.envs.world import WorldEnv, WorldTransform
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import LLMWrapperBase
from torchrl_llm.rewards import RewardParser
from torchrl_llm.tools import Tool, ToolTransform
from torchrl_llm.tools.tool_transform import as_tool

AnyTool = str | Tool | Callable[..., Any]
# Transforms that read a whole turn, after its tool calls were answered.
_AFTER_TOOLS = (AnswerGate, RewardParser, WorldTransform, StepCounter, ContextStrategy)


@register("agents", "none")
@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model that answers, with only the settings of this record.

    Args:
        context: the part of a conversation that the model sees; all of it if not given.
        tools: tools of the model in addition to the environment's: tools, classes of tools,
            functions, or names of these. A name that the environment's tools also have is an error.
        parser: reads answers. In a world (a game, a session) it reads the action; in a plain task
            it checks the form of an answer, see :class:`~torchrl_llm.envs.transforms.ParseAnswers`.
        system_prompt: replaces the environment's own system prompt (in a game, the rules are a part
            of it).
        accept_cut: carry out the actions and calls of answers that were cut at their token limit.
            Other cut answers are scored anyway.

    Raises:
        ConfigError: ``tools`` holds something that is no tool.

    Example:
        >>> from torchrl_llm.envs import ArithmeticEnv
        >>> env = Agent(system_prompt="Add.").wrap(ArithmeticEnv(num_envs=1, shuffle=False))
        >>> env.reset()["history"].prompt[0, 0].content
        'Add.'
    """

    OWNS_LOOP: ClassVar[bool] = False
    """Whether the agent has its own loop, and the environment only provides rows and reward."""

    context: ContextStrategy | None = None
    tools: list[AnyTool] | tuple[AnyTool, ...] = ()
    parser: ActionParser | None = None
    system_prompt: str | None = None
    accept_cut: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tools, str) or not isinstance(self.tools, Sequence):
            raise ConfigError(f"tools is a list, as in tools=[lookup]; got {self.tools!r}")
        object.__setattr__(self, "tools", tuple(self.tools))
        self.make_tools()

    # -- tools ------------------------------------------------------------------------------------

    def make_tools(self) -> list[Tool]:
        """Make the agent's own tools for one environment.

        Raises:
            ConfigError: one is no tool.
        """
        return [copy.deepcopy(as_tool(tool)) for tool in self.tools]

    def make_transforms(self, acting: Sequence[Tool] = ()) -> list[ToolTransform]:
        """Make the transforms that answer the calls of the agent, for one environment.

        Args:
            acting: action tools of a world whose actions are calls.
        """
        tools = self.make_tools()
        return [self.tool_transform([*tools, *acting])] if tools else []

    def tool_transform(self, tools: Sequence[Tool]) -> ToolTransform:
        """The transform that answers tool calls.

        Args:
            tools: one or more tools.
        """
        return ToolTransform(tools, accept_cut=self.accept_cut)

    def auxiliary_turns(self, own: int) -> int:
        """Return the maximum number of consecutive turns that only call tools.

        Args:
            own: number that the environment itself allows.
        """
        return max([own, *(each.max_auxiliary_turns for each in self.make_transforms())])

    # -- environment and policy -------------------------------------------------------------------

    def wrap(self, env: EnvBase) -> TransformedEnv:
        """Add the agent to an environment; call it before the first reset.

        Tools come before the transforms that score a turn, the context strategy after them.

        Args:
            env: an environment of conversations; it is changed.

        Returns:
            The environment, inside a ``TransformedEnv`` if it was in none.

        Raises:
            ConfigError: not an environment of conversations, a tool name that the environment
                already has, or a setting that it cannot use.

        Example:
            >>> from torchrl_llm.envs import CalculatorEnv
            >>> Agent(tools=["calculator"]).wrap(CalculatorEnv())  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            torchrl_llm.errors.ConfigError: Agent and CalculatorEnv both have a tool named \
'calculator'...
        """
        base = innermost(env)
        if not isinstance(base, ChatEnv):
            raise ConfigError(
                f"{type(self).__name__} acts in conversations, got {type(env).__name__}: wrap a "
                "ChatEnv, a task or a game"
            )
        if not isinstance(env, TransformedEnv):
            env = TransformedEnv(env, Compose())
        acting = _acting_tools(env)
        made = self.make_transforms(acting)
        self._check_names(env, acting)
        if self.system_prompt is not None:
            base.give_system_prompt(self.system_prompt)
        if self.parser is not None:
            self._read_with(env, self.parser)
        for transform in made:
            insert(env, transform, before=_AFTER_TOOLS)
        self._judge_cuts(env)
        if self.context is not None:
            env.append_transform(copy.deepcopy(self.context))
        env.empty_cache()
        return env

    def policy(self, policy: LLMWrapperBase, env: EnvBase | None = None) -> LLMWrapperBase:
        """Return a policy whose prompts describe the tools, in the form of its chat template.

        Args:
            policy: the policy that answers; it does not change, and its weights are shared.
            env: the environment to which the agent was added; its tools are described, too. Without
                it only the agent's tools are described.
        """
        if env is None:
            made = (each.schemas for each in self.make_transforms())
            schemas = [schema for found in made for schema in found]
        else:
            schemas = env.tool_schemas if hasattr(env, "tool_schemas") else tool_schemas(env)
        return policy.get_new_version(tools=schemas) if schemas else policy

    def _check_names(self, env: TransformedEnv, acting: Sequence[Tool]) -> None:
        theirs = {name for each in tool_transforms(env) for name in each.tools}
        theirs |= {tool.name for tool in acting}
        for tool in self.make_tools():
            if tool.name in theirs:
                raise ConfigError(
                    f"{type(self).__name__} and {type(env).__name__} both have a tool named "
                    f"{tool.name!r}; leave it out of the agent's tools, or rename one of them"
                )

    def _read_with(self, env: TransformedEnv, parser: ActionParser) -> None:
        if isinstance(env, WorldEnv):
            env.read_with(parser)
            return
        if not any(isinstance(each, RewardParser) for each in transforms_of(env)):
            raise ConfigError(
                f"the parser of {type(self).__name__} has no effect in an environment without a "
                "reward: append that first"
            )
        insert(env, ParseAnswers(parser), before=(RewardParser, StepCounter, ContextStrategy))

    def _judge_cuts(self, env: TransformedEnv) -> None:
        """Set the same treatment of cut answers in every part of the environment."""
        judges = [each for each in transforms_of(env) if hasattr(each, "accept_cut")]
        if self.accept_cut and all(isinstance(each, CutAnswers) for each in judges):
            raise ConfigError(
                f"accept_cut has no effect in {type(env).__name__}, which has neither a game nor "
                "tools: its reward scores cut answers like others"
            )
        for each in judges if self.accept_cut else ():
            each.accept_cut = True
        kinds = {
            kind
            for each in transforms_of(env)
            for kind in (RewardParser, CutAnswers)
            if isinstance(each, kind)
        }
        if kinds == {RewardParser}:
            first = (ParseAnswers, RewardParser, StepCounter, ContextStrategy)
            insert(env, CutAnswers(accept_cut=self.accept_cut), before=first)


def tool_transforms(env: TransformedEnv) -> list[ToolTransform]:
    """The transforms of an environment that answer calls.

    Args:
        env: an environment, wrapped any number of times.
    """
    return [each for each in transforms_of(env) if isinstance(each, ToolTransform)]


def _acting_tools(env: TransformedEnv) -> list[Tool]:
    """The tool whose call is an action; none if actions have a different form."""
    if isinstance(env, WorldEnv) and env.acts_by_calls:
        known = {name for each in tool_transforms(env) for name in each.tools}
        return [] if env.action_tool.name in known else [env.action_tool]
    return []

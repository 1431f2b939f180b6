"""An agent that owns its loop: any program that speaks to a model's endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm._checked import Ge, Gt, check
from torchrl_llm._imports import require
from torchrl_llm._registry import register
from torchrl_llm.agents.agent import Agent
from torchrl_llm.envs.chat_env import DatasetChatEnv
from torchrl_llm.envs.layers import transforms_of
from torchrl_llm.envs.transforms.answer_gates import ParseAnswers
from torchrl_llm.envs.transforms.context_strategy import ContextStrategy
from torchrl_llm.envs.transforms.episode_limits import ContextLimit, StepCounter
from torchrl_llm.envs.world import WorldTransform
from torchrl_llm.errors import ConfigError
from torchrl_llm.gateway.policy_engine import limits_of
from torchrl_llm.gateway.program_env import ProgramEnv
from torchrl_llm.gateway.program_runner import check_program
from torchrl_llm.gateway.program_sessions import ProgramSessions
from torchrl_llm.gateway.sandboxed_commands import Box
from torchrl_llm.gateway.session import EngineLimits, Formatters
from torchrl_llm.modules import LLMWrapperBase
from torchrl_llm.tools import ToolTransform

_NOT_OURS = (ToolTransform, StepCounter, ContextLimit, ContextStrategy, ParseAnswers)


@register("agents", "program")
@dataclass(frozen=True, kw_only=True)
class ProgramAgent(Agent):
    """A program with its own loop; the policy answers its model calls.

    The environment provides rows and the reward; its tools and its turn limit are removed. The
    program calls an endpoint that speaks the protocols of OpenAI and Anthropic. Its return value is
    the reward: a number; a dict of named numbers (its ``"reward"``, or else the sum of the
    numbers); or ``None``, and then the task's own reward scores the last answer.

    Args:
        program: ``FILE.py:FUNCTION``, of ``(row, base_url, api_key)`` or ``(row, client)``; sync or
            async.
        command: words of a command instead of ``program``. Its environment variables are
            ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``
            and ``ROW`` (JSON); it may write its return value as JSON to the file ``REWARD_FILE``.
        python: the Python that runs ``program``; this one if not given.
        sandbox: ``"bubblewrap"`` or ``"container"``: runs each ``command`` in a separate sandbox.
            There it can read the working directory, write only to memory, and use this machine's
            network.
        image: image of the container; ``"python:3.12-slim"`` if not given.
        memory_bytes: memory that each process in the sandbox may use.
        timeout_s: seconds that a program may take; time in which it waits for answers does not
            count.
        max_calls: maximum number of calls of a rollout; further calls are rejected.
        num_hosts: processes that run functions.
        patience_s: seconds that the policy waits for further calls after a call has arrived.

    Raises:
        ConfigError: neither or both of ``program`` and ``command`` are given, it does not exist, or
            a number is invalid.
        MissingExtraError: without the extra ``gateway``.
        ResourceError: this machine does not have the sandbox.

    Example:
        >>> ProgramAgent(program="no_such_file.py:run")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: agent.program='no_such_file.py:run': there is no file ...
    """

    OWNS_LOOP: ClassVar[bool] = True

    program: str | None = None
    command: str | None = None
    python: str | None = None
    sandbox: str | None = None
    image: str | None = None
    memory_bytes: int = 2 << 30
    timeout_s: float = 600.0
    max_calls: int = 64
    num_hosts: int = 2
    patience_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("context", "parser", "system_prompt"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} has no effect on a program, which owns its loop")
        if self.tools or self.accept_cut:
            raise ConfigError("tools and accept_cut have no effect on a program")
        for name in ("timeout_s", "patience_s"):
            check(name, getattr(self, name), Annotated[float, Gt(0)])
        for name in ("max_calls", "num_hosts", "memory_bytes"):
            check(name, getattr(self, name), Annotated[int, Ge(1)])
        if self.image is not None and self.sandbox is None:
            raise ConfigError("image has no effect without sandbox=container")
        check_program(self.program, self.command, self.python, self._box)

    @property
    def _box(self) -> Box | None:
        return self.sandbox and Box(self.sandbox, self.memory_bytes, self.image)

    def wrap(
        self,
        env: EnvBase,
        policy: LLMWrapperBase | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        limits: EngineLimits | None = None,
        show_tools: bool = True,
    ) -> TransformedEnv:
        """Let programs act in place of an environment's own loop.

        Args:
            env: a task in history mode; it is changed.
            policy: the policy that answers; its template is used.
            template: without a policy, arguments of
                :class:`~torchrl_llm.data.text.ChatFormatter`.
            limits: limits of the calls' settings; by default the limits of training with the
                policy.
            show_tools: whether prompts describe the tools that calls bring.

        Returns:
            The environment around it.

        Raises:
            ConfigError: the environment is not a task over rows, or is a world that changes by the
                model's actions; or neither policy nor limits are given.
        """
        require("uvicorn", extra="gateway", feature="agent=program")
        require("starlette", extra="gateway", feature="agent=program")
        if not isinstance(env, DatasetChatEnv) or env.base_env.input_mode != "history":
            raise ConfigError(
                "agent=program needs a task over rows in history mode, got "
                f"{type(env).__name__}; give it rows of your own (data=FILE) or a task"
            )
        if any(isinstance(each, WorldTransform) for each in transforms_of(env)):
            raise ConfigError(
                f"agent=program: {type(env).__name__} is a world that moves by the model's own "
                "actions, which a program cannot reach; give rows and a reward"
            )
        if policy is not None:
            options = policy.options
            names = ("chat_template", "chat_template_name", "on_rewrite", "template_kwargs")
            template = {name: getattr(options, name) for name in names}
            limits = limits_of(policy, trains=True) if limits is None else limits
        if limits is None:
            raise ConfigError("agent=program needs the policy: ProgramAgent(...).wrap(env, policy)")
        tokenizer = env.base_env.tokenizer if policy is None else policy.tokenizer
        for place in reversed(range(len(env.transform))):
            if isinstance(env.transform[place], _NOT_OURS):
                env.transform.pop(place)
        env.empty_cache()
        sessions = ProgramSessions(
            limits,
            Formatters(tokenizer, show_tools=show_tools, **(template or {})),
            env.batch_size.numel(),
            program={
                "program": self.program,
                "command": self.command,
                "python": self.python,
                "num_hosts": self.num_hosts,
                "box": self._box,
            },
            timeout_s=self.timeout_s,
            max_calls=self.max_calls,
            patience_s=self.patience_s,
        )
        return ProgramEnv(env, sessions)

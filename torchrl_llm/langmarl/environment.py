"""Environments of language-space training: base classes, episodes, and the registry.

A :class:`BaseEnvironment` plays episodes with policies that are texts. The built-in ones collect
with :class:`~torchrl_llm.collectors.LLMCollector`; a user's environment only needs
:meth:`~BaseEnvironment.collect_trajectory`.

Next: :mod:`torchrl_llm.langmarl.phases` trains in an environment.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torchrl._utils import logger

from torchrl_llm._registry import find, names, register
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.calls import CallLog


@dataclass
class Trajectory:
    """An episode: its task, the observations and actions of each agent, and its reward.

    Args:
        task: the task, for example with ``question`` and ``ground_truth``.
        steps: for each turn ``agent_id``, ``observation``, ``action`` and other data of the
            environment; may be empty.
        reward: reward of the episode; NaN if it failed.
        metadata: ``episode_id``, ``error`` of a failed episode, and other data.

    Example:
        >>> one = Trajectory({"question": "2+2?"}, [], 1.0, {"episode_id": 3})
        >>> Trajectory.from_dict(one.to_dict()) == one
        True
    """

    task: dict[str, Any]
    steps: list[dict[str, Any]]
    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether the episode has a reward."""
        return self.reward is not None and math.isfinite(self.reward)

    def to_dict(self) -> dict[str, Any]:
        """The mapping that a store keeps."""
        return {
            "episode_id": self.metadata.get("episode_id", 0),
            "task": self.task,
            "transitions": self.steps,
            "reward": self.reward,
            "metadata": self.metadata,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a mapping from :meth:`to_dict`.

        Raises:
            DataError: a part is missing or has the wrong type.
        """
        steps, task, reward = data.get("transitions"), data.get("task"), data.get("reward", 0.0)
        metadata = dict(data.get("metadata") or {})
        if not isinstance(task, dict) or not isinstance(steps, list):
            raise DataError("an episode needs 'task', a mapping, and 'transitions', a list")
        if "episode_id" in data:
            metadata.setdefault("episode_id", data["episode_id"])
        return cls(task, steps, math.nan if reward is None else float(reward), metadata)


@dataclass(frozen=True)
class Episodes:
    """Episodes to play.

    Args:
        numbered: number and task of each episode.
        log: journal of the calls.
        prefix: prefix of the keys of their calls.
        workers: concurrent episodes, if each is played separately.
        on_done: called with each finished episode, in any thread.
    """

    numbered: Sequence[tuple[int, dict[str, Any]]]
    log: CallLog
    prefix: str
    workers: int = 1
    on_done: Callable[[Trajectory], None] = lambda trajectory: None

    @property
    def numbers(self) -> list[int]:
        """The numbers of the episodes."""
        return [number for number, _ in self.numbered]

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Their tasks."""
        return [task for _, task in self.numbered]

    def key(self, role: str, number: int, rest: str) -> str:
        """Key of a call.

        Args:
            role: role of the call.
            number: number of the episode.
            rest: identifies the call within the episode.
        """
        return f"{self.prefix}/{role}/{number}/{rest}"


class BaseEnvironment(ABC):
    """Base of the environments; a subclass plays episodes with given policies.

    Args:
        config: the training configuration.
    """

    ENV_NAME: ClassVar[str] = ""
    CREDIT_FORMAT: ClassVar[str | None] = None
    """Format of the critic's answers: ``json``, ``markers`` or ``thirds``; ``None`` to detect."""
    CONFIG_CLASS: ClassVar[type | None] = None
    """Dataclass of its configuration; ``BaseConfig`` if ``None``."""
    prompts_dir: Path | None = None
    """Folder of its own templates; a built-in template replaces each missing one."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def agent_names(self) -> list[str]:
        """Names of the agents, in display order."""
        return [f"agent_{k}" for k in range(1, self.config.num_agents + 1)]

    def default_policies(self) -> dict[str, str]:
        """The initial policy of each agent."""
        total = self.config.num_agents
        return {
            name: f"You are {name}, agent {k} of {total}. Do your part of the task as well as you "
            "can, and build on what the others have done."
            for k, name in enumerate(self.agent_names, 1)
        }

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks of the episodes."""
        return [{}]

    def task_context(self, task: dict[str, Any]) -> str:
        """Description of a task for the optimizer, the most important first; never the answer.

        Args:
            task: the task.
        """
        shown = {key: value for key, value in task.items() if key not in _ANSWERS}
        return json.dumps(shown, ensure_ascii=False, default=str)

    def critic_prompt_vars(self, trajectory: Trajectory) -> dict[str, str]:
        """Further fields of the critic's template."""
        return {}

    @abstractmethod
    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode.

        Args:
            task: the task.

        Returns:
            The first observation of each agent.
        """

    @abstractmethod
    def step(self, agent_id: str, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        """Let an agent act.

        Args:
            agent_id: name of the agent.
            action: the agent's action.

        Returns:
            Observation, reward, whether the episode is over, and further information.
        """

    @abstractmethod
    def collect_trajectory(self, policies: dict[str, str], task: dict[str, Any]) -> Trajectory:
        """Play an episode.

        Args:
            policies: the text of each agent.
            task: the task.

        Returns:
            The episode.
        """

    def collect_batch(self, policies: dict[str, str], episodes: Episodes) -> list[Trajectory]:
        """Play several episodes, by default each in a separate thread.

        Args:
            policies: the text of each agent.
            episodes: the episodes to play.

        Returns:
            The episodes in order. A failed episode has no steps, a NaN reward and an ``error`` in
            its metadata.

        Raises:
            BudgetUsedUp: the budget is used up; ``on_done`` was called for finished episodes.
        """

        def play(numbered: tuple[int, dict[str, Any]]) -> Trajectory:
            number, task = numbered
            try:
                with calls.scope(episodes.log, "actor", f"{episodes.prefix}/actor/{number}"):
                    found = self.collect_trajectory(dict(policies), task)
                if not isinstance(found, Trajectory):
                    raise TypeError(f"collect_trajectory returned {type(found).__name__}")
                found.reward = float(found.reward)
            except calls.FATAL:
                raise
            except Exception as error:  # a failed episode is also data
                told = f"{type(error).__name__}: {error}"
                logger.warning(f"episode {number} of {episodes.prefix} failed: {told}")
                found = Trajectory(task, [], math.nan, {"error": told})
            found.metadata["episode_id"] = number
            episodes.on_done(found)
            return found

        return in_threads(play, episodes.numbered, episodes.workers)


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> list[Any]:
    """Call a function for each item, in threads; the first exception is raised at the end.

    Args:
        function: called with one item.
        items: the items.
        workers: concurrent calls.

    Returns:
        The results in the order of the items.
    """
    if workers <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "langmarl") as pool:
        return list(pool.map(function, items))


class BaseAgent(ABC):
    """Base of agents whose policy is a text."""

    @abstractmethod
    def act(self, observation: str, policy: str) -> str:
        """Choose an action.

        Args:
            observation: the agent's observation.
            policy: the agent's system prompt.
        """


class BaseCritic(ABC):
    """Base of critics, which evaluate episodes."""

    def for_environment(self, env: BaseEnvironment) -> None:
        """Prepare for an environment, before the first episode; does nothing by default.

        Args:
            env: environment of the episodes.
        """

    @abstractmethod
    def evaluate(self, trajectory: Trajectory, policies: dict[str, str]) -> dict[str, Any]:
        """Evaluate an episode.

        Args:
            trajectory: the episode.
            policies: the policies that played it.

        Returns:
            ``raw_response``, and ``per_agent``: a text for each agent, may be empty.
        """


def evaluation_of(
    critic: BaseCritic, trajectory: Trajectory, policies: dict[str, str]
) -> dict[str, Any]:
    """Evaluate an episode; if the critic fails, the result has an ``error`` and no texts.

    Args:
        critic: the critic.
        trajectory: the episode.
        policies: the policies that played it.
    """
    try:
        found = critic.evaluate(trajectory, policies)
        if not isinstance(found, Mapping) or not isinstance(found.get("per_agent"), Mapping):
            raise TypeError(f"a critic returns 'per_agent', a text for each agent; got {found!r}")
        return dict(found)
    except calls.FATAL:
        raise
    except Exception as error:  # a failed evaluation is also data
        told = f"{type(error).__name__}: {error}"
        logger.warning(f"no evaluation of episode {trajectory.metadata.get('episode_id')}: {told}")
        return {"raw_response": "", "per_agent": {}, "error": told}


def said_of(per_agent: Mapping[str, Any], agent: str) -> str:
    """The text for an agent in an evaluation; empty if the agent is not named.

    Args:
        per_agent: texts by name; other values are written as JSON.
        agent: name of the agent.

    Example:
        >>> said_of({"a": "Good. ", "b": None}, "a"), said_of({"a": "Good.", "b": None}, "b")
        ('Good.', '')
    """
    text = per_agent.get(agent) or ""
    return (text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)).strip()


class BaseReward(ABC):
    """Base of rewards that replace the rewards of an environment."""

    @abstractmethod
    def compute(self, trajectory: Trajectory) -> float:
        """The reward of an episode.

        Args:
            trajectory: the episode.
        """


class BaseOptimizer(ABC):
    """Base of optimizers, which turn evaluations into better policies."""

    num_fallbacks: int = 0
    """Number of failed calls, which changed nothing."""

    def reconcile_gradients(self, gradients: list[str]) -> str:
        """Merge gradients for ``update="rewrite"``; by default as for ``feedback``."""
        return self.aggregate_gradients(gradients)

    def synthesize_policy(self, policy: str, gradient: str, max_chars: int | None = None) -> str:
        """Rewrite a policy by a gradient, for ``update="rewrite"``.

        Args:
            policy: the old policy.
            gradient: how it should change.
            max_chars: most characters of the new one.

        Raises:
            NotImplementedError: this optimizer can only apply gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rewrite: use update='feedback'")

    @abstractmethod
    def generate_gradient(self, policy: str, evaluation: str, context: str) -> str:
        """Write how a policy should change.

        Args:
            policy: policy of one agent.
            evaluation: the critic's text for the agent.
            context: the task.
        """

    def generate_shared_gradient(self, evaluation: str, task_context: str) -> str:
        """Write how all policies should change; by default, a gradient that does not see a policy.

        Args:
            evaluation: the critic's text for the team.
            task_context: the task.
        """
        return self.generate_gradient("", evaluation, task_context)

    @abstractmethod
    def apply_gradient(self, policy: str, gradient: str) -> str:
        """Apply a gradient to a policy.

        Args:
            policy: the policy.
            gradient: how it should change.
        """

    @abstractmethod
    def aggregate_gradients(self, gradients: list[str]) -> str:
        """Merge several gradients into one.

        Args:
            gradients: gradients of several episodes.
        """


_ANSWERS = {"answer", "ground_truth", "solution", "canonical_solution", "test", "tests"}


def register_env(name: str) -> Callable[[type[BaseEnvironment]], type[BaseEnvironment]]:
    """Decorator that registers an environment class.

    Args:
        name: its name in configurations.

    Raises:
        ConfigError: the class is not an environment, or the name is invalid or used by a different
            class.

    Example:
        >>> @register_env("echo")
        ... class Echo(BaseEnvironment):
        ...     def reset(self, task): return {}
        ...     def step(self, agent_id, action): return action, 0.0, True, {}
        ...     def collect_trajectory(self, policies, task): return Trajectory(task, [], 0.0)
        >>> "echo" in list_envs()
        True
    """

    def decorate(cls: type[BaseEnvironment]) -> type[BaseEnvironment]:
        if not isinstance(name, str) or not name or ":" in name:
            raise ConfigError(f"an environment needs a name without ':', got {name!r}")
        names("environments")  # the built-in ones come first, regardless of import order
        return register("environments", name)(_checked_class(f"register_env({name!r})", cls))

    return decorate


def list_envs() -> list[str]:
    """Names of all environments.

    Example:
        >>> [name for name in list_envs() if name in ("language", "pistonball")]
        ['language', 'pistonball']
    """
    return names("environments")


def env_class(name: str) -> type[BaseEnvironment]:
    """The class of an environment.

    Args:
        name: the registered name, or ``"module:Class"`` or ``"file.py:Class"``.

    Raises:
        ConfigError: the name is unknown; the nearest one is suggested.
    """
    return _checked_class(f"env={name!r}", find("environments", name))


def _checked_class(what: str, found: Any) -> type[BaseEnvironment]:
    if not (isinstance(found, type) and issubclass(found, BaseEnvironment)):
        raise ConfigError(f"{what} is no BaseEnvironment, got {found!r}")
    return found


def make_env(name: str, config: Any) -> BaseEnvironment:
    """Make an environment.

    Args:
        name: the registered name.
        config: the training configuration.

    Raises:
        ConfigError: the name is unknown, or the environment rejects the configuration.
    """
    return env_class(name)(config)


def checked_names(env: BaseEnvironment) -> list[str]:
    """Check and return the agent names of an environment.

    Args:
        env: the environment.

    Raises:
        ConfigError: there are no names, or a name occurs twice.
    """
    names: Sequence[str] = list(env.agent_names)
    if not names or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{type(env).__name__}.agent_names must be names, each once, got {names}")
    return list(names)

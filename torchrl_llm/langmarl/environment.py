"""Environments of language-space training: the abstract parts, an episode, and the registry.

A :class:`BaseEnvironment` plays episodes with policies that are texts. Ours collect through
:class:`~torchrl_llm.collectors.LLMCollector`; one of the user's needs no more than
:meth:`~BaseEnvironment.collect_trajectory`.

Next: :mod:`torchrl_llm.langmarl.phases` trains in one.
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
    """An episode: its task, what each agent saw and did, and its reward.

    Args:
        task: the task, with ``question`` and ``ground_truth`` for example.
        steps: of each turn ``agent_id``, ``observation``, ``action`` and whatever else the
            environment tells; there may be none.
        reward: of the episode; NaN where it failed.
        metadata: ``episode_id``, ``error`` of an episode that failed, and anything else.

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
        """As a store keeps it."""
        return {
            "episode_id": self.metadata.get("episode_id", 0),
            "task": self.task,
            "transitions": self.steps,
            "reward": self.reward,
            "metadata": self.metadata,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DataError: a part is missing, or of another type.
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
    """Episodes that are to be played.

    Args:
        numbered: of each episode its number, and its task.
        log: journal of the calls.
        prefix: of the keys of their calls.
        workers: episodes at a time, where each is played by itself.
        on_done: is told of each episode when it is over, in any thread.
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
            role: for whom.
            number: of the episode.
            rest: which call of the episode.
        """
        return f"{self.prefix}/{role}/{number}/{rest}"


class BaseEnvironment(ABC):
    """Base of the environments; a subclass plays episodes with the policies it is given.

    Args:
        config: of the training.
    """

    ENV_NAME: ClassVar[str] = ""
    CREDIT_FORMAT: ClassVar[str | None] = None
    """How the critic is asked to write: ``json``, ``markers`` or ``thirds``; ``None`` to look."""
    CONFIG_CLASS: ClassVar[type | None] = None
    """Dataclass of its configuration; ``BaseConfig`` if ``None``."""
    prompts_dir: Path | None = None
    """Folder of its own templates; those that are not there are taken from ours."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def agent_names(self) -> list[str]:
        """Names of the agents, in the order in which they are shown."""
        return [f"agent_{k}" for k in range(1, self.config.num_agents + 1)]

    def default_policies(self) -> dict[str, str]:
        """The policy that each agent begins with."""
        total = self.config.num_agents
        return {
            name: f"You are {name}, agent {k} of {total}. Do your part of the task as well as you "
            "can, and build on what the others have done."
            for k, name in enumerate(self.agent_names, 1)
        }

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks that episodes are drawn from."""
        return [{}]

    def task_context(self, task: dict[str, Any]) -> str:
        """What an optimizer is told of a task, the most important first; never the answer.

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
            What each agent sees first.
        """

    @abstractmethod
    def step(self, agent_id: str, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        """Let an agent act.

        Args:
            agent_id: name of the agent.
            action: what it does.

        Returns:
            Observation, reward, whether the episode is over, and further facts.
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
        """Play several episodes, here each in a thread of its own.

        Args:
            policies: the text of each agent.
            episodes: those to play.

        Returns:
            The episodes in their order. One that failed has no steps, a NaN reward and an
            ``error`` in its metadata.

        Raises:
            BudgetUsedUp: nothing is left to ask with; episodes that had ended were told of.
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
            except Exception as error:  # an episode that fails is data
                told = f"{type(error).__name__}: {error}"
                logger.warning(f"episode {number} of {episodes.prefix} failed: {told}")
                found = Trajectory(task, [], math.nan, {"error": told})
            found.metadata["episode_id"] = number
            episodes.on_done(found)
            return found

        return in_threads(play, episodes.numbered, episodes.workers)


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> list[Any]:
    """Call a function for each item, so many at a time; the first exception is raised at the end.

    Args:
        function: of one item.
        items: its arguments.
        workers: calls at a time.

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
        """What the agent does.

        Args:
            observation: what it sees.
            policy: its system prompt.
        """


class BaseCritic(ABC):
    """Base of what judges episodes."""

    def for_environment(self, env: BaseEnvironment) -> None:
        """Get to know the environment, before the first episode; nothing here.

        Args:
            env: whose episodes are judged.
        """

    @abstractmethod
    def evaluate(self, trajectory: Trajectory, policies: dict[str, str]) -> dict[str, Any]:
        """Judge an episode.

        Args:
            trajectory: the episode.
            policies: the policies that played it.

        Returns:
            ``raw_response``, and ``per_agent``: a text for each agent, empty for none.
        """


def evaluation_of(
    critic: BaseCritic, trajectory: Trajectory, policies: dict[str, str]
) -> dict[str, Any]:
    """What a critic says of an episode; where it fails, an ``error`` and nothing of anyone.

    Args:
        critic: evaluates.
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
    except Exception as error:  # a critic that fails is data
        told = f"{type(error).__name__}: {error}"
        logger.warning(f"no evaluation of episode {trajectory.metadata.get('episode_id')}: {told}")
        return {"raw_response": "", "per_agent": {}, "error": told}


def said_of(per_agent: Mapping[str, Any], agent: str) -> str:
    """What an evaluation says of an agent; nothing where it does not name it.

    Args:
        per_agent: texts by name; what is none is written as JSON.
        agent: its name.

    Example:
        >>> said_of({"a": "Good. ", "b": None}, "a"), said_of({"a": "Good.", "b": None}, "b")
        ('Good.', '')
    """
    text = per_agent.get(agent) or ""
    return (text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)).strip()


class BaseReward(ABC):
    """Base of rewards that replace those of an environment."""

    @abstractmethod
    def compute(self, trajectory: Trajectory) -> float:
        """The reward of an episode.

        Args:
            trajectory: the episode.
        """


class BaseOptimizer(ABC):
    """Base of what turns evaluations into better policies."""

    num_fallbacks: int = 0
    """Calls that failed, whose answer was replaced by none."""

    def reconcile_gradients(self, gradients: list[str]) -> str:
        """One gradient for several, of ``update="rewrite"``; here as for ``feedback``."""
        return self.aggregate_gradients(gradients)

    def synthesize_policy(self, policy: str, gradient: str, max_chars: int | None = None) -> str:
        """A policy rewritten by a gradient, of ``update="rewrite"``.

        Args:
            policy: the policy.
            gradient: how it should change.
            max_chars: most characters of the new one.

        Raises:
            NotImplementedError: this optimizer only applies gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rewrite: use update='feedback'")

    @abstractmethod
    def generate_gradient(self, policy: str, evaluation: str, context: str) -> str:
        """How a policy should change, as a text.

        Args:
            policy: of one agent.
            evaluation: what the critic said of it.
            context: the task.
        """

    def generate_shared_gradient(self, evaluation: str, task_context: str) -> str:
        """How all policies should change; here the gradient of a policy that is not shown.

        Args:
            evaluation: what the critic said of the team.
            task_context: the task.
        """
        return self.generate_gradient("", evaluation, task_context)

    @abstractmethod
    def apply_gradient(self, policy: str, gradient: str) -> str:
        """The changed policy.

        Args:
            policy: the policy.
            gradient: how it should change.
        """

    @abstractmethod
    def aggregate_gradients(self, gradients: list[str]) -> str:
        """One gradient for several.

        Args:
            gradients: those of several episodes.
        """


_ANSWERS = {"answer", "ground_truth", "solution", "canonical_solution", "test", "tests"}


def register_env(name: str) -> Callable[[type[BaseEnvironment]], type[BaseEnvironment]]:
    """Register an environment of one's own, as a decorator of its class.

    Args:
        name: what configurations call it.

    Raises:
        ConfigError: what is no environment, or a name that another class has, or that is none.

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
        names("environments")  # those that are here come first, whoever is imported first
        return register("environments", name)(_checked_class(f"register_env({name!r})", cls))

    return decorate


def list_envs() -> list[str]:
    """Names of the environments that there are.

    Example:
        >>> [name for name in list_envs() if name in ("language", "pistonball")]
        ['language', 'pistonball']
    """
    return names("environments")


def env_class(name: str) -> type[BaseEnvironment]:
    """The class of an environment.

    Args:
        name: as it is registered, or ``"module:Class"`` or ``"file.py:Class"``.

    Raises:
        ConfigError: there is none of that name; the nearest is named.
    """
    return _checked_class(f"env={name!r}", find("environments", name))


def _checked_class(what: str, found: Any) -> type[BaseEnvironment]:
    if not (isinstance(found, type) and issubclass(found, BaseEnvironment)):
        raise ConfigError(f"{what} is no BaseEnvironment, got {found!r}")
    return found


def make_env(name: str, config: Any) -> BaseEnvironment:
    """Make an environment.

    Args:
        name: as it is registered.
        config: of the training.

    Raises:
        ConfigError: there is none of that name, or it refuses the configuration.
    """
    return env_class(name)(config)


def checked_names(env: BaseEnvironment) -> list[str]:
    """The names of the agents of an environment.

    Args:
        env: the environment.

    Raises:
        ConfigError: none, or one twice.
    """
    names: Sequence[str] = list(env.agent_names)
    if not names or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{type(env).__name__}.agent_names must be names, each once, got {names}")
    return list(names)

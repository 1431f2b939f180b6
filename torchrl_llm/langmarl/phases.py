"""The five phases of an iteration of training in language space.

The phases load the policies, collect episodes, evaluate them and write gradients, apply the
gradients, and save. Each is a function of a :class:`TrainingState` and a :class:`RunFiles`, and may
be called again after a kill. Results on disk are not computed again; for missing results, the
journal has the calls that were already answered. So a restarted phase makes only the unanswered
calls.

Next: :class:`~torchrl_llm.langmarl.MonteCarloTrainer` calls them in turn.
"""

from __future__ import annotations

import inspect
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchrl._utils import logger

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.calls import FATAL, CallLog, Spent
from torchrl_llm.langmarl.config import BaseConfig
from torchrl_llm.langmarl.environment import (
    BaseCritic,
    BaseEnvironment,
    BaseOptimizer,
    BaseReward,
    Episodes,
    Trajectory,
    checked_names,
    evaluation_of,
    in_threads,
    said_of,
)
from torchrl_llm.langmarl.language_policy import check_base, split_policy
from torchrl_llm.langmarl.store import (
    BaseStore,
    PolicyCheckpoint,
    TrajectoryStore,
    aggregated_path,
    append_metrics,
    evaluation_path,
    gradients_path,
    read_json,
    sealed,
    to_json_text,
)

_CONTEXT = 800


@dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    Args:
        store: store of the files.
        run_id: name of the run.
        policies: policies, with a checkpoint for each iteration.
        trajectories: the episodes.
    """

    store: BaseStore
    run_id: str
    policies: PolicyCheckpoint
    trajectories: TrajectoryStore

    @classmethod
    def of(cls, store: BaseStore, run_id: str, env: BaseEnvironment) -> RunFiles:
        """Files of a run in an environment.

        Args:
            store: store of the files.
            run_id: name of the run.
            env: defines the agents and their initial policies.
        """
        names, defaults = checked_names(env), env.default_policies()
        if missing := sorted(set(names) - set(defaults)):
            raise ConfigError(f"default_policies() of {env.ENV_NAME!r} has none for {missing}")
        for name in names:
            check_base(defaults[name])
        checkpoint = PolicyCheckpoint(
            store, run_id, len(names), agent_names=names, default_policies=defaults
        )
        return cls(store, run_id, checkpoint, TrajectoryStore(store, run_id))

    def read(self, path: str) -> Any:
        """Read a JSON file; ``None`` if it does not exist."""
        return read_json(self.store, path) if self.store.exists(path) else None

    def write(self, path: str, value: Any) -> None:
        """Write a JSON file."""
        self.store.write_text(path, to_json_text(sealed(value)))


def _silent(hook: str, *args: Any) -> None:
    """Calls no hooks."""


@dataclass
class TrainingState:
    """State of an iteration: its parts, and the results of the phases so far.

    Args:
        iteration: number, from 0.
        config: the training configuration.
        env: plays the episodes.
        critic: evaluates them.
        optimizer: writes gradients and applies them.
        log: journal of the calls.
        reward_fn: replaces the rewards of the environment.
        fire: calls a hook of the callbacks by name.

    Attributes:
        policies: policies that play.
        trajectories: all episodes, including failed ones.
        evaluations: evaluations of the mini-batch, by episode number.
        gradients: gradients of each agent, in the order of the episodes.
        updated: the policies of the next iteration.
        num_fallbacks: number of failed calls of critic or optimizer, and of rejected updates.
        validation: mean reward on held-out tasks of the policies for the next iteration.
        accepted: whether the updated policies are accepted.
    """

    iteration: int
    config: BaseConfig
    env: BaseEnvironment
    critic: BaseCritic
    optimizer: BaseOptimizer
    log: CallLog
    reward_fn: BaseReward | None = None
    fire: Callable[..., None] = _silent
    policies: dict[str, str] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[str, list[str]] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)
    num_fallbacks: int = 0
    validation: float | None = None
    accepted: bool = True

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this iteration's calls."""
        return str(self.iteration)

    @cached_property
    def tasks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The training tasks, and the held-out tasks."""
        config = self.config
        return split_tasks(self.env.tasks(), config.validation_fraction, config.seed)

    def random(self, purpose: str) -> random.Random:
        """A generator that depends on the seed, the iteration and its purpose."""
        return random.Random(f"{self.config.seed}/{self.iteration}/{purpose}")


# -- tasks ----------------------------------------------------------------------------------------


def split_tasks(
    tasks: Sequence[dict[str, Any]], fraction: float, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split tasks into training tasks and held-out tasks.

    Args:
        tasks: all of them.
        fraction: held-out fraction; if it is above 0, at least one task is held out.
        seed: determines the split.

    Raises:
        ConfigError: no task is left for training.
    """
    if not tasks:
        raise ConfigError("the environment has no tasks: tasks() is empty")
    if not fraction:
        return list(tasks), []
    order = list(range(len(tasks)))
    random.Random(f"{seed}/held-out").shuffle(order)
    count = max(1, round(fraction * len(tasks)))
    if count >= len(tasks):
        raise ConfigError(
            f"validation_fraction={fraction} of {len(tasks)} tasks leaves none to train on"
        )
    held = set(order[:count])
    return (
        [task for place, task in enumerate(tasks) if place not in held],
        [task for place, task in enumerate(tasks) if place in held],
    )


def draw_tasks(
    tasks: Sequence[dict[str, Any]], count: int, generator: random.Random
) -> list[dict[str, Any]]:
    """Draw tasks; no task is repeated before every task was drawn.

    Args:
        tasks: the tasks.
        count: number of tasks.
        generator: random generator.
    """
    drawn: list[dict[str, Any]] = []
    while len(drawn) < count:
        order = list(tasks)
        generator.shuffle(order)
        drawn += order[: count - len(drawn)]
    return drawn


# -- phase 1 --------------------------------------------------------------------------------------


def load_policies(state: TrainingState, files: RunFiles) -> None:
    """Load the policies of the iteration; at first the environment's default policies."""
    state.policies = files.policies.get_policies(state.iteration if state.iteration else None)


# -- phase 2 --------------------------------------------------------------------------------------


def collect(state: TrainingState, files: RunFiles) -> None:
    """Play the episodes that are not yet on disk, and load the others."""
    config, store = state.config, files.trajectories
    tasks = draw_tasks(state.tasks[0], config.trajectories_per_iteration, state.random("tasks"))
    missing = [n for n in range(len(tasks)) if not store.has(state.iteration, n)]

    def done(trajectory: Trajectory) -> None:
        _overwrite_reward(state.reward_fn, trajectory)
        store.save(state.iteration, trajectory.metadata["episode_id"], trajectory)
        state.fire("on_episode_complete", trajectory)

    if missing:
        numbered = [(number, tasks[number]) for number in missing]
        episodes = Episodes(numbered, state.log, state.prefix, config.max_workers, done)
        state.env.collect_batch(state.policies, episodes)
    state.trajectories = store.load(state.iteration)


def _overwrite_reward(reward_fn: BaseReward | None, trajectory: Trajectory) -> None:
    """Replace the reward before the episode is stored; a failed reward fails the episode."""
    if reward_fn is None or "error" in trajectory.metadata:
        return
    try:
        trajectory.reward = float(reward_fn.compute(trajectory))
        if not math.isfinite(trajectory.reward):
            raise ValueError(f"the reward is {trajectory.reward}")
    except Exception as error:  # a failed reward is also data
        trajectory.reward = math.nan
        trajectory.metadata["error"] = f"{type(error).__name__}: {error}"


# -- phase 3 --------------------------------------------------------------------------------------


def evaluate(state: TrainingState, files: RunFiles) -> None:
    """Evaluate episodes with the critic, and turn each evaluation into gradients."""
    chosen = _mini_batch(state)
    found = in_threads(lambda one: _evaluation(state, files, one), chosen, state.config.max_workers)
    state.evaluations = {
        one.metadata["episode_id"]: each for one, each in zip(chosen, found, strict=True)
    }
    state.num_fallbacks += sum("error" in each for each in found)
    jobs = [
        (agent, one, said_of(each["per_agent"], agent or next(iter(state.policies))))
        for agent in _gradient_of(state)
        for one, each in zip(chosen, found, strict=True)
    ]
    workers = getattr(state.config, "optimizer_workers", 1)
    gradients = in_threads(lambda job: _gradient(state, *job), jobs, workers)
    state.gradients = {agent: [] for agent in state.policies}
    records: dict[str, list[dict[str, Any]]] = {agent: [] for agent in state.policies}
    for (agent, one, said), gradient in zip(jobs, gradients, strict=True):
        state.num_fallbacks += bool(said) and not gradient
        for name in [agent] if agent else state.policies:
            records[name].append({"episode_id": one.metadata["episode_id"], "gradient": gradient})
            state.gradients[name] += [gradient] if gradient else []
    for agent, each in records.items():
        files.write(gradients_path(files.run_id, state.iteration, agent), each)


def _mini_batch(state: TrainingState) -> list[Trajectory]:
    valid, size = [one for one in state.trajectories if one.valid], state.config.mini_batch_size
    if size is None or size >= len(valid):
        return valid
    places = sorted(state.random("mini-batch").sample(range(len(valid)), size))
    return [valid[place] for place in places]


def _evaluation(state: TrainingState, files: RunFiles, one: Trajectory) -> dict[str, Any]:
    number = one.metadata["episode_id"]
    path = evaluation_path(files.run_id, state.iteration, number)
    known = files.read(path)
    if known is not None:
        return known
    with calls.scope(state.log, "critic", f"{state.prefix}/critic/{number}"):
        found = evaluation_of(state.critic, one, dict(state.policies))
    found = {"episode_id": number, **found}
    files.write(path, found)
    return found


def _gradient_of(state: TrainingState) -> list[str | None]:
    """The agents for which gradients are written: each agent, or ``None`` for all together."""
    return [None] if state.config.paradigm == "central_global" else list(state.policies)


def _gradient(state: TrainingState, agent: str | None, one: Trajectory, said: str) -> str:
    if not said:
        return ""
    context = state.env.task_context(one.task)[:_CONTEXT]
    number, optimizer = one.metadata["episode_id"], state.optimizer
    key = f"{state.prefix}/optimizer/{number}/{agent or 'all'}"
    with calls.scope(state.log, "optimizer", key):
        try:
            if agent is None:
                return optimizer.generate_shared_gradient(said, context)
            named = "agent_name" in inspect.signature(optimizer.generate_gradient).parameters
            more = {"agent_name": agent} if named else {}
            return optimizer.generate_gradient(state.policies[agent], said, context, **more)
        except FATAL:
            raise
        except Exception as error:  # a failed optimizer call changes nothing
            logger.warning(f"no gradient for {agent or 'the agents'}: {error}")
            return ""


# -- phase 4 --------------------------------------------------------------------------------------


def apply(state: TrainingState, files: RunFiles) -> None:
    """Merge the gradients of each agent, and apply them to its policy."""
    state.updated = {}
    shared: dict[tuple[str, ...], str] = {}
    for agent, policy in state.policies.items():
        gradients = tuple(dict.fromkeys(state.gradients.get(agent, ())))  # equal advice only once
        state.updated[agent] = policy
        if not gradients:
            continue
        if gradients not in shared:
            with calls.scope(state.log, "optimizer", f"{state.prefix}/aggregate/{agent}"):
                shared[gradients] = _aggregate(state, list(gradients))
        path = aggregated_path(files.run_id, state.iteration, agent)
        files.store.write_text(path, shared[gradients])
        with calls.scope(state.log, "optimizer", f"{state.prefix}/apply/{agent}"):
            state.updated[agent] = _applied(state, policy, shared[gradients])


def _aggregate(state: TrainingState, gradients: list[str]) -> str:
    if state.config.update == "feedback":
        return state.optimizer.aggregate_gradients(gradients)
    before = state.optimizer.num_fallbacks
    found = state.optimizer.reconcile_gradients(gradients)
    state.num_fallbacks += state.optimizer.num_fallbacks - before
    return found


def _applied(state: TrainingState, policy: str, gradient: str) -> str:
    most, optimizer = state.config.max_policy_chars, state.optimizer
    if state.config.update == "rewrite":
        before = optimizer.num_fallbacks
        updated = optimizer.synthesize_policy(policy, gradient, max_chars=most)
        state.num_fallbacks += optimizer.num_fallbacks - before
    else:
        updated = optimizer.apply_gradient(split_policy(policy).base, gradient)
    is_text = isinstance(updated, str) and bool(updated.strip())
    if not is_text or (most is not None and len(updated) > most):
        state.num_fallbacks += 1
        return policy
    return updated


# -- phase 5 --------------------------------------------------------------------------------------


def save(state: TrainingState, files: RunFiles) -> dict[str, Any]:
    """Evaluate the updated policies on held-out tasks, and save the accepted policies.

    Returns:
        The statistics of the iteration.
    """
    facts: dict[str, Any] = {}
    if held_out := state.tasks[1]:
        before, lost = _validated(state, files, state.policies, held_out, state.iteration)
        after, more = _validated(state, files, state.updated, held_out, state.iteration + 1)
        # Policies that fail more often are not better, even if their remaining rewards are higher.
        better = after > before and more <= lost
        state.accepted = state.config.accept == "always" or better
        state.validation = after if state.accepted else before
        facts = {"validation_reward": state.validation, "accepted": state.accepted}
        facts |= {"candidate_validation_reward": after, "previous_validation_reward": before}
        facts |= {"validation_failed": more if state.accepted else lost}
    policies = state.updated if state.accepted else state.policies
    stats = statistics_of(state)
    facts["num_fallbacks"] = state.num_fallbacks
    facts["num_failed_episodes"] = sum(not one.valid for one in state.trajectories)
    files.policies.save_policies(state.iteration + 1, policies, stats, metadata=facts)
    append_metrics(
        files.store, files.run_id, {"iteration": state.iteration, **stats, "metadata": facts}
    )
    for agent, text in policies.items():
        if text != state.policies[agent]:
            state.fire("on_policy_update", agent, state.policies[agent], text)
    return stats


def _validated(
    state: TrainingState,
    files: RunFiles,
    policies: dict[str, str],
    held_out: Sequence[dict[str, Any]],
    checkpoint: int,
) -> tuple[float, int]:
    """Mean reward on held-out tasks (-inf if none is valid), and the number of failed episodes."""
    if checkpoint == state.iteration and checkpoint:
        known = files.policies.metadata(checkpoint)
        if known.get("validation_reward") is not None:
            return known["validation_reward"], known.get("validation_failed", 0)
    prefix = f"{state.prefix}/held-out/{checkpoint}"
    episodes = Episodes(
        list(enumerate(held_out)),
        state.log,
        prefix,
        state.config.max_workers,
        lambda one: _overwrite_reward(state.reward_fn, one),
    )
    played = state.env.collect_batch(policies, episodes)
    rewards = [one.reward for one in played if one.valid]
    return statistics.fmean(rewards) if rewards else -math.inf, len(played) - len(rewards)


def statistics_of(state: TrainingState) -> dict[str, Any]:
    """The ten statistics of an iteration; reward statistics exclude failed episodes."""
    rewards = [one.reward for one in state.trajectories if one.valid]
    spent: Spent = state.log.spent_for(f"{state.prefix}/")
    return {
        "paradigm": state.config.paradigm,
        "num_episodes": len(state.trajectories),
        "avg_reward": statistics.fmean(rewards) if rewards else 0.0,
        "min_reward": min(rewards, default=0.0),
        "max_reward": max(rewards, default=0.0),
        "rewards": rewards,
        "input_tokens": spent.input_tokens,
        "output_tokens": spent.output_tokens,
        "total_tokens": spent.input_tokens + spent.output_tokens,
        "cost_usd": spent.cost_usd,
    }

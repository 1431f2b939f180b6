"""Trainer of policies that are texts: :class:`MonteCarloTrainer`; one call is :func:`train`.

It opens a run, runs the :mod:`~torchrl_llm.langmarl.phases` in turn and calls the callbacks. A run
keeps its name, so the same command resumes the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_llm._files import remove_drafts
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import phases
from torchrl_llm.langmarl.callbacks import Callback, fire
from torchrl_llm.langmarl.calls import Budget, BudgetUsedUp, CallLog, spent_in
from torchrl_llm.langmarl.config import BaseConfig, load_config
from torchrl_llm.langmarl.critic import CentralizedCritic
from torchrl_llm.langmarl.environment import (
    BaseCritic,
    BaseEnvironment,
    BaseOptimizer,
    BaseReward,
    make_env,
)
from torchrl_llm.langmarl.optimizer import PolicyGradientOptimizer
from torchrl_llm.langmarl.phases import RunFiles, TrainingState
from torchrl_llm.langmarl.prompts import PROMPTS
from torchrl_llm.langmarl.report import metrics_table
from torchrl_llm.langmarl.run_logger import RunLogger
from torchrl_llm.langmarl.store import (
    BaseStore,
    LocalStore,
    read_json,
    read_metrics,
    to_json_text,
    write_policy_file,
)
from torchrl_llm.trainers.run_folder import METRICS_FILE

# Settings that may change at a resume: number of iterations, speed and budget.
_FREE = {"num_iterations", "start_iteration", "resume", "run_name", "max_workers", "log_level"}
_FREE |= {"episode_generation_workers", "optimizer_workers", "checkpoint_dir", "experiment_dir"}
_FREE |= {"max_calls", "max_total_tokens", "max_cost_usd", "schema_version", "prompts_dir"}
_FREE |= {"edited_policies"}

_FREE_OF_MODELS = {"base_url", "api_key", "api_key_env_var", "timeout_s", "max_retries"}
_FREE_OF_MODELS |= {"concurrency", "input_price_per_million", "output_price_per_million"}


class MonteCarloTrainer:
    """Trains the policies of an environment.

    Args:
        config: the training configuration.
        env: plays episodes.
        critic: evaluates them.
        optimizer: writes gradients and applies them.
        reward_fn: replaces the rewards of the environment.
        store: store of the run; a :class:`~torchrl_llm.langmarl.LocalStore` of
            ``config.experiment_dir`` if not given.
        callbacks: called for iterations, episodes and updates.

    Attributes:
        history: statistics of all iterations, including those before a resume.
        log: journal of the calls.
        files: files of the run.
        should_stop: a callback sets it to end training after the iteration.
        ended_by: reason why training ended early, if it did.

    Raises:
        ConfigError: the run exists with a different configuration, or another trainer is training
            it.
    """

    def __init__(
        self,
        config: BaseConfig,
        env: BaseEnvironment,
        critic: BaseCritic,
        optimizer: BaseOptimizer,
        reward_fn: BaseReward | None = None,
        store: BaseStore | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> None:
        self.config, self.env, self.critic, self.optimizer = config, env, critic, optimizer
        self.reward_fn, self.callbacks = reward_fn, list(callbacks or ())
        self.store = LocalStore(config.experiment_dir) if store is None else store
        self.should_stop, self.ended_by = False, ""
        critic.for_environment(env)
        self.run_id = _run_name(config)
        self.files = RunFiles.of(self.store, self.run_id, env)
        self._open()
        self.logger = RunLogger(self.store, self.run_id, level=config.log_level)
        if config.edited_policies == "take" and (edited := self.files.policies.take_edits()):
            self.logger.warning(f"continuing with edited policies of {', '.join(edited)}")
        self.log = CallLog(
            self.store.path(f"runs/{self.run_id}/calls.jsonl"),
            budget=Budget(
                max_calls=config.max_calls,
                max_total_tokens=config.max_total_tokens,
                max_cost_usd=config.max_cost_usd,
            ),
            before=spent_in(self.store.path("."), but=self.run_id),
            seed=config.seed,
        )
        self.history: list[dict[str, Any]] = read_metrics(self.store, self.run_id)

    def _open(self) -> None:
        """Create the run, or check that an existing one matches."""
        path, resume = f"runs/{self.run_id}/config.json", self.config.resume
        ours = json.loads(to_json_text(self.config.to_dict()))
        if not self.store.exists(path):
            if resume not in ("latest", "never"):
                raise ConfigError(f"there is no run {resume!r} in {self.config.experiment_dir}")
            self.store.write_text(path, to_json_text(ours))
            meta = {"schema_version": 1, "run_id": self.run_id, "agents": self.env.agent_names}
            meta["policies"] = self.env.default_policies()
            self.store.write_text(f"runs/{self.run_id}/run_meta.json", to_json_text(meta))
            return
        if resume == "never":
            raise ConfigError(
                f"the run {self.run_id!r} exists in {self.config.experiment_dir}: choose "
                "a different run_name, or set resume=latest to resume it"
            )
        theirs = read_json(self.store, path)
        different = sorted(
            key for key in set(ours) & set(theirs) - _FREE if _told(ours[key]) != _told(theirs[key])
        )
        if different and not self.files.policies.iterations():
            calls = self.store.path(f"runs/{self.run_id}/calls.jsonl")
            if not calls.exists() or not calls.stat().st_size:  # the run is still empty
                self.store.write_text(path, to_json_text(ours))
                return
        if different:
            raise ConfigError(
                f"the run {self.run_id!r} was started with a different {', '.join(different)}: "
                "choose a different run_name, or restore ("
                + ", ".join(f"{key}={theirs[key]!r}" for key in different)[:300]
                + ")"
            )

    # -- training ---------------------------------------------------------------------------------

    def train(self, num_iterations: int | None = None) -> list[dict[str, Any]]:
        """Train up to an iteration; finished work is not repeated.

        Args:
            num_iterations: total number, including earlier calls; the configuration's if not given.

        Returns:
            The statistics of all iterations so far.
        """
        last = self.config.num_iterations if num_iterations is None else num_iterations
        with self.store.lock(self.run_id):
            for suffix in ("", "_best"):
                name = f"{self.run_id}{suffix}.json"
                remove_drafts(Path(self.config.checkpoint_dir), name)
            # Other processes may have trained since this trainer was made.
            self.log.before = spent_in(self.store.path("."), but=self.run_id)
            self.log.reload()
            self.history = read_metrics(self.store, self.run_id)
            self._fire("on_resume", self)
            first = self.config.start_iteration
            begin = max([first, *self.files.policies.iterations()])
            if 0 < first < begin:
                told = (
                    f"the run has {begin} iterations and goes on: start_iteration={first} is done"
                )
                self.logger.warning(told)
            try:
                for iteration in range(begin, last):
                    if self.should_stop:
                        break
                    self.train_one_iteration(iteration)
            except BudgetUsedUp as error:
                self.ended_by = str(error)
                self.logger.warning(f"training ends: {error}; the run is saved and can be resumed")
        self.save_policy_files()
        self._write_table()
        return list(self.history)

    def train_one_iteration(self, iteration: int) -> dict[str, Any]:
        """Train for one iteration.

        Args:
            iteration: its number, from 0.

        Returns:
            ``paradigm``, ``num_episodes``, ``avg_reward``, ``min_reward``, ``max_reward``,
            ``rewards``, ``input_tokens``, ``output_tokens``, ``total_tokens``, ``cost_usd``.

        Raises:
            BudgetUsedUp: the budget is used up; received answers are kept.
        """
        self._fire("on_iteration_start", iteration, self)
        state = TrainingState(
            iteration,
            self.config,
            self.env,
            self.critic,
            self.optimizer,
            self.log,
            self.reward_fn,
            self._told_of,
        )
        phases.load_policies(state, self.files)
        self.logger.iteration_start(iteration, state.policies)
        phases.collect(state, self.files)
        for one in state.trajectories:
            self.logger.episode_saved(iteration, one.metadata["episode_id"], one.reward)
        phases.evaluate(state, self.files)
        for number, each in state.evaluations.items():
            said = each.get("error") or each.get("raw_response", "")
            self.logger.evaluation_done(iteration, number, self.config.paradigm, said)
        for agent, gradients in state.gradients.items():
            self.logger.gradient_saved(iteration, agent, len(gradients))
        phases.apply(state, self.files)
        stats = phases.save(state, self.files)
        self.history = read_metrics(self.store, self.run_id)
        self._write_table()
        self.logger.iteration_end(iteration, stats)
        self._fire("on_iteration_end", iteration, stats, self)
        return stats

    def _write_table(self) -> None:
        if self.rows:
            self.store.write_text(f"runs/{self.run_id}/{METRICS_FILE}", metrics_table(self.rows))

    def _told_of(self, hook: str, *args: Any) -> None:
        more = (self,) if hook == "on_episode_complete" else ()
        self._fire(hook, *args, *more)

    def _fire(self, hook: str, *args: Any) -> None:
        fire(self.callbacks, hook, *args)

    @property
    def folder(self) -> str:
        """Folder of the run."""
        path = self.store.path(f"runs/{self.run_id}")
        return self.run_id if path is None else str(path)

    @property
    def policies(self) -> dict[str, str]:
        """The newest policies."""
        return self.files.policies.get_policies()

    def save_policy_files(self) -> None:
        """Write the newest policies, and the best, as files into ``checkpoint_dir``."""
        newest, best = self._numbers()
        if newest is None:
            return
        for number, suffix in ((newest, ""), (best, "_best")):
            write_policy_file(
                Path(self.config.checkpoint_dir) / f"{self.run_id}{suffix}.json",
                number,
                self.files.policies.get_policies(number),
            )

    def _numbers(self) -> tuple[int | None, int]:
        """Numbers of the newest and the best checkpoint (by held-out, else training reward)."""
        saved = self.files.policies.iterations()
        if not saved:
            return None, 0
        judged = {
            number: score
            for number in saved
            if (score := self.files.policies.metadata(number).get("validation_reward")) is not None
        }
        first = next((row["metadata"] for row in self.rows if row["iteration"] == 0), {})
        if judged and first.get("previous_validation_reward") is not None:
            judged[0] = first["previous_validation_reward"]
        if judged:
            return saved[-1], max(judged, key=lambda number: (judged[number], number))
        played = {row["iteration"]: row["avg_reward"] for row in self.rows if row.get("rewards")}
        best = max(played, key=lambda number: (played[number], number)) if played else saved[-1]
        return saved[-1], best

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The statistics of all iterations, each with its number and further data."""
        return read_metrics(self.store, self.run_id, whole=True)

    def close(self) -> None:
        """Close the files of the run."""
        self.log.close()
        self.logger.close()


def _run_name(config: BaseConfig) -> str:
    if config.resume not in ("latest", "never"):
        return config.resume
    return config.run_name or config.exp_name


def _told(value: Any) -> Any:
    """A setting without the model fields that may change at a resume."""
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if key not in _FREE_OF_MODELS}
    return value


def make_trainer(
    config: BaseConfig,
    *,
    reward_fn: BaseReward | None = None,
    store: BaseStore | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> MonteCarloTrainer:
    """Make a trainer with the parts of a configuration.

    Args:
        config: the training configuration.
        reward_fn: as in :class:`MonteCarloTrainer`.
        store: as in :class:`MonteCarloTrainer`.
        callbacks: as in :class:`MonteCarloTrainer`.
    """
    env = make_env(config.env, config)
    prompts = None if config.prompts_dir is None else Path(config.prompts_dir)
    ours = {file.name for file in PROMPTS.glob("*.txt")}
    if prompts is not None and prompts.is_dir() and ours.isdisjoint(os.listdir(prompts)):
        raise ConfigError(
            f"prompts_dir={str(prompts)!r} has no effect: it holds none of "
            f"{', '.join(sorted(ours))}"
        )
    critic = CentralizedCritic(config, prompts)
    optimizer = PolicyGradientOptimizer(config.get_optimizer_llm(), prompts_dir=prompts)
    return MonteCarloTrainer(config, env, critic, optimizer, reward_fn, store, callbacks)


def train(config_path: str | os.PathLike[str], **overrides: Any) -> list[dict[str, Any]]:
    """Load a configuration, make the parts, and train.

    Args:
        config_path: a JSON file.
        **overrides: values that replace values of the file.

    Returns:
        The statistics of each iteration.

    Raises:
        ConfigError: the configuration is wrong.
    """
    trainer = make_trainer(load_config(config_path, overrides))
    try:
        return trainer.train()
    finally:
        trainer.close()

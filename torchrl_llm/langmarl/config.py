"""Configurations of training in language space: flat dataclasses, one per environment.

Files are JSON. A model is the name of a preset, a mapping, or a mapping with a ``preset`` and
values that override it. Unknown keys are errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from torchrl_llm._checked import Ge
from torchrl_llm._masking import masked
from torchrl_llm._settings import Count, Group, check_types, ensure
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.environment import env_class
from torchrl_llm.langmarl.llm_config import LLMConfig, get_llm_config, read_object
from torchrl_llm.langmarl.local_store import redacted
from torchrl_llm.recipes.strict_config import from_mapping

Layout = Literal[
    "cramped_room",
    "asymmetric_advantages",
    "coordination_ring",
    "forced_coordination",
    "counter_circuit",
]
"""Layouts of Overcooked kitchens."""

_MODELS = ("llm", "actor_llm", "critic_llm", "optimizer_llm", "judge_llm")


class BaseConfig(Group):
    """Settings shared by all environments.

    Args:
        env: name of the environment.
        exp_name: name of the experiment and of its run.
        paradigm: ``central_credit`` evaluates each agent separately, ``central_global`` all
            together.
        num_iterations: total number of iterations; with 0, nothing is trained.
        trajectories_per_iteration: episodes per iteration.
        mini_batch_size: number of episodes that are used for gradients; all if not given.
        start_iteration: number of the first iteration; if there is a later checkpoint, training
            continues from that.
        llm: model of all roles without a model of their own; rejected if every role has one.
        actor_llm: model of the agents.
        critic_llm: model of the critic.
        optimizer_llm: model of the optimizer.
        judge_llm: model of the judge; the critic's if not given.
        num_agents: number of agents.
        experiment_dir: folder of the runs.
        checkpoint_dir: folder for the newest and the best policies as files.
        max_workers: concurrent episodes or calls of the critic.
        log_level: level of the log file and the console.
        seed: determines the order of tasks, mini-batches and held-out tasks.
        run_name: name of the run, if different from ``exp_name``.
        resume: ``latest`` resumes an existing run of that name; ``never`` raises an error if it
            exists; or the name of a run to resume.
        update: ``feedback`` replaces a section of the policy, ``rewrite`` lets a model rewrite it.
        accept: ``better`` keeps the old policies unless the new ones are better on held-out tasks.
        validation_fraction: fraction of the tasks that is held out.
        max_policy_chars: most characters of a policy; a longer one is rejected.
        edited_policies: treatment of texts of the newest checkpoint that were edited by hand:
            ``refuse`` treats them as damaged.
        max_calls: most calls of all runs of ``experiment_dir``.
        max_total_tokens: most tokens of all runs of ``experiment_dir``.
        max_cost_usd: most US dollars of all runs of ``experiment_dir``; the prices of all models
            must be known.
        prompts_dir: a folder with templates that replace the built-in ones.

    Raises:
        ConfigError: a value is impossible, has the wrong type, or has no effect.

    Example:
        >>> BaseConfig(paradigm="central_globe")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: paradigm must be one of 'central_credit', \
'central_global', got 'central_globe'; did you mean 'central_global'?
    """

    env: str = "language"
    exp_name: str = "experiment"
    paradigm: Literal["central_credit", "central_global"] = "central_credit"
    num_iterations: Annotated[int, Ge(0)] = 5
    trajectories_per_iteration: Count = 10
    mini_batch_size: Count | None = None
    start_iteration: Annotated[int, Ge(0)] = 0
    llm: LLMConfig | None = None
    actor_llm: LLMConfig | None = None
    critic_llm: LLMConfig | None = None
    optimizer_llm: LLMConfig | None = None
    judge_llm: LLMConfig | None = None
    num_agents: Count = 2
    experiment_dir: str = "./experiments"
    checkpoint_dir: str = "./ckpt_policy"
    max_workers: Count = 5
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    seed: int = 0
    run_name: str | None = None
    resume: str = "latest"
    update: Literal["feedback", "rewrite"] = "feedback"
    accept: Literal["always", "better"] = "always"
    validation_fraction: float = 0.0
    max_policy_chars: Count | None = None
    edited_policies: Literal["refuse", "take"] = "refuse"
    max_calls: Annotated[int, Ge(0)] | None = None
    max_total_tokens: Annotated[int, Ge(0)] | None = None
    max_cost_usd: Annotated[float, Ge(0)] | None = None
    prompts_dir: str | None = None

    def __post_init__(self) -> None:
        for name in _MODELS:
            setattr(self, name, _model_of(name, getattr(self, name)))
        check_types(self)
        super().__post_init__()
        for name in ("exp_name", "run_name", "resume"):
            value = getattr(self, name)
            fits = value is None or (value.strip(". ") and not set(value) & set("/\\"))
            ensure(fits, f"{name} names a folder, got {value!r}")
        size, drawn = self.mini_batch_size, self.trajectories_per_iteration
        ensure(
            size is None or size <= drawn,
            f"mini_batch_size={size} is more than the trajectories_per_iteration={drawn} that it "
            "is drawn from",
        )
        held_out = self.validation_fraction
        ensure(0 <= held_out < 1, f"validation_fraction is in [0, 1), got {held_out}")
        better = self.accept == "better"
        ensure(
            not better or held_out, "accept=better needs held-out tasks: set validation_fraction"
        )
        ensure(
            None in (self.llm, self.actor_llm, self.critic_llm, self.optimizer_llm),
            "llm has no effect: actor_llm, critic_llm and optimizer_llm are set; leave it out, or "
            "set those that it is to replace to null",
        )
        if self.max_cost_usd is not None:
            self._check_prices()

    def _check_prices(self) -> None:
        for name in _MODELS:
            model = getattr(self, name)
            ensure(
                model is None or None not in model.prices,
                f"max_cost_usd={self.max_cost_usd:g} cannot be kept: the prices of {name} are not "
                "known; set input_price_per_million and output_price_per_million",
            )

    # -- models -----------------------------------------------------------------------------------

    def _model(self, *names: str) -> LLMConfig:
        for name in names:
            if getattr(self, name) is not None:
                return getattr(self, name)
        raise ConfigError(f"no model: set {' or '.join(names)}")

    def get_actor_llm(self) -> LLMConfig:
        """The model of the agents.

        Raises:
            ConfigError: none is set.
        """
        return self._model("actor_llm", "llm")

    def get_critic_llm(self) -> LLMConfig:
        """The model of the critic.

        Raises:
            ConfigError: none is set.
        """
        return self._model("critic_llm", "llm")

    def get_optimizer_llm(self) -> LLMConfig:
        """The model of the optimizer.

        Raises:
            ConfigError: none is set.
        """
        return self._model("optimizer_llm", "llm")

    def get_judge_llm(self) -> LLMConfig:
        """The model of the judge, never the actor's model.

        Raises:
            ConfigError: none is set.
        """
        return self._model("judge_llm", "critic_llm", "llm")

    # -- files ------------------------------------------------------------------------------------

    @classmethod
    def from_json(
        cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a file.

        Args:
            path: path of the file.
            overrides: values that replace values of the file.

        Raises:
            ConfigError: a key is unknown (the nearest is suggested), or a value is impossible.
        """
        return cls._of({**_of_file(path), **(overrides or {})})

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        given = {
            key: _model_of(key, value) if key in _MODELS else value
            for key, value in values.items()
            if key != "schema_version"
        }
        return from_mapping(cls, given)

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types, without API keys."""
        return masked(redacted(self))

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a file, without API keys.

        Args:
            path: path of the file.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _model_of(name: str, value: Any) -> LLMConfig | None:
    if value is None or isinstance(value, LLMConfig):
        return value
    try:
        if isinstance(value, str):
            return get_llm_config(value)
        if isinstance(value, Mapping):
            return LLMConfig.from_dict(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    raise ConfigError(f"{name} is the name of a model or a mapping, got a {type(value).__name__}")


class LanguageTaskConfig(BaseConfig):
    """Agents that answer one after another.

    Args:
        task_type: ``qa``, ``math``, ``writing`` or ``coding``.
        benchmark_path: a folder with ``<task_type>.jsonl``, or a file.
        data_limit: number of tasks to use, from the first; all if not given or not above 0.
        use_verified_reward: let a judge compare answers with the reference answers.
        episode_generation_workers: concurrent calls of agents.
        optimizer_workers: concurrently written gradients.
        code_timeout: time limit of a program in seconds.

    Raises:
        ConfigError: as in :class:`BaseConfig`.
    """

    task_type: Literal["qa", "math", "writing", "coding"] = "qa"
    benchmark_path: str = ""
    data_limit: int | None = None
    use_verified_reward: bool = False
    episode_generation_workers: Count = 8
    optimizer_workers: Count = 1
    code_timeout: Annotated[float, Ge(0.1)] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, asked = self.task_type, self.use_verified_reward
        unused = kind != "coding" and self.code_timeout != LanguageTaskConfig.code_timeout
        ensure(not unused, f"code_timeout has no effect on task_type={kind}, which runs no program")
        ensure(
            not asked or kind in ("qa", "math"),
            f"use_verified_reward has no effect: task_type={kind} is "
            f"{'scored by its tests' if kind == 'coding' else 'always judged'}",
        )
        ensure(
            self.judge_llm is None or kind == "writing" or asked,
            f"judge_llm has no effect on task_type={kind}"
            + ("" if kind == "coding" else " without use_verified_reward"),
        )


class OvercookedConfig(BaseConfig):
    """Two cooks; see :mod:`torchrl_llm.langmarl.overcooked` for its requirements.

    Args:
        layout: layout of the kitchen.
        episode_horizon: most steps of an episode.
        p0_agent: kind of the first cook.
        p1_agent: kind of the second.

    Raises:
        ConfigError: as in :class:`BaseConfig`; ``num_agents`` must be 2.
    """

    env: str = "overcooked"
    layout: Layout = "cramped_room"
    episode_horizon: Count = 400
    p0_agent: Literal["ProAgent", "Greedy"] = "ProAgent"
    p1_agent: Literal["ProAgent", "Greedy"] = "ProAgent"

    def __post_init__(self) -> None:
        super().__post_init__()
        two = self.num_agents == 2
        ensure(two, f"Overcooked has two cooks: num_agents must be 2, got {self.num_agents}")


class PistonballConfig(BaseConfig):
    """Pistons that move a ball to the left.

    Args:
        num_agents: number of pistons; equal to ``num_pistons`` if not given.
        num_pistons: number of pistons, at least 2.
        max_cycles: most cycles per episode.
        frame_size: size of a piston's view.
        action_mode: ``discrete`` or ``continuous``.

    Raises:
        ConfigError: as in :class:`BaseConfig`; or ``num_agents`` differs from ``num_pistons``.
    """

    env: str = "pistonball"
    num_agents: Count | None = None
    num_pistons: Annotated[int, Ge(2)] = 20
    max_cycles: Count = 125
    frame_size: Annotated[int, Ge(3)] = 84
    action_mode: Literal["discrete", "continuous"] = "discrete"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_agents is None:
            self.num_agents = self.num_pistons
        ensure(
            self.num_agents == self.num_pistons,
            f"each piston is an agent: num_agents={self.num_agents} must equal "
            f"num_pistons={self.num_pistons}",
        )


def load_config(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> BaseConfig:
    """Read a file into the class of its environment.

    Args:
        path: path of the file.
        overrides: values that replace values of the file, including ``env``.

    Raises:
        ConfigError: an environment or key is unknown, or a value is impossible.
    """
    values = {**_of_file(path), **(overrides or {})}
    name = str(values.get("env", "language"))
    return (env_class(name).CONFIG_CLASS or BaseConfig)._of(values)


def _of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the values of a file; its relative paths may be relative to its folder."""
    values = read_object(path, "the configuration")
    for name in ("benchmark_path", "prompts_dir"):
        if isinstance(values.get(name), str) and values[name]:
            beside = Path(path).parent / values[name]
            values[name] = str(beside.resolve()) if beside.exists() else values[name]
    return values

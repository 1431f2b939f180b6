"""Rows of a configuration: the problems of its task, and the mini-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import LazyStackedTensorDict

from torchrl_llm._settings import ensure
from torchrl_llm.data.column_names import joined_prompt
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.datasets.rows_env import check_rows
from torchrl_llm.recipes.chat_env_task import ChatEnvTask, Part
from torchrl_llm.recipes.data_config import ROWS, hold_out, tell_overlap
from torchrl_llm.recipes.reward_config import make_reward
from torchrl_llm.recipes.shared_keys import SampledConfig
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.rewards.function_reward import as_reward, of_program
from torchrl_llm.trainers.batch_source import trained_rows
from torchrl_llm.trainers.reward_watch import RewardWatch


def task_rows(
    config: SampledConfig, task: type[TaskEnv] | ChatEnvTask
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of both environments that select the source of their problems."""
    if config.env.dataset == ROWS:
        rows, held_out = config.data.load(), config.data.load_held_out()
        if held_out is None:
            rows, held_out = hold_out(rows, config.eval.num_prompts, where="data.source")
        return {"dataset": rows}, {"dataset": held_out}
    files, held_out = config.env.data_files, config.env.eval_data_files
    if isinstance(task, ChatEnvTask):
        ensure(
            files is None is held_out,
            f"env.data_files has no effect: env.dataset={config.env.dataset} has its own rows",
        )
        wanted = config.eval.num_prompts
        return {"part": Part("train", wanted)}, {"part": Part("test", wanted)}
    if files is None and held_out is None:
        return {"split": "train"}, {"split": "test"}
    if files is None or held_out is not None:
        train = {"split": "train"} if files is None else {"data_files": files}
        return train, {"data_files": held_out}
    rows = config.env.load(files, task.COLUMNS)
    train, held_out = hold_out(rows, config.eval.num_prompts, where=files)
    return {"dataset": train}, {"dataset": held_out}


def task_settings(config: SampledConfig) -> dict[str, Any]:
    """The task's settings, with the configured limit of steps, system prompt and reward."""
    own = config.env.dataset == ROWS
    reward = make_reward(config.reward, alone=own)
    if own and reward is None and config.agent.owns_loop:
        reward = of_program
    wanted = {
        "max_steps": config.env.max_steps,
        "system_prompt": config.env.system_prompt,
        "reward": reward,
        **(config.data.columns if own else {}),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return {**config.env.options, **given}


def check_problems(config: SampledConfig) -> None:
    """Check data files and columns before any weights are read.

    Args:
        config: configuration of the recipe.

    Raises:
        DataError: missing or malformed data.
        ConfigError: there are too few problems, or only a program can play the task.
    """
    task, name = task_class(config.env.dataset), config.env.dataset
    ensure(
        task.PROGRAM is None or config.agent.owns_loop,
        f"env={name} is played by a program alone: set agent=program agent.program={name} "
        f"agent.python=... (a Python with {name})",
    )
    train, held_out = (each.get("dataset") for each in task_rows(config, task))
    if config.env.dataset == ROWS:
        reward = as_reward(task_settings(config)["reward"])
        columns = check_rows(train, reward, **config.data.columns)
        if held_out and config.eval.num_prompts != 0:
            asked = [
                (joined_prompt(row, columns.prompt, columns.before) for row in rows)
                for rows in (train, held_out)
            ]
            tell_overlap(asked[0], list(asked[1]), "data.source")


def make_watch(config: SampledConfig, *, reads_reward: bool = True) -> RewardWatch:
    """Make the object that watches the rewards of each step.

    Args:
        config: configuration with ``reward.on_all_invalid`` and ``train.no_signal_steps``.
        reads_reward: whether training uses the reward; otherwise equal rewards are not reported.
    """
    return RewardWatch(
        on_all_invalid=config.reward.on_all_invalid,
        no_signal_steps=config.train.no_signal_steps if reads_reward else None,
    )


def minibatches(buffer: ReplayBuffer, epochs: int) -> Iterator[LazyStackedTensorDict]:
    """Yield the rows of one optimizer step at a time; every training row comes once per epoch.

    Args:
        buffer: buffer of the rows, iterated once per epoch; it may be empty.
        epochs: passes over it.
    """
    for _ in range(epochs if len(buffer) else 0):
        for batch in buffer:
            rows = trained_rows(batch)
            if rows is not None:
                yield rows

"""Builders that recipes share: policy, environments, evaluation and reference of a configuration.

Each function reads the groups of a configuration that it needs (``env``, ``model``, ``train``, ...,
the dataclasses of :mod:`torchrl_llm.recipes`), so that a recipe with other groups
besides can share them; see ``sota-implementations/expert-iteration``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from tensordict import LazyStackedTensorDict
from torchrl._utils import logger
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm import modules
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.column_names import joined_prompt
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs import GameEnv, TaskEnv
from torchrl_llm.envs.datasets.rows_env import check_rows
from torchrl_llm.envs.datasets.task_env import tool_schemas
from torchrl_llm.envs.transforms import ContextLimit, CutAnswers
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.evaluation import Evaluation, evaluate
from torchrl_llm.modules.policies.context_limit import longest_prompt
from torchrl_llm.recipes import groups
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.chat_env_task import ChatEnvTask, Part
from torchrl_llm.recipes.data_config import ROWS, DataConfig, hold_out, tell_overlap
from torchrl_llm.recipes.objective_groups import RewardComponentsConfig
from torchrl_llm.recipes.reward_config import add_components, make_reward
from torchrl_llm.recipes.strict_config import ensure, naming
from torchrl_llm.recipes.tasks import add_tools, task_class, tool_transform
from torchrl_llm.rewards.function_reward import as_reward
from torchrl_llm.tools.call_parsers import MessageCallParser
from torchrl_llm.trainers.batch_source import trained_rows
from torchrl_llm.trainers.reward_watch import RewardWatch
from torchrl_llm.trainers.run import EvalConfig

_TINY_BYTES = 2**23


class TrainedConfig(Protocol):
    """The groups of a recipe that trains a model, on whatever."""

    model: groups.ModelNameConfig
    train: groups.ForwardConfig
    train_model: groups.TrainModelConfig
    ref_model: groups.RefModelConfig
    eval: EvalConfig
    seed: int


class RecipeConfig(TrainedConfig, Protocol):
    """And those of one whose model learns from what it samples."""

    env: groups.EnvConfig
    agent: AgentConfig
    data: DataConfig
    model: groups.ModelConfig
    train: groups.TrainConfig
    inference_model: groups.InferenceModelConfig
    reward: RewardComponentsConfig

    @property
    def rows_per_batch(self) -> int:
        """Responses collected in a step."""


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch.

    Args:
        seed: any integer.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_threads(config: TrainedConfig) -> None:
    """Give torch the configured number of CPU threads, or what :func:`spare_threads` leaves.

    Args:
        config: its ``train.num_threads`` and ``model.name``.
    """
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    else:
        spare_threads(config.model.name)


def spare_threads(name: str | Path | None) -> None:
    """Leave torch one CPU thread for a tiny model: a second one mostly waits, at full load.

    Args:
        name: folder or hub name; ``None`` for the model of the package. Others than tiny ones in a
            folder keep torch's choice.
    """
    weights = Path(name or embedded_model_path()) / "model.safetensors"
    if weights.is_file() and weights.stat().st_size < _TINY_BYTES:
        torch.set_num_threads(1)


def device_of(config: TrainedConfig) -> torch.device:
    """CUDA where there is one, unless the configuration says otherwise.

    Args:
        config: its ``train.device``.

    Raises:
        ResourceError: this machine does not have it.
    """
    return present_device(config.train.device, "train.device")


def device_kind(config: TrainedConfig) -> str:
    """Kind of the device, ``"cpu"`` or ``"cuda"``, whether or not this machine has it.

    Args:
        config: its ``train.device``.
    """
    name = config.train.device
    return device_of(config).type if name == "auto" else torch.device(name).type


@functools.cache
def present_device(name: str, key: str) -> torch.device:
    """A device of this machine.

    Args:
        name: as ``torch.device`` takes it, or ``auto`` for CUDA where there is one.
        key: dotted key of the setting.

    Raises:
        ResourceError: this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device fails in a way of its own
        raise ResourceError(
            f"{key}={name!r}: torch cannot use it here ({str(error).splitlines()[0]}); it finds "
            f"{torch.cuda.device_count()} CUDA devices; choose another, or auto"
        ) from error
    return device


def reference_device(config: TrainedConfig) -> torch.device:
    """Where the reference is: on the policy's device, or on the GPU after the policy's.

    Args:
        config: its ``ref_model.num_devices`` and ``train.device``.

    Raises:
        ResourceError: it is to have a GPU of its own, and there is none.
    """
    device = device_of(config)
    if not config.ref_model.num_devices:
        return device
    ensure(
        config.train.parallel == "none",
        f"ref_model.num_devices=1 with train.parallel={config.train.parallel}: the GPU behind a "
        "rank's is that of another rank; choose 0",
    )
    index = (device.index or 0) + 1
    found = torch.cuda.device_count()
    if device.type != "cuda" or index >= found:
        raise ResourceError(
            f"ref_model.num_devices=1 needs a GPU beside the policy's, {index + 1} in all; there "
            f"are {found}, and the policy is on {device}"
        )
    return torch.device("cuda", index)


def autocast(config: TrainedConfig) -> AbstractContextManager[Any]:
    """A context for sampling and scoring in the configured precision.

    Args:
        config: its ``train.mixed_precision``.
    """
    device = device_of(config).type
    return torch.autocast(device, dtype=torch.bfloat16, enabled=samples_in_bfloat16(config))


def samples_in_bfloat16(config: TrainedConfig) -> bool:
    """Whether sampling and scoring are in bfloat16, over weights of whatever type.

    Args:
        config: its ``train.mixed_precision`` and ``train.device``.
    """
    precision = config.train.mixed_precision
    return precision == "bfloat16" or (precision == "auto" and device_kind(config) == "cuda")


def wrapper_options(config: RecipeConfig) -> dict[str, Any]:
    """Options of a policy that samples: templates, long prompts, arguments of generation.

    Args:
        config: the recipe's.
    """
    return {
        **config.model.template,
        "on_overlong": config.env.on_overlong,
        "max_prompt_length": config.env.max_prompt_length,
        "generate_kwargs": config.inference_model.arguments,
        "tools": _tool_schemas(config),
    }


def _tool_schemas(config: RecipeConfig) -> list[dict[str, Any]] | None:
    """The task's tools as chat templates take them, where the model is to be told of them."""
    task = task_class(config.env.dataset)
    has_tools = (
        task.make_tools is not TaskEnv.make_tools
        or task.tool_schemas is not TaskEnv.tool_schemas
        or isinstance(task, ChatEnvTask)  # its transforms say
        or bool(config.env.tools)
        or config.agent.type != AgentConfig.default
    )
    if not (config.model.is_told_of_tools and has_tools):
        return None
    own, made = config.env.dataset == ROWS, list(config.agent.build().make_transforms())
    if own and config.env.tools:
        made.insert(0, tool_transform(config.env.tools, max_turns=config.env.max_tool_turns))
    if own and made:  # rows have no tools of their own, so that no environment is needed to ask
        told = [each for each in made if isinstance(each.parser, MessageCallParser)]
        return [schema for each in told for schema in each.schemas] or None
    env = _with_agent(config, task(**_data(config, task)[0], **_settings(config)))
    try:
        return (env.tool_schemas if isinstance(env, TaskEnv) else tool_schemas(env)) or None
    finally:
        env.close()


def make_tokenizer(
    name: str | None, max_tokens: int, *, key: str = "inference_model.max_tokens"
) -> Any:
    """The tokenizer of ``model.name``, after a look at what says how long its context is.

    Neither takes long, so that what is wrong with them is told before any weights are read.

    Args:
        name: the model, as ``model.name`` gives it.
        max_tokens: tokens that a response may have.
        key: dotted key of that.

    Raises:
        ConfigError: no such model, no tokenizer with it, or no room in its context.
    """
    with naming("model.name"):
        tokenizer, context = modules.load_tokenizer(name), modules.context_length(name)
    ensure(
        context is None or max_tokens < context,
        f"{key}={max_tokens} leaves no room for a prompt: the context of the model holds {context} "
        "tokens",
    )
    return tokenizer


def longest_row(config: TrainedConfig) -> int | None:
    """Tokens that a row may have: ``train.max_seq_len``, or else what the model's context holds.

    Args:
        config: its ``model.name`` and ``train``.

    Raises:
        ConfigError: longer rows are allowed than there can be.
    """
    context, longest = modules.context_length(config.model.name), config.train.max_seq_len
    ensure(
        None in (context, longest) or longest <= context,
        f"train.max_seq_len={longest} is more than the {context} tokens of the model's context",
    )
    return context if longest is None else longest


def check_problems(config: RecipeConfig) -> None:
    """Look at data files and columns before any weights are read.

    Args:
        config: the recipe's.

    Raises:
        DataError: missing or malformed data.
        ConfigError: the problems do not suffice.
    """
    task = task_class(config.env.dataset)
    train, held_out = (each.get("dataset") for each in _data(config, task))
    if config.env.dataset == ROWS:
        reward = as_reward(_settings(config)["reward"])
        columns = check_rows(train, reward, **config.data.columns)
        if held_out and config.eval.num_prompts != 0:
            asked = [
                (joined_prompt(row, columns.prompt, columns.before) for row in rows)
                for rows in (train, held_out)
            ]
            tell_overlap(asked[0], list(asked[1]), "data.source")


def make_policy(config: RecipeConfig, *, with_values: bool = False) -> modules.TransformersWrapper:
    """The policy that samples and is trained; both use its one module.

    Args:
        config: the recipe's.
        with_values: give it a value head.
    """
    _tell_small_model(config)
    tokenizer = make_tokenizer(config.model.name, config.inference_model.max_tokens)
    longest_row(config)
    check_problems(config)
    options = wrapper_options(config)
    return load_policy(config, tokenizer, with_values=with_values, **options)


def load_policy(
    config: TrainedConfig, tokenizer: Any, *, with_values: bool = False, **options: Any
) -> modules.TransformersWrapper:
    """The model that is trained, in a wrapper that samples with it.

    Args:
        config: its ``model``, ``train`` and ``train_model``.
        tokenizer: of the model.
        with_values: give it a value head.
        options: of the wrapper.
    """
    wanted = config.train_model
    model = modules.load_model(
        config.model.name,
        dtype=wanted.dtype,
        attn_implementation=wanted.attn_implementation,
        gradient_checkpointing=wanted.gradient_checkpointing,
        lora=wanted.lora.arguments,
        device=device_of(config),
    )
    return modules.TransformersWrapper(
        modules.TransformersBackend(
            model.train(),
            tokenizer=tokenizer,
            chunk_size=wanted.logprob_chunk_size,
            layout=config.train.packing,
            value_head=modules.ValueHead.for_model(model) if with_values else None,
        ),
        tokenizer=tokenizer,
        **options,
    )


def _tell_small_model(config: RecipeConfig) -> None:
    """Say where a task is too hard for the model that is taken because none was named."""
    task = task_class(config.env.dataset)
    if config.model.name is not None or not task.NEEDS_LARGER_MODEL:
        return
    how = "model.name=Qwen/Qwen2.5-0.5B-Instruct for example, or a folder"
    if issubclass(task, GameEnv):
        how += "; or teach it the game first, by torchrl-llm train imitate"
    logger.warning(
        f"env={config.env.dataset} is a task for a larger model. Without model.name this run "
        "trains the model of the package, whose 0.33 million parameters only know sums of two "
        f"numbers and a calculator: its rewards will hardly rise. Name another: {how}"
    )


def make_reference(config: TrainedConfig, policy: modules.TransformersWrapper) -> TokenScorer:
    """The policy that divergences are measured from.

    Args:
        config: the recipe's; ``ref_model.name`` is another model.
        policy: with LoRA, and no other name, it is the reference itself, with its adapters off.
    """
    if config.train_model.lora.enabled and config.ref_model.name is None:
        return modules.AdapterDisabled(policy)
    name = config.ref_model.name or config.model.name
    device = reference_device(config)
    with naming("ref_model.name"):
        model = modules.load_model(name, dtype=config.train_model.dtype, device=device)
    return modules.TransformersBackend(model.requires_grad_(False), layout=config.train.packing)


def make_envs(
    config: RecipeConfig, policy: modules.TransformersWrapper, **order: Any
) -> tuple[TaskEnv, TaskEnv | None]:
    """The environment to train in, and that of the held-out prompts.

    Args:
        config: the recipe's.
        policy: its tokenizer is the environments'.
        **order: arguments of the first that say in which order its prompts are drawn.

    Returns:
        Two environments; no second one with ``eval.num_prompts=0``.

    Raises:
        ConfigError: the problems do not suffice.
    """
    train = make_train_env(config, policy.tokenizer, seed=config.seed, **order)
    held_out = make_eval_env(config, policy.tokenizer)
    if held_out is not None and config.env.dataset != ROWS and not isinstance(train, GameEnv):
        # Rows that a task makes itself are apart; :func:`check_problems` sees those of ``data``.
        rows = [getattr(env.primer.dataloader, "rows", ()) for env in (train, held_out)]
        if not isinstance(getattr(rows[0], "rows", None), GeneratedRows):
            asked = [[row.get("query") for row in rows[1]]]
            tell_overlap((row.get("query") for row in rows[0]), *asked, "env.dataset")
    return train, held_out


def max_turns(config: RecipeConfig) -> int:
    """How often the policy can be asked in an episode of the task.

    Args:
        config: its ``env``.

    Raises:
        ConfigError: the task has no limit of steps, and the configuration gives none.
    """
    task = task_class(config.env.dataset)
    turns = task.max_turns(config.env.max_steps)
    if turns is None:
        raise ConfigError(
            f"the task {config.env.dataset!r} ends its episodes only when the model does: pass "
            "env.max_steps"
        )
    thinks = max(task.MAX_AUXILIARY_TURNS, config.env.max_tool_turns if config.env.tools else 0)
    steps = turns // (1 + task.MAX_AUXILIARY_TURNS)
    return steps * (1 + config.agent.build().auxiliary_turns(thinks))


def make_step_buffer(config: RecipeConfig, num_rows: int | None = None) -> ReplayBuffer:
    """A buffer that holds what is trained in one step, each row once an epoch.

    A trajectory is one row in it, or as many as turns where its history is rewritten between them.

    Args:
        config: the recipe's.
        num_rows: trajectories of a step; ``rows_per_batch`` if not given.
    """
    rows = config.rows_per_batch if num_rows is None else num_rows
    capacity = rows * max_turns(config)
    return ReplayBuffer(
        storage=LazyStackStorage(capacity),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.train.optim_batch_size or capacity,
    )


def make_train_env(config: RecipeConfig, tokenizer: Any, *, seed: int, **order: Any) -> TaskEnv:
    """The environment to train in, whose repeats of a prompt all begin in the same reset.

    Its reward is the task's own with the configured components.

    Args:
        config: the recipe's; ``rows_per_batch`` conversations at a time.
        tokenizer: the policy's.
        seed: of the order of the prompts.
        **order: arguments of the environment that say more of it.

    Raises:
        ConfigError: the problems do not suffice.
    """
    task = task_class(config.env.dataset)
    env = task(
        **_data(config, task)[0],
        **_settings(config),
        num_envs=config.rows_per_batch,
        repeats=config.env.repeats,
        group_repeats=True,
        seed=seed,
        tokenizer=tokenizer,
        **order,
    )
    return _with_context_limit(config, _with_components(config, _with_agent(config, env)))


def make_eval_env(config: RecipeConfig, tokenizer: Any, **options: Any) -> TaskEnv | None:
    """The environment of the held-out prompts; ``None`` with ``eval.num_prompts=0``.

    With ``eval.num_prompts=null`` it has all that are held out.

    Args:
        config: the recipe's.
        tokenizer: the policy's.
        **options: of the task, in the place of those in ``env.options``.

    Raises:
        ConfigError: the problems do not suffice.
    """
    if config.eval.num_prompts == 0:
        return None
    task = task_class(config.env.dataset)
    data = _data(config, task)[1]
    num_envs = min(config.eval.batch_size, config.eval.num_prompts or config.eval.batch_size)
    players = task.num_players({**config.env.options, **options})
    num_envs = max(players, num_envs - num_envs % players)
    env = task(
        **data,
        **{**_settings(config), **options},
        num_envs=num_envs,
        shuffle=False,
        tokenizer=tokenizer,
    )
    return _with_context_limit(config, _with_components(config, _with_agent(config, env)))


def _with_context_limit(config: RecipeConfig, env: TaskEnv) -> TaskEnv:
    """The environment, which ends conversations that have filled the policy's context."""
    if max_turns(config) > 1:
        context = modules.context_length(config.model.name)
        engine = getattr(config.inference_model, "max_model_len", None)
        longest = longest_prompt(
            min((n for n in (context, engine) if n is not None), default=None),
            config.env.max_prompt_length,
        )
        formatter = ChatFormatter(
            env.tokenizer,
            **config.model.template,
            tools=env.tool_schemas if config.model.is_told_of_tools else None,
        )
        env.append_transform(ContextLimit(longest, formatter))
    return env


def _with_agent(config: RecipeConfig, env: TaskEnv) -> TaskEnv:
    """The environment with its further tools, and the agent in it."""
    env = add_tools(env, config.env.tools, max_turns=config.env.max_tool_turns)
    with naming(f"agent={config.agent.type}"):
        config.agent.build().wrap(env)
    if penalty := getattr(config.reward, "cut_penalty", 0.0):
        gates = [each for each in env.transform if isinstance(each, CutAnswers)]
        ensure(
            bool(gates),
            f"reward.cut_penalty has no effect in env.dataset={config.env.dataset}, where a cut "
            "answer is a turn without an action: set env.options.invalid_reward",
        )
        for gate in gates:
            gate.penalty = penalty
    return env


def _settings(config: RecipeConfig) -> dict[str, Any]:
    """The task's own settings, and what replaces its limit of steps, system prompt and reward."""
    own = config.env.dataset == ROWS
    wanted = {
        "max_steps": config.env.max_steps,
        "system_prompt": config.env.system_prompt,
        "reward": make_reward(config.reward, alone=own),
        **(config.data.columns if own else {}),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return {**config.env.options, **given}


def _with_components(config: RecipeConfig, env: TaskEnv) -> TaskEnv:
    """The environment with the configured parts of the reward next to that of the task."""
    if config.env.dataset == ROWS and config.reward.function is None:
        return env  # they are its reward already
    return add_components(env, config.reward.components)


def _data(
    config: RecipeConfig, task: type[TaskEnv] | ChatEnvTask
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the two environments that say where their problems come from."""
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


def make_evaluation(
    config: RecipeConfig, env: TaskEnv | None, policy: modules.LLMWrapperBase
) -> Callable[[], Evaluation] | None:
    """Greedy accuracy of the policy on the held-out prompts, when it is called.

    Args:
        config: the recipe's.
        env: the environment of the held-out prompts, or ``None``.
        policy: what samples; its weights are those of the trained policy.
    """
    if env is None:
        return None
    return greedy_evaluation(
        config,
        env,
        policy,
        max_tokens=config.inference_model.max_tokens,
        max_turns=max_turns(config),
    )


def greedy_evaluation(
    config: TrainedConfig,
    env: TaskEnv,
    policy: modules.LLMWrapperBase,
    *,
    max_tokens: int,
    max_turns: int,
) -> Callable[[], Evaluation]:
    """Greedy accuracy of a policy in an environment, when it is called.

    Args:
        config: its ``eval.num_prompts``, ``None`` for all that the environment has, and ``train``.
        env: the environment.
        policy: what samples.
        max_tokens: of a turn.
        max_turns: of a conversation.
    """
    arguments = {"max_new_tokens": max_tokens, "temperature": 0.0}
    greedy = policy.get_new_version(generate_kwargs=arguments)
    num_prompts = config.eval.num_prompts or env.primer.num_rows

    def run() -> Evaluation:
        with autocast(config):
            return evaluate(env, greedy, num_prompts=num_prompts, max_turns=max_turns)

    return run


def minibatches(buffer: ReplayBuffer, epochs: int) -> Iterator[LazyStackedTensorDict]:
    """The rows of an optimizer step at a time, each row that trains once an epoch.

    Args:
        buffer: iterated once an epoch; it may be empty.
        epochs: passes over it.
    """
    for _ in range(epochs if len(buffer) else 0):
        for batch in buffer:
            rows = trained_rows(batch)
            if rows is not None:
                yield rows


def make_watch(config: RecipeConfig, *, reads_reward: bool = True) -> RewardWatch:
    """What looks at the rewards of each step.

    Args:
        config: its ``reward.on_all_invalid`` and ``train.no_signal_steps``.
        reads_reward: whether the reward is learned from; otherwise equal ones are nothing to say.
    """
    return RewardWatch(
        on_all_invalid=config.reward.on_all_invalid,
        no_signal_steps=config.train.no_signal_steps if reads_reward else None,
    )


def overlong_metrics(policy: modules.LLMWrapperBase) -> dict[str, int]:
    """How many prompts of this step were too long; counting starts over.

    Args:
        policy: the policy that was asked.
    """
    counts = policy.overlong_counts
    total = sum(counts.values())
    counts.update(dict.fromkeys(counts, 0))
    return {"train/overlong": total}

"""Environments of a configuration, its buffer, and the evaluation in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm import modules
from torchrl_llm._settings import ensure, naming
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.transforms import ContextLimit, CutAnswers
from torchrl_llm.errors import ConfigError
from torchrl_llm.evaluation import Evaluation, answer_record, evaluate, figures_at_k
from torchrl_llm.gateway import EngineLimits, ProgramEnv
from torchrl_llm.modules.policies.context_limit import longest_prompt
from torchrl_llm.modules.policies.policy_router import derived_seed
from torchrl_llm.recipes.builders.devices import autocast
from torchrl_llm.recipes.builders.problems import task_rows, task_settings
from torchrl_llm.recipes.data_config import ROWS, tell_overlap
from torchrl_llm.recipes.reward_config import add_components
from torchrl_llm.recipes.shared_keys import SampledConfig, TrainedConfig
from torchrl_llm.recipes.tasks import add_tools, task_class
from torchrl_llm.rewards import ModelReward
from torchrl_llm.trainers.held_out import NUM_COMPARED


def make_envs(
    config: SampledConfig, policy: modules.TransformersWrapper, **order: Any
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
    if held_out is not None and config.env.dataset != ROWS:
        # Rows that a task makes itself are apart; :func:`check_problems` sees those of ``data``.
        rows = [getattr(env.primer.dataloader, "rows", ()) for env in (train, held_out)]
        if not isinstance(getattr(rows[0], "rows", None), GeneratedRows):
            # A world's rows have an empty query, and differ in the rest.
            asked = [(row.get("query") or row for row in each) for each in rows]
            tell_overlap(asked[0], list(asked[1]), "env.dataset")
    return train, held_out


def max_turns(config: SampledConfig) -> int:
    """How often the policy can be asked in an episode of the task.

    Args:
        config: its ``env``.

    Raises:
        ConfigError: the task has no limit of steps, and the configuration gives none.
    """
    if config.agent.owns_loop:
        return config.agent.max_calls
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


def make_step_buffer(config: SampledConfig, num_rows: int | None = None) -> ReplayBuffer:
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


def make_train_env(config: SampledConfig, tokenizer: Any, *, seed: int, **order: Any) -> TaskEnv:
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
        **task_rows(config, task)[0],
        **task_settings(config),
        num_envs=config.rows_per_batch,
        repeats=config.env.repeats,
        group_repeats=True,
        seed=seed,
        tokenizer=tokenizer,
        **order,
    )
    return _prepared(config, env)


def make_eval_env(config: SampledConfig, tokenizer: Any, **options: Any) -> TaskEnv | None:
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
    data = task_rows(config, task)[1]
    repeats = config.eval.repeats
    num_envs = max(1, config.eval.batch_size // repeats)
    num_envs = min(num_envs, config.eval.num_prompts or num_envs) * repeats
    players = task.num_players({**config.env.options, **options})
    num_envs = max(players, num_envs - num_envs % players)
    env = task(
        **data,
        **{**task_settings(config), **options},
        num_envs=num_envs,
        **({"repeats": repeats} if repeats > 1 else {}),  # by itself a row of each player
        shuffle=False,
        tokenizer=tokenizer,
    )
    return _prepared(config, env)


def _prepared(config: SampledConfig, env: TaskEnv) -> Any:
    """The environment with its reward, its agent, and its limits."""
    if config.agent.owns_loop:
        return _with_program(config, _with_components(config, env))
    return _with_context_limit(config, _with_components(config, with_agent(config, env)))


def _with_program(config: SampledConfig, env: TaskEnv) -> ProgramEnv:
    """The environment, whose rows and reward a program uses."""
    ensure(not config.env.tools, "env.tools has no effect with agent=program: it has its own")
    ensure(
        config.env.max_steps is None,
        "env.max_steps has no effect with agent=program; agent.max_calls is its limit",
    )
    _set_cut_penalty(config, env)
    sampling = config.inference_model
    limits = EngineLimits(
        longest_prompt=_longest_prompt(config),
        max_new_tokens=sampling.max_tokens,
        vocab_size=len(env.base_env.tokenizer),
        keeps_support=sampling.arguments.get("record_support", False),
        trains=True,
    )
    with naming("agent=program"):
        return config.agent.build().wrap(
            env,
            template=config.model.template,
            limits=limits,
            show_tools=config.model.is_told_of_tools,
        )


def _longest_prompt(config: SampledConfig) -> int | None:
    """Tokens that a prompt may have: by the model, by its engine, by what is wanted."""
    context = modules.context_length(config.model.name)
    engine = getattr(config.inference_model, "max_model_len", None)
    return longest_prompt(
        min((n for n in (context, engine) if n is not None), default=None),
        config.env.max_prompt_length,
    )


def _with_context_limit(config: SampledConfig, env: TaskEnv) -> TaskEnv:
    """The environment, which ends conversations that have filled the policy's context."""
    if max_turns(config) > 1:
        formatter = ChatFormatter(
            env.tokenizer,
            **config.model.template,
            tools=env.tool_schemas if config.model.is_told_of_tools else None,
        )
        env.append_transform(ContextLimit(_longest_prompt(config), formatter))
    return env


def with_agent(config: SampledConfig, env: TaskEnv) -> TaskEnv:
    """The environment with its further tools, and the agent in it."""
    env = add_tools(env, config.env.tools, max_turns=config.env.max_tool_turns)
    with naming(f"agent={config.agent.type}"):
        config.agent.build().wrap(env)
    _set_cut_penalty(config, env)
    return env


def _set_cut_penalty(config: SampledConfig, env: TaskEnv) -> None:
    if penalty := getattr(config.reward, "cut_penalty", 0.0):
        gates = [each for each in env.transform if isinstance(each, CutAnswers)]
        ensure(
            bool(gates),
            f"reward.cut_penalty has no effect in env.dataset={config.env.dataset}, where a cut "
            "answer is a turn without an action: set env.options.invalid_reward",
        )
        for gate in gates:
            gate.penalty = penalty


def _with_components(config: SampledConfig, env: TaskEnv) -> TaskEnv:
    """The environment with the configured parts of the reward next to that of the task."""
    if config.env.dataset != ROWS or config.reward.function is not None:
        env = add_components(env, config.reward.components)  # else they are its reward already
    parts = (getattr(each, "components", {}) for each in env.transform)
    for part in chain.from_iterable(each.values() for each in parts):
        if isinstance(part.scorer, ModelReward) and config.model.is_told_of_tools:
            part.scorer.tools = part.scorer.tools or env.tool_schemas or None
    return env


def make_evaluation(
    config: SampledConfig, env: TaskEnv | None, policy: modules.LLMWrapperBase
) -> Callable[[], Evaluation] | None:
    """Accuracy of the policy on the held-out prompts, when it is called.

    It is that of greedy answers, or with ``eval.repeats`` of as many samples a prompt.

    Args:
        config: the recipe's.
        env: the environment of the held-out prompts, or ``None``.
        policy: what samples; its weights are those of the trained policy.
    """
    if env is None:
        return None
    if config.eval.repeats > 1:
        return sampled_evaluation(config, env, policy)
    return greedy_evaluation(
        config,
        env,
        policy,
        max_tokens=config.inference_model.max_tokens,
        max_turns=max_turns(config),
    )


def num_rows(
    config: TrainedConfig, env: TaskEnv | None, held_out: TaskEnv | None
) -> tuple[int | None, int | None]:
    """Rows to train on and rows that are held out; ``None`` where that is not known.

    Args:
        config: the recipe's.
        env: the environment to train in.
        held_out: the environment of the held-out prompts.
    """
    found = [getattr(getattr(e, "primer", None), "num_rows", None) for e in (env, held_out)]
    limits = [number for number in (found[1], config.eval.num_prompts) if number is not None]
    return found[0], 0 if held_out is None else min(limits, default=None)


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
            return evaluate(
                env, greedy, num_prompts=num_prompts, max_turns=max_turns, num_shown=NUM_COMPARED
            )

    return run


def sampled_evaluation(
    config: SampledConfig, env: TaskEnv, policy: modules.LLMWrapperBase
) -> Callable[[], Evaluation]:
    """Accuracy of ``eval.repeats`` samples a prompt, and pass@k and majority@k, when it is called.

    Samples are drawn from a seed of their own, each time the same: two evaluations of the same
    weights are equal, and the run goes on as without them.

    Args:
        config: its ``eval``, ``inference_model`` and ``seed``.
        env: the environment, whose prompts come ``eval.repeats`` times each.
        policy: what samples.
    """
    repeats, own = config.eval.repeats, {"record_support": False}
    if config.eval.temperature is not None:
        own["temperature"] = config.eval.temperature
    sampler = policy.get_new_version(generate_kwargs={**config.inference_model.arguments, **own})
    num_prompts = config.eval.num_prompts or env.primer.num_rows

    def run() -> Evaluation:
        records: list[dict[str, Any]] = []
        with autocast(config), torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(derived_seed(config.seed, "evaluation"))
            found = evaluate(
                env,
                sampler,
                num_prompts=num_prompts * repeats,
                max_turns=max_turns(config),
                num_shown=NUM_COMPARED,
                on_answer=lambda row, outcome: records.append(answer_record(row, outcome)),
            )
        groups = [records[i : i + repeats] for i in range(0, len(records), repeats)]
        at_k = {name: fmean(values) for name, values in figures_at_k(groups).items()}
        return replace(found, num_prompts=len(groups), at_k=at_k)

    return run

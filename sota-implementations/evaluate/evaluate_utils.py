"""Parts of evaluate.py: the model that answers, its answers, and the figures.

Every figure is computed from the records in the files of answers, so that it can be verified.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from evaluate_config import EvaluateConfig
from server_policy import server_policy

from torchrl_llm._registry import find
from torchrl_llm._settings import ensure, naming
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.transforms import ContextLimit
from torchrl_llm.errors import WorkerError
from torchrl_llm.evaluation import answer_record, evaluate, figures_at_k
from torchrl_llm.evaluation.report.evaluation_folder import HIGH, LOW, figure_names, figure_text
from torchrl_llm.functional import Interval, bootstrap_interval, wilson_interval
from torchrl_llm.gateway.policy_engine import limits_of
from torchrl_llm.modules import (
    ChatServerPolicy,
    LLMWrapperBase,
    TransformersWrapper,
    load_model,
    vLLMWrapper,
)
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.recipes.builders import make_tokenizer, present_device
from torchrl_llm.recipes.data_config import ROWS
from torchrl_llm.recipes.reward_config import add_components, make_reward
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.trainers.results import text_table

# IFEval on the hub has a single split of this name, which is for evaluation.
_SPLITS = {"ifeval": "train"}
# Limit of turns if nothing else ends a conversation.
_MOST_TURNS = 64


def make_policy(config: EvaluateConfig) -> LLMWrapperBase | ChatServerPolicy:
    """The model that answers."""
    wanted = config.inference_model
    if wanted.url is not None:
        return server_policy(config)
    device = present_device(wanted.device, "inference_model.device")
    dtype = wanted.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    tokenizer = make_tokenizer(config.model.name, wanted.max_tokens)
    options = {
        "tokenizer": tokenizer,
        **config.model.template,
        "on_overlong": config.eval.on_overlong,
        "generate_kwargs": wanted.arguments | {"stop_sequences": wanted.stop},
    }
    if wanted.backend == "vllm":
        engine = wanted.engine_options
        backend = VLLMBackend(config.model.name, tokenizer=tokenizer, dtype=dtype, **engine)
        return vLLMWrapper(backend, **options)
    bits = config.model.quantization
    model = load_model(config.model.name, dtype=dtype, quantization=bits, device=device)
    return TransformersWrapper(model, **options)


def make_env(
    config: EvaluateConfig, task: str, tokenizer: Any, policy: LLMWrapperBase | None = None
) -> TaskEnv:
    """The held-out prompts of a task, in the order of its data; ``policy`` answers programs."""
    settings = dict(config.options.get(task, {}))
    if config.eval.max_steps is not None:
        settings["max_steps"] = config.eval.max_steps
    path = config.data_files.get(task)
    split = config.eval.split or _SPLITS.get(task, "test")
    data = {"split": split} if path is None else {"data_files": path}
    if task == ROWS:
        data = {"dataset": config.data.load_held_out() or config.data.load(), **config.data.columns}
    if (reward := make_reward(config.reward, alone=task == ROWS)) is not None:
        settings["reward"] = reward
    repeats = config.eval.repeats
    prompts = max(1, config.eval.batch_size // repeats)
    env: TaskEnv = task_class(task)(
        **data,
        **settings,
        shuffle=False,
        num_envs=min(prompts, config.eval.num_prompts or prompts) * repeats,
        repeats=repeats,
        tokenizer=tokenizer,
    )
    alone = task == ROWS and config.reward.function is None  # the components already are the reward
    with naming(f"agent={config.agent.type}"):
        agent = config.agent.build()
        if not agent.OWNS_LOOP:
            agent.wrap(env)
        env = env if alone else add_components(env, config.reward.components)
        if agent.OWNS_LOOP:
            shows = config.model.is_told_of_tools
            env = agent.wrap(env, policy, limits=limits_of(policy), show_tools=shows)
    return env


def answer_task(
    config: EvaluateConfig, task: str, policy: LLMWrapperBase | ChatServerPolicy, path: Path
) -> list[dict]:
    """Answer the prompts of a task, and write each answer immediately.

    Args:
        config: configuration of the recipe.
        task: name of the task.
        policy: answers the prompts.
        path: path of the file of answers, JSON lines.

    Returns:
        The written records.
    """
    with_ids = isinstance(policy, LLMWrapperBase)
    owns_loop = config.agent.owns_loop
    ensure(
        with_ids or not owns_loop,
        "agent=program needs a model that gives token ids; a server of chat completions can be "
        "given to the program itself",
    )
    env = make_env(config, task, policy.tokenizer if with_ids else None, policy)
    # The program assumes that a model at a server was never trained on the task.
    is_told = config.model.is_told_of_tools if with_ids else config.model.show_tools is not False
    told: dict[str, Any] = {}
    if is_told and not owns_loop and (schemas := env.tool_schemas):
        told["tools"] = schemas  # training on the answers needs them, too
        policy = policy.get_new_version(tools=schemas)
    if with_ids and not owns_loop:
        env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter))
    num_prompts = config.eval.num_prompts or env.primer.num_rows
    records: list[dict] = []
    with path.open("w", encoding="utf-8") as file:

        def write(row: Any, outcome: Any) -> None:
            sample = {"prompt": len(records) // config.eval.repeats}
            records.append(sample | answer_record(row, outcome) | told)
            file.write(json.dumps(records[-1], ensure_ascii=False, default=str) + "\n")
            file.flush()

        try:
            evaluate(
                env,
                policy,
                num_prompts=num_prompts * config.eval.repeats,
                max_turns=_max_turns(config, task),
                on_answer=write,
                title=task,
            )
        except WorkerError as error:
            raise WorkerError(f"{error}; {path} has the {len(records)} answers so far") from error
        finally:
            env.close()
    return records


def _max_turns(config: EvaluateConfig, name: str) -> int:
    """Largest number of model calls in an episode of a task."""
    if config.agent.owns_loop:
        return config.agent.max_calls
    task = task_class(name)
    own, turns = task.MAX_AUXILIARY_TURNS, task.max_turns(config.eval.max_steps) or _MOST_TURNS
    return -(-turns // (1 + own)) * (1 + config.agent.build().auxiliary_turns(own))


def figures(records: Sequence[Mapping[str, Any]], further: Sequence[str] = ()) -> dict[str, float]:
    """The figures of a task.

    Args:
        records: one per answer, grouped by prompt.
        further: names of figures, see :mod:`torchrl_llm.evaluation.figures`.

    Returns:
        ``accuracy`` (an answer without a valid reward is not correct), ``pass@k`` and
        ``majority@k`` for 2, 4, ... and all samples of a prompt, ``reward`` (mean of the valid
        ones), ``invalid``, ``truncated`` (fractions), ``response_length`` (mean tokens),
        ``num_prompts``, and the four accuracies of IFEval. After each figure that is an estimate,
        the ends of its 95 % confidence interval (``accuracy_low``, ``accuracy_high``): Wilson's, or
        a bootstrap over prompts.
    """
    prompts = defaultdict(list)
    for record in records:
        prompts[record["prompt"]].append(record)
    groups = list(prompts.values())
    right = [[bool(r["success"] and r["valid"]) for r in group] for group in groups]
    result = _bounded("accuracy", right, _of_flags)
    for name, values in figures_at_k(groups).items():
        result |= _bounded(name, [[value] for value in values], _of_shares)
    rewards = [[r["reward"] for r in group if r["valid"]] for group in groups]
    result |= _bounded("reward", rewards, _bootstrap)
    result |= {
        "invalid": _mean(not record["valid"] for record in records),
        "truncated": _mean(record["cut"] for record in records),
        "response_length": _mean(r["length"] for r in records if r["length"] is not None),
        "num_prompts": float(len(groups)),
    }
    scored = [r["scores"] for r in records if "scores" in r and r["valid"]]
    for name in scored[0] if scored else ():
        flags = [
            [f for r in group if "scores" in r and r["valid"] for f in r["scores"][name]]
            for group in groups
        ]
        result |= _bounded(name, flags, _of_flags)
    for name in further:
        found = [find("figures", name)(group) for group in groups]
        flags = all(isinstance(value, bool) for value in found)
        values = [[] if value is None else [value] for value in found]
        result |= _bounded(name.rpartition(":")[2], values, _of_flags if flags else _bootstrap)
    return result


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else nan


_Values = Sequence[Sequence[float]]  # the values of each prompt


def _bounded(name: str, values: _Values, find: Callable[[_Values], Interval]) -> dict[str, float]:
    """The mean of values grouped by prompt, and its 95 % confidence interval."""
    low, high = find(values)
    return {
        name: _mean(value for group in values for value in group),
        name + LOW: low.item(),
        name + HIGH: high.item(),
    }


def _bootstrap(values: _Values) -> Interval:
    """Bootstrap over prompts, because samples of one prompt are not independent trials."""
    totals = torch.tensor([float(sum(group)) for group in values])
    return bootstrap_interval(totals, torch.tensor([len(group) for group in values]))


def _of_shares(values: _Values) -> Interval:
    """The bootstrap; Wilson's interval if all prompts are correct, or none."""
    flat = {value for group in values for value in group}
    return _wilson(values) if flat in ({0}, {1}) else _bootstrap(values)


def _of_flags(values: _Values) -> Interval:
    """Wilson's interval if each prompt has one sample; otherwise the interval of shares."""
    once = all(len(group) <= 1 for group in values)
    return _wilson(values) if once else _of_shares(values)


def _wilson(values: _Values) -> Interval:
    counted = [fmean(group) for group in values if group]
    return wilson_interval(torch.tensor(sum(counted)), torch.tensor(len(counted)))


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """The figures of all tasks as a text table, with confidence intervals."""
    names = figure_names(results)
    rows = [[name, *(figure_text(name, each) for each in results.values())] for name in names]
    return text_table(rows, header=["", *results])

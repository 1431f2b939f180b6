"""Parts of evaluate.py: its configuration, the model that answers, and the figures.

Every figure is computed from the records that are also written to the files of answers, so that
anybody can check it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from server_policy import check_chat, server_policy

from torchrl_llm._checked import Gt
from torchrl_llm._registry import find
from torchrl_llm._settings import Count, Group, ensure, naming, own, several
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.transforms import ContextLimit
from torchrl_llm.errors import WorkerError
from torchrl_llm.evaluation import answer_record, evaluate, pass_at_k
from torchrl_llm.functional import Interval, bootstrap_interval, wilson_interval
from torchrl_llm.modules import (
    ChatServerPolicy,
    LLMWrapperBase,
    TransformersWrapper,
    load_model,
    vLLMWrapper,
)
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.modules.policies.chat_server import RESERVED
from torchrl_llm.recipes import AgentConfig, ModelConfig, RewardComponentsConfig
from torchrl_llm.recipes.builders import make_tokenizer, present_device
from torchrl_llm.recipes.data_config import ROWS, DataConfig
from torchrl_llm.recipes.groups import check_device
from torchrl_llm.recipes.reward_config import add_components, make_reward
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.tasks import check_options, check_task, task_class
from torchrl_llm.trainers.results import text_table
from torchrl_llm.trainers.run_folder import model_folder

_LOW, _HIGH = "_low", "_high"
_URL = "inference_model.url"
# Keys that only one kind of what answers has.
_KEYS = {
    "transformers": ("device", "dtype"),
    "vllm": ("dtype", "num_devices", "gpu_memory_utilization", "max_model_len"),
    "url": ("protocol", "served_model", "api_key_variable", "request_timeout_s", "request"),
}
# The hub's IFEval is all for evaluation, and has one split of this name.
_SPLITS = {"ifeval": "train"}
# Where nothing else ends a conversation.
_MOST_TURNS = 64


class SamplerConfig(Group, key="inference_model"):
    """What answers, and how.

    Attributes:
        backend: ``transformers``, or ``vllm`` for an engine of this process.
        dtype: of the weights; ``auto`` is bfloat16 on CUDA and float32 elsewhere.
        device: of the weights; ``auto`` for CUDA where there is one.
        max_tokens: tokens a response may have.
        temperature: of sampling; 0 for the most probable token each time.
        top_p: draw from the fewest tokens that reach this probability; 1 for all.
        top_k: draw from so many of the most probable tokens; 0 for all.
        min_p: draw from tokens at least this probable, relative to the most probable; 0 for all.
        num_devices: GPUs of the engine (tensor parallel).
        gpu_memory_utilization: fraction of a GPU's memory that the engine may take.
        max_model_len: most tokens of prompt and response.
        url: a server that answers, instead of a model of this process: ``http://host:port``.
        protocol: how it is asked: by ``tokens``, encoded here with the tokenizer of ``model.name``,
            or by ``chat`` completions, its own template and text; ``auto`` finds out.
        served_model: name of the model at the server; ``None`` for its only one.
        api_key_variable: environment variable that holds the key, so that no file does.
        request_timeout_s: most seconds for one answer.
        request: further fields of each chat request; ``null`` leaves one out that would be sent.
    """

    backend: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    num_devices: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    url: str | None = None
    protocol: Literal["auto", "tokens", "chat"] = "auto"
    served_model: str | None = None
    api_key_variable: str | None = None
    request_timeout_s: Annotated[float, Gt(0)] = 600.0
    request: dict[str, Any] = own()

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.url is None or self.backend == "transformers",
            f"inference_model.backend has no effect with {_URL}: the server answers",
        )
        ensure(
            not (self.request and self.protocol == "tokens"),
            "inference_model.request has no effect with inference_model.protocol=tokens",
        )
        reserved = sorted(RESERVED & set(self.request))
        ensure(not reserved, f"inference_model.request: {reserved} are not the user's to set")
        with naming("inference_model"):
            SamplingParams(**self.arguments)
        check_device(self.device, "inference_model.device")
        kind = self.backend if self.url is None else "url"
        for key in fields(self):
            owners = [each for each, names in _KEYS.items() if key.name in names]
            default = {} if key.default is MISSING else key.default
            said = f"with inference_model.backend={kind}" if self.url is None else f"with {_URL}"
            ensure(
                not owners or kind in owners or getattr(self, key.name) == default,
                f"inference_model.{key.name} has no effect "
                + (f"without {_URL}" if owners == ["url"] else said),
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of generation."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }


class RunConfig(Group, key="eval"):
    """How much is asked.

    Attributes:
        num_prompts: prompts of each task, from the start of its data; ``None`` for all.
        batch_size: responses that are written together.
        split: of the tasks that have data of their own; ``None`` for the held-out one.
        repeats: samples a prompt; several, with a temperature above 0, for pass@k.
        max_steps: steps of an episode; ``None`` for the task's own limit.
        on_overlong: what becomes of a prompt that is longer than the context allows: an error, a
            prompt that is not answered, or one cut from the left.
        figures: further ones (``torchrl-llm list figures``), or ``module:function`` of your own.
    """

    num_prompts: Count | None = None
    batch_size: Count = 64
    repeats: Count = 1
    split: str | None = None
    max_steps: Count | None = None
    on_overlong: Literal["error", "drop", "truncate"] = "error"
    figures: list[str] = several()

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming("eval.figures"):
            for name in self.figures:
                find("figures", name)


class EvaluateConfig(Group):
    """The whole configuration.

    Attributes:
        seed: of sampling.
        agent: who answers, in every task.
        tasks: names of tasks, see :data:`~torchrl_llm.recipes.tasks.TASKS`.
        data_files: file of each task; those without one have data of their own.
        options: settings of each task, and its ``system_prompt`` if not its own.
        data: rows of one's own, for the task ``rows``: those of ``eval_source`` or ``eval_split``
            if one is given, else those of ``source``.
        reward: instead of the tasks' own.
    """

    seed: int = 0
    agent: AgentConfig
    tasks: list[str] = several("gsm8k", "ifeval", "humaneval")
    data_files: dict[str, str | None] = own(gsm8k=None, ifeval=None, humaneval=None)
    options: dict[str, dict[str, Any]] = own(
        gsm8k=own(answer_format="tags"),
        ifeval=own(scored_part="response"),
    )
    data: DataConfig
    reward: RewardComponentsConfig
    model: ModelConfig
    inference_model: SamplerConfig
    eval: RunConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming(f"agent={self.agent.type}"):
            self.agent.build()
        ensure(bool(self.tasks), "tasks is empty: there is nothing to evaluate on")
        twice = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        ensure(not twice, f"tasks names {twice} more than once: the answers have one file a task")
        for name in (*self.tasks, *self.data_files, *self.options):
            check_task(name)
        ensure(
            (ROWS in self.tasks) == (self.data.source is not None),
            "tasks=[rows] and data=FILE go together: the rows of the file are the task",
        )
        ensure(
            ROWS not in self.tasks or bool(self.reward.function or self.reward.components),
            "rows of your own need a reward: reward=FILE.py:FUNCTION, or the name of one",
        )
        for task, options in self.options.items():
            own = {name: value for name, value in options.items() if name != "system_prompt"}
            check_options(task, own, path=f"options.{task}")
        if self.inference_model.protocol == "chat":
            check_chat(self, "inference_model.protocol=chat")
        without = [name for name in self.tasks if name == ROWS or self.data_files.get(name)]
        ensure(
            self.eval.split is None or len(without) < len(self.tasks),
            f"eval.split has no effect: the rows of {', '.join(without)} are those of files",
        )
        ensure(
            self.eval.repeats == 1 or self.inference_model.temperature > 0,
            "eval.repeats has no effect with inference_model.temperature=0: all samples are equal",
        )


def load_config(values: Mapping[str, Any]) -> EvaluateConfig:
    """The configuration, checked; the folder of a run stands for its newest checkpoint.

    Raises:
        ConfigError: what it says cannot be.
    """
    config = from_mapping(EvaluateConfig, values)
    if config.model.name is not None and (path := Path(config.model.name)).is_dir():
        with naming("model.name"):
            config.model.name = str(model_folder(path))
    return config


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
        "generate_kwargs": wanted.arguments,
    }
    if wanted.backend == "vllm":
        engine = {name: getattr(wanted, name) for name in _KEYS["vllm"] if name != "dtype"}
        backend = VLLMBackend(config.model.name, tokenizer=tokenizer, dtype=dtype, **engine)
        return vLLMWrapper(backend, **options)
    return TransformersWrapper(
        load_model(config.model.name, dtype=dtype, device=device).eval(), **options
    )


def make_env(config: EvaluateConfig, task: str, tokenizer: Any) -> TaskEnv:
    """The held-out prompts of a task, in the order of its data."""
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
    with naming(f"agent={config.agent.type}"):
        config.agent.build().wrap(env)
    alone = task == ROWS and config.reward.function is None  # the components are the reward
    return env if alone else add_components(env, config.reward.components)


def answer_task(
    config: EvaluateConfig, task: str, policy: LLMWrapperBase | ChatServerPolicy, path: Path
) -> list[dict]:
    """Answer the prompts of a task, and write each answer as soon as it is there.

    Args:
        config: the recipe's.
        task: its name.
        policy: what answers.
        path: of the file of answers, JSON lines.

    Returns:
        The records that were written.
    """
    with_ids = isinstance(policy, LLMWrapperBase)
    env = make_env(config, task, policy.tokenizer if with_ids else None)
    # A model at a server was never trained on the task, whatever its name here.
    is_told = config.model.is_told_of_tools if with_ids else config.model.show_tools is not False
    told: dict[str, Any] = {}
    if is_told and (schemas := env.tool_schemas):
        told["tools"] = schemas  # whoever learns from the answers has to be told, too
        policy = policy.get_new_version(tools=schemas)
    if with_ids:
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
    """How often the model can be asked in an episode of a task."""
    task = task_class(name)
    own, turns = task.MAX_AUXILIARY_TURNS, task.max_turns(config.eval.max_steps) or _MOST_TURNS
    return -(-turns // (1 + own)) * (1 + config.agent.build().auxiliary_turns(own))


def figures(records: Sequence[Mapping[str, Any]], further: Sequence[str] = ()) -> dict[str, float]:
    """The figures of a task.

    Args:
        records: one an answer; those of a prompt follow each other.
        further: names of figures, see :mod:`torchrl_llm.evaluation.figures`.

    Returns:
        ``accuracy`` (an answer without a valid reward is not right), ``pass@k`` for the samples of
        a prompt, ``reward`` (mean of the valid ones), ``invalid``, ``truncated`` (fractions),
        ``response_length`` (mean tokens), ``num_prompts``, and the four accuracies of IFEval.
        After each figure that is an estimate, the ends of its 95 % confidence interval
        (``accuracy_low``, ``accuracy_high``): Wilson's, or a bootstrap over prompts.
    """
    prompts = defaultdict(list)
    for record in records:
        prompts[record["prompt"]].append(record)
    groups = list(prompts.values())
    right = [[bool(r["success"] and r["valid"]) for r in group] for group in groups]
    samples = min(map(len, groups))
    result = _bounded("accuracy", right, _of_flags)
    if samples > 1:
        chances = [pass_at_k(sum(each), len(each), samples) for each in right]
        result |= _bounded(f"pass@{samples}", [[chance] for chance in chances], _of_shares)
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


_Values = Sequence[Sequence[float]]  # what belongs to each prompt


def _bounded(name: str, values: _Values, find: Callable[[_Values], Interval]) -> dict[str, float]:
    """The mean of what belongs to prompts, and the 95 % confidence interval that is found."""
    low, high = find(values)
    return {
        name: _mean(value for group in values for value in group),
        name + _LOW: low.item(),
        name + _HIGH: high.item(),
    }


def _bootstrap(values: _Values) -> Interval:
    """Of any numbers: whole prompts are drawn, for samples of one are no independent trials."""
    totals = torch.tensor([float(sum(group)) for group in values])
    return bootstrap_interval(totals, torch.tensor([len(group) for group in values]))


def _of_shares(values: _Values) -> Interval:
    """The bootstrap; Wilson's where it sees no spread because all prompts are right, or none is."""
    flat = {value for group in values for value in group}
    return _wilson(values) if flat in ({0}, {1}) else _bootstrap(values)


def _of_flags(values: _Values) -> Interval:
    """Wilson's where each prompt counts once, as right or wrong; otherwise that of shares."""
    once = all(len(group) <= 1 for group in values)
    return _wilson(values) if once else _of_shares(values)


def _wilson(values: _Values) -> Interval:
    counted = [fmean(group) for group in values if group]
    return wilson_interval(torch.tensor(sum(counted)), torch.tensor(len(counted)))


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """The figures of all tasks, for people; a confidence interval next to its figure."""
    names = list(dict.fromkeys(name for result in results.values() for name in result))
    names = [name for name in names if name.removesuffix(_LOW).removesuffix(_HIGH) == name]
    rows = [[name, *(_figure(name, result) for result in results.values())] for name in names]
    return text_table(rows, header=["", *results])


def _figure(name: str, result: Mapping[str, float]) -> str:
    if name not in result:
        return ""
    if name == "num_prompts":
        return f"{result[name]:.0f}"
    low = result.get(name + _LOW, nan)
    known = "" if isnan(low) else f" ({low:.4f} to {result[name + _HIGH]:.4f})"
    return f"{result[name]:.4f}{known}"

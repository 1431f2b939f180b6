"""Keys of evaluate.py: the model, the number of prompts, and the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from torchrl_llm._checked import Gt
from torchrl_llm._registry import find
from torchrl_llm._settings import Count, Group, ensure, naming, own, several
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.policies.chat_server import RESERVED
from torchrl_llm.recipes import AgentConfig, ModelConfig, RewardComponentsConfig
from torchrl_llm.recipes.data_config import ROWS, DataConfig
from torchrl_llm.recipes.groups import check_device
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.tasks import check_options, check_task
from torchrl_llm.trainers.run_folder import model_folder

_URL = "inference_model.url"
_ENGINE = ("num_devices", "gpu_memory_utilization", "max_model_len")
# Keys that only one kind of sampler reads.
_KEYS = {
    "transformers": ("device", "dtype"),
    "vllm": ("dtype", *_ENGINE),
    "url": ("protocol", "served_model", "api_key_variable", "request_timeout_s", "request"),
}


class SamplerConfig(Group, key="inference_model"):
    """Sampler of the answers.

    Attributes:
        backend: ``transformers``, or ``vllm`` for an engine of this process.
        dtype: type of the weights; ``auto`` is bfloat16 on CUDA and float32 elsewhere.
        device: device of the weights; ``auto`` for CUDA if available.
        max_tokens: tokens that a response may have.
        temperature: sampling temperature; 0 for the most probable token each time.
        top_p: sample from the smallest set of most probable tokens with this total probability; 1
            for all tokens.
        top_k: sample from this number of most probable tokens; 0 for all tokens.
        min_p: sample from tokens with at least this probability relative to the most probable
            token; 0 for all tokens.
        stop: texts that end a response, for a model that does not end its turn itself.
        num_devices: GPUs of the engine (tensor parallel).
        gpu_memory_utilization: fraction of a GPU's memory that the engine may use.
        max_model_len: most tokens of prompt and response.
        url: a server that replaces a model in this process: ``http://host:port``.
        protocol: protocol of the server: ``tokens``, with prompts that are encoded in this process
            by the tokenizer of ``model.name``; or ``chat`` completions, with the server's template
            and text; ``auto`` detects it.
        served_model: name of the model at the server; ``None`` if the server has only one.
        api_key_variable: environment variable with the key, so that no file contains it.
        request_timeout_s: most seconds for one answer.
        request: further fields of each chat request; ``null`` removes a default field.
    """

    backend: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] = several()
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
        self.only("request", self.protocol != "tokens", "with inference_model.protocol=tokens")
        reserved = sorted(RESERVED & set(self.request))
        ensure(not reserved, f"inference_model.request: {reserved} are not the user's to set")
        with naming("inference_model"):
            SamplingParams(**self.arguments, stop=tuple(self.stop))
        check_device(self.device, "inference_model.device")
        kind = self.backend if self.url is None else "url"
        for key in fields(self):
            owners = [each for each, names in _KEYS.items() if key.name in names]
            said = f"with inference_model.backend={kind}" if self.url is None else f"with {_URL}"
            where = f"without {_URL}" if owners == ["url"] else said
            self.only(key.name, not owners or kind in owners, where)

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

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of an engine of vLLM besides its dtype."""
        return {name: getattr(self, name) for name in _ENGINE}


class RunConfig(Group, key="eval"):
    """Number of prompts and samples.

    Attributes:
        num_prompts: prompts of each task, from the start of its data; ``None`` for all.
        batch_size: responses that are generated together.
        split: split for tasks with their own data; ``None`` for the held-out split.
        repeats: samples per prompt; for pass@k more than 1, with a temperature above 0.
        max_steps: steps of an episode; ``None`` for the task's own limit.
        on_overlong: treatment of a prompt that is too long for the context: raise an error, do not
            answer it, or cut it from the left.
        figures: further figures (``torchrl-llm list figures``), or ``module:function`` of your own.
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
        seed: seed of sampling.
        agent: the agent, for every task.
        tasks: names of tasks (``torchrl-llm list tasks``).
        data_files: file per task; tasks without a file use their own data. For a task
            ``FILE.py:CLASS`` the key is the name of the class, also in ``options``.
        options: settings per task; ``system_prompt`` replaces the task's system prompt.
        data: your own rows, for the task ``rows``: the rows of ``eval_source`` or ``eval_split`` if
            one is given, else the rows of ``source``.
        reward: replaces the tasks' own rewards.
    """

    seed: int = 0
    agent: AgentConfig
    tasks: list[str] = several("gsm8k", "ifeval", "humaneval")
    data_files: dict[str, str | None] = own(gsm8k=None, ifeval=None, humaneval=None)
    options: dict[str, dict[str, Any]] = own(
        gsm8k=own(answer_format="tags"), ifeval=own(scored_part="response")
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
        for name in self.tasks:
            check_task(name)
        for given in (self.data_files, self.options):
            given |= {task: given.pop(name) for name, task in self._classes() if name in given}
            for name in given:
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
        kind = self.inference_model.backend
        kind = f"backend={kind}" if self.inference_model.url is None else "url"
        where = f"with inference_model.{kind}; backend=transformers can have it"
        self.model.only("quantization", kind == "backend=transformers", where)
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

    def _classes(self) -> list[tuple[str, str]]:
        return [(task.rpartition(":")[2], task) for task in self.tasks if ":" in task]


def check_chat(config: EvaluateConfig, why: str) -> None:
    """Reject settings without effect if a server encodes the prompts.

    Args:
        config: configuration of the recipe.
        why: reason for chat completions, for the error.

    Raises:
        ConfigError: a key for prompts that this process encodes is set.
    """
    for name in ("name", "chat_template_name", "template_kwargs"):
        value = getattr(config.model, name)
        ensure(
            not value,
            f"model.{name}={value} has no effect on chat completions ({why}). Leave it out: the "
            "server has a template and a tokenizer of its own",
        )
    ensure(
        config.eval.on_overlong != "truncate",
        f"eval.on_overlong=truncate cannot be with chat completions ({why}), where the server "
        "encodes the prompt; choose error or drop",
    )


def load_config(values: Mapping[str, Any]) -> EvaluateConfig:
    """Check and return the configuration; the folder of a run means its newest checkpoint.

    Raises:
        ConfigError: invalid settings.
    """
    config = from_mapping(EvaluateConfig, values)
    if config.model.name is not None and (path := Path(config.model.name)).is_dir():
        with naming("model.name"):
            config.model.name = str(model_folder(path))
    return config

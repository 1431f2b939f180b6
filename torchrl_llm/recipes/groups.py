"""Groups of a recipe's keys: task, models, loop, optimizer, engine, weights, Ray.

The groups that make the algorithm (loss, advantage, reward, ...) are in
:mod:`torchrl_llm.recipes.objective_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch

from torchrl_llm._checked import Ge, Gt, In
from torchrl_llm._registry import find
from torchrl_llm._settings import Count, Group, ensure, naming, own, several
from torchrl_llm.collectors.staleness import StalenessRule
from torchrl_llm.data.overlong import LengthRule, OnOverlong
from torchrl_llm.data.row_files import Row, load_rows
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.continued_adapter import find_adapter
from torchrl_llm.modules.quantization import Bits
from torchrl_llm.recipes.data_config import ReadsOnce
from torchrl_llm.recipes.tasks import check_options, check_task, check_tools
from torchrl_llm.trainers.optim import check_schedule
from torchrl_llm.trainers.optimizers import check_optimizer


class EnvConfig(ReadsOnce, key="env"):
    """Task and prompts.

    Attributes:
        dataset: name of the task (``torchrl-llm list tasks``), or your own ``module:class``.
        data_files: CSV, JSON, JSON-lines or Parquet file (``.gz`` too) with the training problems;
            ``None`` for the task's own source (a generator, or the hub).
        eval_data_files: file with the held-out problems; ``None`` for the task's own held-out
            problems, or, with ``data_files``, for the last ``eval.num_prompts`` problems of that
            file, which are then not trained on.
        repeats: samples per prompt, which is the size of a group; 1 if ``advantage`` compares no
            samples.
        options: settings of the task itself: arguments of its class (the ``difficulty`` of
            ``letter_counting``, for instance); settings that are not given keep the defaults of the
            class.
        system_prompt: first message of every conversation; ``None`` for the task's own.
        max_steps: most steps of an episode; turns that only call thinking tools do not count;
            ``None`` for the task's own limit.
        tools: tools in addition to the task's tools: names of registered tools, or
            ``"module:name"`` of a :class:`~torchrl_llm.tools.Tool` (a class without required
            arguments, or an instance) or of a function with type hints and a docstring.
        max_tool_turns: most turns in a row that only call ``tools``; each is a turn of the model,
            but not a step of the episode.
        max_prompt_length: tokens that a prompt may have; ``None`` for the model's context less
            ``inference_model.max_tokens``.
        on_overlong: treatment of an episode whose first prompt is longer: raise an error, neither
            answer nor train the row, or cut the prompt from the left. ``train/overlong`` counts
            them. A conversation that grows longer ends its episode (``train/out_of_context``).
    """

    dataset: str = "arithmetic"
    data_files: str | None = None
    eval_data_files: str | None = None
    options: dict[str, Any] = own()
    system_prompt: str | None = None
    repeats: Count = 8
    max_steps: Count | None = None
    tools: list[str] = several()
    max_tool_turns: Count = 4
    max_prompt_length: int | None = None
    on_overlong: OnOverlong = "error"

    def load(self, path: str, columns: Sequence[str]) -> Sequence[Row]:
        """The rows of ``data_files`` or ``eval_data_files``.

        Args:
            path: one of the two.
            columns: columns that rows must have.

        Raises:
            DataError: missing or malformed data.
        """
        return self.once(path, lambda: load_rows(Path(path), columns=columns))

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming("env.dataset"):
            check_task(self.dataset)
        check_options(self.dataset, self.options)
        where = "without env.tools; a task's own tools have a limit of their own"
        self.only("max_tool_turns", bool(self.tools), where)
        check_tools(self.tools)


def check_device(name: str, key: str) -> None:
    """Reject an invalid name of a device, independent of the devices of this machine.

    Args:
        name: as ``torch.device`` takes it, or ``auto``.
        key: dotted key of the setting.

    Raises:
        ConfigError: unknown kind of device.
    """
    try:
        known = name == "auto" or torch.device(name).type != "meta"
    except RuntimeError:
        known = False
    ensure(known, f"{key} must be auto, cpu, cuda, cuda:0 or another device of torch, got {name!r}")


_TEMPLATE_OWN = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}


class ModelNameConfig(Group, key="model"):
    """The model.

    Attributes:
        name: a folder or a hub name; ``None`` for the model that ships with the package.
        quantization: round the weights of linear layers to ``4bit`` or ``8bit`` while reading them
            (needs the extra ``quantization``); such a model is trained by LoRA adapters.
            Checkpoints hold only the adapter. ``None`` for unchanged weights.
        chat_template_name: a family of templates to use instead of the tokenizer's own.
        template_kwargs: variables of the template by name, ``enable_thinking: false`` for example.
    """

    name: str | None = None
    quantization: Bits | None = None
    chat_template_name: str | None = None
    template_kwargs: dict[str, Any] = own()

    def __post_init__(self) -> None:
        super().__post_init__()
        own = _TEMPLATE_OWN & set(self.template_kwargs)
        ensure(
            not own,
            f"model.template_kwargs cannot set {', '.join(sorted(own))}, which a run sets itself",
        )

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of a policy or a formatter for the template and its variables."""
        return {
            "chat_template_name": self.chat_template_name,
            "template_kwargs": self.template_kwargs or None,
        }


class ModelConfig(ModelNameConfig):
    """The policy.

    Attributes:
        show_tools: whether the prompt describes the task's tools, in the format of the chat
            template; ``None`` means only if ``name`` is given. The model that ships with the
            package, and models trained from it, know their tool without a description.
    """

    show_tools: bool | None = None

    @property
    def is_told_of_tools(self) -> bool:
        """Whether the prompt describes the tools of a task with tools."""
        return self.name is not None if self.show_tools is None else self.show_tools


class ForwardConfig(Group, key="train"):
    """How the trained model computes rows, in any recipe.

    Attributes:
        micro_token_budget: most tokens in one forward, with the padding if ``packing`` is
            ``padded``; ``None`` for no limit. It changes memory and speed, but not the result.
        packing: how rows of different length are laid out in a forward (``padded``: all padded to
            the longest; ``bucketed``: several forwards of rows of similar length; ``packed``: one
            row after the other without padding; ``shared``: as ``packed``, with the prompt of a
            group only once; ``auto``: the cheapest that the model supports). It changes memory and
            speed, but not the result.
        max_seq_len: tokens that a row may have: prompt, turns and tools together; ``None`` for no
            limit (in supervised training, for the model's context).
        on_overlong: treatment of a longer row: raise an error that names it, do not train it, or
            cut off its end. ``train/overlong_rows`` counts them (in supervised training,
            ``train/overlong``).
        kl_to_ref_coeff: weight of the KL divergence from ``ref_model`` in the loss; 0 for none.
        mixed_precision: ``bfloat16`` autocast over the master weights, ``float32``, or ``auto``:
            bfloat16 on CUDA, float32 elsewhere.
        device: ``auto`` for CUDA if available.
        num_threads: threads of torch on the CPU; ``None`` for torch's choice, or 1 for the model
            that ships with the package and for similarly small models in a folder, because a second
            thread makes them little faster, and busy-waits if cores are shared.
        parallel: how the processes that ``torchrun`` starts train together (``ddp``: each has the
            whole model; ``fsdp2``: each has a part of the weights, gradients and optimizer;
            ``none``: one process). All numbers of rows and prompts are totals over all processes.
        gathers: with ``fsdp2``, the weights that a process gathers to sample or score (``layer``:
            one layer at a time, and all processes wait at each layer of each token; ``model``: all
            layers, from their first use to the next update).
        timeout_s: most seconds that a process waits for the others.
    """

    micro_token_budget: Count | None = 16384
    packing: Literal["auto", "padded", "bucketed", "packed", "shared"] = "auto"
    max_seq_len: Annotated[int, Ge(2)] | None = None
    on_overlong: OnOverlong = "error"
    kl_to_ref_coeff: Annotated[float, Ge(0)] = 0.0
    mixed_precision: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    num_threads: Count | None = None
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    gathers: Literal["layer", "model"] = "layer"
    timeout_s: Annotated[float, Ge(1)] = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "with train.parallel=none: no process waits for another"
        self.only("timeout_s", self.parallel != "none", where)
        whole = f"with train.parallel={self.parallel}: each process has all weights"
        self.only("gathers", self.parallel == "fsdp2", whole)
        check_device(self.device, "train.device")


class TrainConfig(ForwardConfig):
    """The training loop.

    Attributes:
        max_steps: training steps; each collects one batch and makes ``epochs`` passes over it.
        prompts_per_batch: distinct prompts per step; each gets ``env.repeats`` responses.
        epochs: passes over a batch.
        optim_batch_size: responses per optimizer step; ``None`` for the whole batch.
        no_signal_steps: number of consecutive steps with only equal rewards after which a message
            reports this, with two answers; ``None`` for never.
    """

    max_steps: Count = 100
    prompts_per_batch: Count = 16
    epochs: Count = 1
    optim_batch_size: Count | None = None
    no_signal_steps: Count | None = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.max_seq_len is not None or self.on_overlong == "error",
            f"train.on_overlong={self.on_overlong} has no effect without train.max_seq_len; "
            "env.on_overlong is about prompts",
        )

    @property
    def length_rule(self) -> LengthRule | None:
        """The rule from ``max_seq_len`` and ``on_overlong``; ``None`` for any length."""
        if self.max_seq_len is None:
            return None
        return LengthRule(max_seq_len=self.max_seq_len, on_overlong=self.on_overlong)


_USUAL_LORA = {"r": 8, "alpha": 16}


class LoraConfig(Group, key="train_model.lora"):
    """LoRA adapters (needs the extra ``peft``); the other keys have an effect only when enabled.

    Attributes:
        enabled: train adapters, and keep the model's own weights unchanged.
        r: rank; ``None`` for 8, or for the rank of the adapter that ``model.name`` names.
        alpha: scale, applied as ``alpha / r``; ``None`` for 16, or for the scale of that adapter.
        dropout: dropout rate of the adapters' input.
        target_modules: names of the linear layers, or a regular expression of whole names; ``None``
            for all but the head, or for the layers of that adapter.
    """

    enabled: bool = False
    r: Count | None = None
    alpha: int | None = None
    dropout: float = 0.0
    target_modules: list[str] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.enabled
            or all(
                getattr(self, f.name) in (f.default, _USUAL_LORA.get(f.name)) for f in fields(self)
            ),
            "keys of train_model.lora have no effect without train_model.lora.enabled=true",
        )

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Argument ``lora`` of :func:`~torchrl_llm.modules.load_model`."""
        if not self.enabled:
            return None
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.target_modules or "all-linear",
        }

    def settle(self, model: ModelNameConfig) -> None:
        """Choose missing values: from a loaded adapter that is trained further, or the defaults.

        Args:
            model: the trained model.

        Raises:
            ConfigError: a key contradicts the adapter.
        """
        if not self.enabled:
            return
        with naming("model.name"):
            adapter = find_adapter(model.name)
        for name, key in (("r", "r"), ("alpha", "lora_alpha"), ("target_modules",) * 2):
            wanted = getattr(self, name)
            there = _USUAL_LORA.get(name) if adapter is None else adapter.config.get(key)
            there = sorted(there) if isinstance(there, list) else there
            if wanted is None:
                setattr(self, name, there)
            elif adapter is not None:
                ensure(
                    not adapter.changed({key: wanted}),
                    f"train_model.lora.{name}={wanted} contradicts model.name={model.name}, an "
                    f"adapter with {there!s:.120}: leave the key out, or begin another on "
                    f"model.name={adapter.base}",
                )


class TrainModelConfig(Group, key="train_model"):
    """How the policy is stored for training.

    Attributes:
        dtype: type of the weights.
        gradient_checkpointing: compute activations again in the backward instead of keeping them:
            slower, but needs less memory.
        offload_activations: keep the activations for the backward in CPU memory, and copy them back
            when the backward needs them; gradients are the same.
        attn_implementation: attention kernel, by its name in ``transformers``; ``None`` for the
            choice of ``transformers``.
        logprob_chunk_size: largest number of logits in memory at once: tokens times vocabulary
            entries; ``None`` to choose by device.
        lora: adapters.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    attn_implementation: str | None = None
    logprob_chunk_size: int | None = None
    lora: LoraConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "with train_model.gradient_checkpointing=true, which keeps hardly any: choose one"
        self.only("offload_activations", not self.gradient_checkpointing, where)


class InferenceModelConfig(Group, key="inference_model"):
    """How responses are sampled; the sampler shares the policy's weights.

    With ``top_p``, ``top_k`` or ``min_p`` the rows keep the candidate ids of each token, and losses
    score over these candidates: ratios refer to the distribution that was sampled.

    Attributes:
        max_tokens: tokens that a response may have.
        temperature: sampling temperature; recorded with every row and applied when it is scored.
        top_p: sample from the smallest set of most probable tokens with this total probability; 1
            for all tokens.
        top_k: sample from this number of most probable tokens; 0 for all tokens.
        min_p: sample from tokens with at least this probability relative to the most probable
            token; 0 for all tokens.
    """

    max_tokens: Count = 32
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.temperature > 0,
            "inference_model.temperature must be above 0, for a greedy group has no variance; "
            f"got {self.temperature}",
        )
        with naming("inference_model"):
            SamplingParams(**self.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of generation."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "record_support": self.top_p < 1 or self.top_k > 0 or self.min_p > 0,
        }


class RefModelConfig(Group, key="ref_model"):
    """The reference of the KL terms (``train.kl_to_ref_coeff``, ``reward.kl_coeff``).

    Attributes:
        name: folder or hub name; ``None`` for the policy as it was before training. With LoRA this
            needs no second model: it is the policy with its adapters disabled, or with the adapter
            that ``model.name`` names.
        num_devices: GPUs only for the reference (0: it shares the policy's GPU; 1: it is on the GPU
            after the policy's).
    """

    name: str | None = None
    num_devices: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.num_devices in (0, 1),
            f"ref_model.num_devices must be 0 or 1, got {self.num_devices}",
        )


class LearningRates(NamedTuple):
    """Default learning rates of AdamW.

    A model with a third of a million parameters needs a hundred times the rate of a model with half
    a billion.

    Attributes:
        embedded: rate for the model that ships with the package.
        lora: rate for adapters.
        usual: rate for all weights of other models.
    """

    embedded: float
    lora: float
    usual: float


REINFORCEMENT_RATES = LearningRates(4e-4, 1e-5, 1e-6)
"""Rates of the recipes whose models learn from rewards."""

SUPERVISED_RATES = LearningRates(1e-3, 1e-4, 1e-5)
"""Rates of supervised fine-tuning, whose gradients are less noisy."""


_ARGUMENTS = ("weight_decay", "eps", "betas", "momentum")


class OptimizerConfig(Group, key="optimizer"):
    """Optimizer and schedule.

    Attributes:
        name: a class of ``torch.optim``, or ``"module:Class"`` of a different package or your own,
            for example ``bitsandbytes.optim:AdamW8bit``. ``Muon`` updates the matrices of the
            layers, and AdamW all other parameters.
        lr: learning rate; 0 runs everything without changing weights; ``None`` chooses by model,
            see ``REINFORCEMENT_RATES`` and ``SUPERVISED_RATES``.
        weight_decay: ``None`` for the optimizer's default.
        eps: ``None`` for the optimizer's default.
        betas: ``None`` for the optimizer's default.
        momentum: ``None`` for the optimizer's default.
        options: further arguments of the class, by name.
        on_cpu: keep the optimizer's states in CPU memory, and update there.
        clip_grad_norm: bound on the norm of the gradient; ``None`` for none.
        scheduler: ``constant``; or ``linear`` or ``cosine``, which fall to zero at the end of the
            run; see ``SCHEDULES``.
        warmup_steps: optimizer steps during which the learning rate rises linearly; a number below
            1 is a share of the run.
    """

    name: str = "AdamW"
    lr: Annotated[float, Ge(0)] | None = 1e-5
    weight_decay: float | None = 0.0
    eps: float | None = None
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    options: dict[str, Any] = own()
    on_cpu: bool = False
    clip_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    scheduler: str = "constant"
    warmup_steps: Annotated[int | float, Ge(0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.scheduler)
        names = {"params", *(entry.name for entry in fields(OptimizerConfig))}
        taken = sorted(names & self.options.keys())
        ensure(not taken, f"optimizer.options cannot hold {', '.join(taken)}: keys of their own")
        given = (name for name in _ARGUMENTS if getattr(self, name) is not None)
        check_optimizer(self.name, [*given, *self.options])

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`~torchrl_llm.trainers.optimizers.make_optimizer`."""
        names = ("name", "lr", "on_cpu", *_ARGUMENTS)
        return {name: getattr(self, name) for name in names} | self.options

    def settle(
        self,
        model: ModelNameConfig,
        train_model: TrainModelConfig,
        rates: LearningRates = REINFORCEMENT_RATES,
    ) -> None:
        """Choose the learning rate if none is given.

        Args:
            model: the trained model.
            train_model: its settings, which tell whether LoRA is used.
            rates: default rates of the recipe.
        """
        if self.lr is None:
            usual = rates.lora if train_model.lora.enabled else rates.usual
            self.lr = rates.embedded if model.name is None else usual

    def check_warmup(self, num_updates: int) -> None:
        """Reject a warm-up that is longer than the run.

        Args:
            num_updates: optimizer steps of the whole run.

        Raises:
            ConfigError: the learning rate would never be reached.
        """
        ensure(
            self.warmup_steps <= num_updates,
            f"optimizer.warmup_steps={self.warmup_steps} is above the {num_updates} optimizer "
            "steps of the run, which would never reach optimizer.lr; lower it, or raise "
            "train.max_steps",
        )

    @property
    def schedule(self) -> dict[str, Any]:
        """Arguments of :func:`~torchrl_llm.trainers.optim.make_scheduler`."""
        return {"name": self.scheduler, "warmup_steps": self.warmup_steps}


class EngineConfig(InferenceModelConfig):
    """Sampler and sampling; the keys of an engine have an effect only with ``backend=vllm``.

    Attributes:
        backend: ``transformers`` samples with the trained module (in the asynchronous recipe, each
            collector has a copy); ``vllm`` samples with an engine; or ``"module:class"`` of your
            own :class:`~torchrl_llm.modules.Backend`, which is constructed with ``model.name`` and
            the keyword ``tokenizer``.
        num_devices: GPUs of one engine (tensor parallel), each with its own process; on the CPU,
            number of processes.
        gpu_memory_utilization: fraction of a GPU's memory that an engine may use; ``None`` for
            vLLM's default. Lower it if trainer and engine share a GPU.
        enforce_eager: do not use CUDA graphs.
        enable_prefix_caching: compute the cache of a common beginning of prompts only once.
        enable_fp32_lm_head: compute logits in float32, whatever the type of the weights.
        max_model_len: most tokens of prompt and response; ``None`` for the model's context.
    """

    backend: str = "transformers"
    num_devices: Count = 1
    gpu_memory_utilization: Annotated[float, In("(0, 1]")] | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_fp32_lm_head: bool = False
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming("inference_model.backend"):
            find("backends", self.backend)
        for name in self.engine_options:
            where = f"with inference_model.backend={self.backend}"
            self.only(name, self.backend == "vllm", where)
        longest = self.max_model_len
        ensure(
            longest is None or longest > self.max_tokens,
            f"inference_model.max_model_len={longest} leaves no room for a prompt beside "
            f"inference_model.max_tokens={self.max_tokens}",
        )

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of :func:`~torchrl_llm.modules.backends.vllm.build_engine`."""
        others = {"backend", *(entry.name for entry in fields(InferenceModelConfig))}
        names = (entry.name for entry in fields(EngineConfig))
        return {name: getattr(self, name) for name in names if name not in others}


class SleepingEngineConfig(EngineConfig):
    """Sampler next to the trainer.

    Attributes:
        sleep: whether the vLLM engine frees all of its GPU memory while the trainer trains, and
            gets the weights when it wakes, for one GPU that cannot hold both. With
            ``weight_sync.type=shared`` it frees only its cache. On the CPU no memory is freed.
    """

    sleep: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"with inference_model.backend={self.backend}: only an engine of vLLM can sleep"
        self.only("sleep", self.backend == "vllm", where)


class WeightSyncConfig(Group, key="weight_sync"):
    """How an engine of this process gets the trained weights.

    Attributes:
        type: ``shared``: trainer and engine use one copy of the weights; ``load``: all weights are
            copied after each step; ``delta``: only changed weights are copied; ``adapter``: only
            the LoRA adapter is copied; ``files``: all weights are written to a folder, from which
            the engine reads; or ``"module:class"`` of your own updater, which is constructed with
            the engine's backend and the keywords ``model`` and ``canary``. ``auto``: ``adapter``
            with LoRA; ``shared`` on the CPU with ``inference_model.num_devices=1`` and without
            ``inference_model.sleep``; otherwise ``load``.
        verify: after each update compare the engine's log-probs of a few rows with the trainer's,
            and stop if they differ by more than rounding.
        fingerprint: with ``load``, hash all weights at each update; on the CPU this takes half the
            time of the copy, on a GPU the weights are first copied to the CPU.
        folder: with ``files``, the folder of the weights.
    """

    type: str = "auto"
    verify: bool = True
    fingerprint: bool = True
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_folder(self.type, self.folder)
        if self.type != "auto":
            with naming("weight_sync.type"):
                find("weights", self.type)
        ensure(
            self.fingerprint or self.type in ("auto", "load"),
            f"weight_sync.fingerprint=false has no effect with weight_sync.type={self.type}: "
            "delta finds by it what changed, the others do not hash all weights",
        )


def _check_folder(type_: str, folder: str | None) -> None:
    ensure(
        (type_ == "files") == (folder is not None),
        "weight_sync.folder goes with weight_sync.type=files, and that with a folder",
    )


class AsyncWeightSyncConfig(Group, key="weight_sync"):
    """How the collectors get the trained weights; a LoRA adapter is merged into the weights.

    Attributes:
        type: ``ray`` puts them into Ray's object store, one copy per machine; ``files`` into a
            folder that all machines see; ``nccl`` sends them from the trainer's GPU to the GPUs of
            the collectors, and ``ipc`` to collectors that share its GPU, both by vLLM's own weight
            transfer (not yet tested on a GPU).
        folder: with ``files``, the folder of the weights.
        in_flight: effect of new weights on running conversations (``wait``: all finish their
            current answer, then continue with the new weights; ``keep``: partial answers continue
            with the new weights, and each token records its version; ``abort``: they are dropped,
            and new conversations begin).
        verify: as in the synchronous recipe; each collector compares its own engine. It has an
            effect only with ``inference_model.backend=vllm``.
    """

    type: Literal["ray", "files", "nccl", "ipc"] = "ray"
    folder: str | None = None
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    verify: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_folder(self.type, self.folder)


class AsyncTrainConfig(TrainConfig):
    """The training loop, with asynchronous collection of responses.

    Attributes:
        max_policy_age: number of updates of the weights that are allowed since a token was sampled.
        on_stale: action at the limit ``max_policy_age`` (``wait``: collectors wait; ``drop``: they
            continue, and older rows are dropped; ``mask``: they continue, and older tokens are not
            trained).
        weight_update_frequency: training steps between two updates of the collectors' weights.
    """

    max_policy_age: Annotated[int, Ge(0)] = StalenessRule.max_policy_age
    on_stale: Literal["wait", "drop", "mask"] = StalenessRule.on_stale
    weight_update_frequency: Count = 1

    @property
    def staleness(self) -> StalenessRule:
        """The rule from these keys."""
        return StalenessRule(max_policy_age=self.max_policy_age, on_stale=self.on_stale)


class AsyncTrainModelConfig(TrainModelConfig):
    """How the policy is stored for training, and the number of its own GPUs.

    Attributes:
        num_devices: with ``ray.address=null``, GPUs of this machine that no collector gets (1: the
            GPU of ``train.device`` is only for the policy; 0: the policy shares its GPU with
            collectors; then set ``ray.gpus_per_collector``, a fraction of 1, and
            ``inference_model.gpu_memory_utilization``). A running cluster already has its list of
            GPUs.
    """

    num_devices: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.num_devices in (0, 1),
            f"train_model.num_devices must be 0 or 1, got {self.num_devices}: the layers of a "
            "policy are not spread over GPUs",
        )


class RayConfig(Group, key="ray"):
    """Resources of the collectors.

    Attributes:
        address: address of a cluster, ``auto`` for this machine's cluster; ``None`` starts Ray only
            on this machine.
        num_cpus: CPUs for Ray with ``address=null``; ``None`` for all CPUs of the machine, or for
            the needed number if that is larger.
        num_collectors: collectors in parallel, each an actor with its own environments and sampler.
        prompts_per_claim: prompts that a collector answers at a time; ``None`` for an equal share
            of ``train.prompts_per_batch``.
        cpus_per_collector: CPUs per collector.
        gpus_per_collector: GPUs per collector; ``None`` for none on the CPU, and otherwise for
            ``inference_model.num_devices``. With 0, a collector samples on the CPU.
        max_restarts: maximum number of restarts of a collector that died.
        timeout_s: seconds without rows, or without a heartbeat, after which a collector is dropped.
    """

    address: str | None = None
    num_cpus: Count | None = None
    num_collectors: Count = 2
    prompts_per_claim: Count | None = None
    cpus_per_collector: Annotated[float, Ge(0)] = 1.0
    gpus_per_collector: Annotated[float, Ge(0)] | None = None
    max_restarts: Annotated[int, Ge(0)] = 3
    timeout_s: Annotated[float, Gt(0)] = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "with ray.address: the cluster knows its CPUs"
        self.only("num_cpus", self.address is None, where)

"""The configuration of the GRPO recipe: groups, defaults, and what cannot go together.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns what
Hydra composed (or any nested mapping) into :class:`GRPOConfig`; TorchRL's old names are refused
with the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from torchrl_llm.errors import ConfigError
from torchrl_llm.trainers.config import check_override_keys, from_mapping
from torchrl_llm.trainers.run import CheckpointConfig, EvalConfig, LoggingConfig

__all__ = ["RENAMED", "GRPOConfig", "check_arguments", "load_config"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(kw_only=True)
class EnvConfig:
    """Task and prompts.

    Attributes:
        dataset: name of the task.
        data_files: local JSON-lines file with the training problems; ``None`` for the task's own
            source (a generator, or the hub).
        eval_data_files: file with the held-out problems; ``None`` for the task's own held-out part,
            or with ``data_files`` the last ``eval.num_prompts`` problems of that file, which are
            then not trained on.
        repeats: samples a prompt, the size of a group.
        max_prompt_length: tokens that a prompt may have; ``None`` for what the model's context
            leaves beside ``inference_model.max_tokens``.
        on_overlong: what becomes of a longer prompt: an error, a row that is not answered nor
            trained, or a prompt cut from the left. Counted in ``train/overlong``.
    """

    dataset: Literal["arithmetic", "gsm8k"] = "arithmetic"
    data_files: str | None = None
    eval_data_files: str | None = None
    repeats: int = 8
    max_prompt_length: int | None = None
    on_overlong: Literal["error", "drop", "truncate"] = "error"

    def __post_init__(self) -> None:
        _require(self.repeats >= 2, f"env.repeats must be at least 2, got {self.repeats}")
        local = self.data_files is None and self.eval_data_files is None
        _require(
            local or self.dataset == "gsm8k",
            f"env.data_files has no effect: the task {self.dataset!r} generates its problems",
        )


@dataclass(kw_only=True)
class ModelConfig:
    """The policy.

    Attributes:
        name: a folder or a hub name; ``None`` for the model that ships with the package.
        chat_template_name: a family of templates to use instead of the tokenizer's own.
    """

    name: str | None = None
    chat_template_name: str | None = None


@dataclass(kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
        max_steps: training steps (one batch collected, ``epochs`` passes over it).
        prompts_per_batch: distinct prompts a step; ``env.repeats`` responses each.
        epochs: passes over a batch.
        optim_batch_size: responses an optimizer step; ``None`` for the whole batch.
        micro_token_budget: padded tokens in one forward; ``None`` for no cut. The result does not
            depend on it, only memory and speed do.
        kl_to_ref_coeff: weight of the KL divergence from ``ref_model`` in the loss; 0 for none.
        mixed_precision: ``bfloat16`` autocast over the master weights, ``float32``, or ``auto``:
            bfloat16 on CUDA, float32 elsewhere.
        device: ``auto`` for CUDA when there is one.
        num_threads: threads of torch on the CPU; ``None`` for torch's choice. A tiny model gains
            little from a second one and loses much where cores are shared: waiting threads spin.
    """

    max_steps: int = 100
    prompts_per_batch: int = 16
    epochs: int = 1
    optim_batch_size: int | None = None
    micro_token_budget: int | None = 16384
    kl_to_ref_coeff: float = 0.0
    mixed_precision: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "prompts_per_batch", "epochs"):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name} must be at least 1, got {value}")
        for name in ("optim_batch_size", "micro_token_budget", "num_threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"train.{name} must be at least 1, got {value}")
        _require(
            self.kl_to_ref_coeff >= 0,
            f"train.kl_to_ref_coeff must not be negative, got {self.kl_to_ref_coeff}",
        )


@dataclass(kw_only=True)
class LoraConfig:
    """LoRA adapters (needs the extra ``peft``); the other keys count only when enabled.

    Attributes:
        enabled: train adapters and leave the model's own weights alone.
        r: rank.
        alpha: scale, applied as ``alpha / r``.
        dropout: on the adapters' input.
        target_modules: names of the linear layers; ``None`` for all but the head.
    """

    enabled: bool = False
    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        _require(
            self.enabled or all(getattr(self, f.name) == f.default for f in fields(self)),
            "keys of train_model.lora have no effect without train_model.lora.enabled=true",
        )
        _require(self.r >= 1, f"train_model.lora.r must be at least 1, got {self.r}")


@dataclass(kw_only=True)
class TrainModelConfig:
    """How the policy is held for training.

    Attributes:
        dtype: of the weights.
        gradient_checkpointing: trade compute for memory in the backward.
        attn_implementation: as in ``transformers``; ``None`` for its choice.
        logprob_chunk_size: tokens whose logits are held at once; ``None`` to choose by vocabulary.
        lora: adapters.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    attn_implementation: str | None = None
    logprob_chunk_size: int | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(kw_only=True)
class InferenceModelConfig:
    """How responses are sampled; the sampler shares the policy's weights.

    Attributes:
        max_tokens: tokens a response may have.
        temperature: of sampling; recorded with every row and applied when it is scored.
    """

    max_tokens: int = 32
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.max_tokens >= 1,
            f"inference_model.max_tokens must be at least 1, got {self.max_tokens}",
        )
        _require(
            self.temperature > 0,
            "inference_model.temperature must be above 0, for a greedy group has no variance; "
            f"got {self.temperature}",
        )


@dataclass(kw_only=True)
class RefModelConfig:
    """The reference of the KL term; the group counts only with ``train.kl_to_ref_coeff`` above 0.

    Attributes:
        name: folder or hub name; ``None`` for the policy as it was before training.
    """

    name: str | None = None


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer and schedule.

    Attributes:
        name: a class of ``torch.optim``.
        lr: learning rate; 0 runs everything and changes nothing.
        weight_decay: ``None`` for the optimizer's default.
        eps: ``None`` for the optimizer's default.
        betas: ``None`` for the optimizer's default.
        momentum: ``None`` for the optimizer's default.
        clip_grad_norm: bound on the norm of the gradient; ``None`` for none.
        scheduler: ``constant``, ``linear`` or ``cosine`` to zero at the end of the run.
        warmup_steps: optimizer steps of a linear rise.
    """

    name: str = "AdamW"
    lr: float = 1e-5
    weight_decay: float | None = 0.0
    eps: float | None = None
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    clip_grad_norm: float | None = 1.0
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require(
            self.warmup_steps >= 0,
            f"optimizer.warmup_steps must not be negative, got {self.warmup_steps}",
        )
        _require(self.lr >= 0, f"optimizer.lr must not be negative, got {self.lr}")
        _require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"optimizer.clip_grad_norm must be above 0 or null, got {self.clip_grad_norm}",
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`~torchrl_llm.trainers.optim.make_optimizer`."""
        names = ("name", "lr", "weight_decay", "eps", "betas", "momentum")
        return {name: getattr(self, name) for name in names}

    @property
    def schedule(self) -> dict[str, Any]:
        """Arguments of :func:`~torchrl_llm.trainers.optim.make_scheduler`."""
        return {"name": self.scheduler, "warmup_steps": self.warmup_steps}


@dataclass(kw_only=True)
class LossConfig:
    """The objective.

    Attributes:
        aggregation: how token losses become one number.
        clip_epsilon: bounds of the ratio, ``[low, high]`` below and above 1.
        entropy_coeff: weight of an entropy bonus; at 0 entropy is not part of the loss.
    """

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    clip_epsilon: tuple[float, float] = (0.2, 0.2)
    entropy_coeff: float = 0.0


@dataclass(kw_only=True)
class AdvantageConfig:
    """Group advantages: (reward - mean) / std within the responses to one prompt.

    Attributes:
        normalize: which standard deviation divides; ``none`` leaves the difference as it is.
    """

    normalize: Literal["sample", "population", "none"] = "sample"


@dataclass(kw_only=True)
class FilterConfig:
    """Rows that are not trained on, each counted in the token ledger.

    Attributes:
        zero_variance: groups whose rewards are all equal: ``keep`` lets them count in the
            denominator of the loss, ``drop`` takes them out, ``resample`` also collects further
            prompts until the batch is full.
        truncated: responses cut by ``inference_model.max_tokens``: ``keep`` trains them, ``mask``
            keeps them in their group's mean only, ``drop`` takes them out of that too.
        max_resamples: batches that ``resample`` may add before it goes on with what it has.
    """

    zero_variance: Literal["keep", "drop", "resample"] = "keep"
    truncated: Literal["keep", "mask", "drop"] = "keep"
    max_resamples: int = 4

    def __post_init__(self) -> None:
        default = type(self).max_resamples
        _require(
            self.zero_variance == "resample" or self.max_resamples == default,
            "filter.max_resamples has no effect without filter.zero_variance=resample",
        )
        _require(
            self.max_resamples >= 1,
            f"filter.max_resamples must be at least 1, got {self.max_resamples}",
        )

    @property
    def resamples(self) -> int:
        """Batches that a step may collect in addition."""
        return self.max_resamples if self.zero_variance == "resample" else 0


@dataclass(kw_only=True)
class GRPOConfig:
    """Everything that ``sota-implementations/grpo`` can be told.

    Attributes:
        seed: seeds weights of adapters, prompts and sampling.
    """

    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0

    @property
    def rows_per_batch(self) -> int:
        """Responses collected in a step."""
        return self.train.prompts_per_batch * self.env.repeats

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run, for the schedule."""
        size = self.train.optim_batch_size or self.rows_per_batch
        return self.train.max_steps * self.train.epochs * -(-self.rows_per_batch // size)

    def flat(self) -> dict[str, Any]:
        """Dotted key to value, for the record of a run."""
        return _flat(asdict(self))

    def __post_init__(self) -> None:
        size, group = self.train.optim_batch_size, self.env.repeats
        if size is not None:
            _require(
                self.rows_per_batch % size == 0,
                f"train.optim_batch_size={size} does not divide the batch of "
                f"{self.rows_per_batch} responses (train.prompts_per_batch="
                f"{self.train.prompts_per_batch} x env.repeats={group})",
            )
            _require(
                size % group == 0,
                f"env.repeats={group} does not divide train.optim_batch_size={size}: a group would "
                "be cut over two optimizer steps",
            )
        _require(
            self.ref_model.name is None or self.train.kl_to_ref_coeff > 0,
            "ref_model.name has no effect without train.kl_to_ref_coeff above 0",
        )
        _require(
            not (self.train_model.dtype == "bfloat16" and self.train.mixed_precision == "float32"),
            "train_model.dtype=bfloat16 cannot train with train.mixed_precision=float32",
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


RENAMED: Mapping[str, str] = {
    "mode": "removed: grpo-sync.py is the synchronous recipe",
    "env.num_envs": "train.prompts_per_batch",
    "env.reasoning": "removed: choose the task with env=...",
    "train.group_size": "env.repeats",
    "train.dialog_turns_per_batch": "train.prompts_per_batch",
    "train.total_dialog_turns": "train.max_steps",
    "train.gradient_accumulation_steps": "train.micro_token_budget",
    "train.entropy_coeff": "loss.entropy_coeff",
    "train.clip_epsilon": "loss.clip_epsilon",
    "train.exp_name": "logging.experiment_name",
    "train.checkpoint_frequency": "checkpoint.interval",
    "train.use_kl_to_ref": "removed: train.kl_to_ref_coeff above 0 says it",
    "train.kl_coef_in_loss": "removed: the KL term is always in the loss",
    "train.empty_replay_buffer": "removed: a synchronous step trains on its own batch only",
    "train.logging_frequency": "removed: every step is a row of metrics.csv",
    "train.learning_rate": "optimizer.lr",
    "train_model.torch_dtype": "train_model.dtype",
    "inference_model.max_new_tokens": "inference_model.max_tokens",
    "logging.checkpoint_dir": "removed: checkpoints are in hydra.run.dir",
    "logging.checkpoint_frequency": "checkpoint.interval",
    "loss.epsilon": "loss.clip_epsilon",
    "loss.type": "removed: this recipe is GRPO",
    "inference_model.backend": "removed: this recipe samples with the policy's own module",
    "inference_model.top_p": "removed: a ratio loss needs the whole distribution (top_p 1)",
    "inference_model.top_k": "removed: a ratio loss needs the whole distribution (top_k 0)",
    "advantage.type": "removed: advantages are those of the group",
}


def load_config(values: Mapping[str, Any]) -> GRPOConfig:
    """Validate a composed configuration.

    Args:
        values: nested mapping, for instance the ``DictConfig`` of Hydra.

    Raises:
        ConfigError: an unknown or renamed key, a value of the wrong type, an impossible pair.

    Example:
        >>> load_config({"train": {"max_steps": 5}, "optimizer": {"lr": 0}}).train.max_steps
        5
        >>> load_config({"train": {"optim_batch_size": 12}})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: train.optim_batch_size=12 does not divide the batch of 128 \
responses (train.prompts_per_batch=16 x env.repeats=8)
    """
    return from_mapping(GRPOConfig, values, renamed=RENAMED)


def check_arguments(arguments: list[str]) -> None:
    """Refuse unknown and renamed keys on the command line (``sys.argv[1:]``).

    Args:
        arguments: the overrides, as ``optimizer.lr=1e-4``.

    Raises:
        ConfigError: names the nearest valid key, or the new name.
    """
    check_override_keys(arguments, GRPOConfig, renamed=RENAMED)

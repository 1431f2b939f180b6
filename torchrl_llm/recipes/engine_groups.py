"""The groups of the GRPO recipe that say where responses are sampled, and how weights get there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from torchrl_llm._registry import find
from torchrl_llm.collectors.staleness import StalenessRule
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.groups import (
    InferenceModelConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_llm.recipes.strict_config import ensure

_ENGINE_KEYS = (
    "num_devices",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_fp32_lm_head",
    "max_model_len",
)


@dataclass(kw_only=True)
class EngineConfig(InferenceModelConfig):
    """What samples, beside how it samples; the keys of the engine count with ``backend=vllm`` only.

    Attributes:
        backend: ``transformers`` samples with the trained module (a copy of it in each collector of
            the asynchronous recipe), ``vllm`` with an engine; or ``"module:class"`` of a
            :class:`~torchrl_llm.modules.Backend` of your own, which is made of ``model.name`` and
            the keyword ``tokenizer``.
        num_devices: GPUs of one engine (tensor parallel), each with a process of its own; on the
            CPU so many processes.
        gpu_memory_utilization: fraction of a GPU's memory that an engine may take; ``None`` for
            vLLM's default. Lower it where trainer and engine share a GPU.
        enforce_eager: no CUDA graphs.
        enable_prefix_caching: keep the cache of prompts that begin alike.
        enable_fp32_lm_head: logits in float32 whatever the type of the weights.
        max_model_len: most tokens of prompt and response; ``None`` for the model's context.
    """

    backend: str = "transformers"
    num_devices: int = 1
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_fp32_lm_head: bool = False
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            find("backends", self.backend)
        except ConfigError as error:
            raise ConfigError(f"inference_model.backend: {error}") from error
        if self.backend != "vllm":
            for entry in fields(self):
                ensure(
                    entry.name not in _ENGINE_KEYS or getattr(self, entry.name) == entry.default,
                    f"inference_model.{entry.name} has no effect with "
                    f"inference_model.backend={self.backend}",
                )
        ensure(
            self.num_devices >= 1,
            f"inference_model.num_devices must be at least 1, got {self.num_devices}",
        )
        share = self.gpu_memory_utilization
        ensure(
            share is None or 0 < share <= 1,
            f"inference_model.gpu_memory_utilization must be in (0, 1] or null, got {share}",
        )
        longest = self.max_model_len
        ensure(
            longest is None or longest > self.max_tokens,
            f"inference_model.max_model_len={longest} leaves no room for a prompt beside "
            f"inference_model.max_tokens={self.max_tokens}",
        )

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of :func:`~torchrl_llm.modules.backends.vllm.build_engine`."""
        return {name: getattr(self, name) for name in _ENGINE_KEYS}


@dataclass(kw_only=True)
class WeightSyncConfig:
    """How the weights that were trained get into an engine of this process.

    Attributes:
        type: ``shared`` keeps one copy of the weights for trainer and engine, ``load`` copies all
            of them after each step, ``delta`` those that changed, ``adapter`` the LoRA adapter
            alone; or ``"module:class"`` of an updater of your own, which is made of the engine's
            backend and the keywords ``model`` and ``canary``. ``auto``: ``adapter`` with LoRA,
            ``shared`` on the CPU with ``inference_model.num_devices=1``, else ``load``.
        verify: after each update compare the engine's log-probs of a few rows with the trainer's,
            and stop where more than rounding is between them.
        fingerprint: with ``load``, hash all weights at each update: half of the copy on the CPU;
            on a GPU they have to be copied to the CPU for it.
    """

    type: str = "auto"
    verify: bool = True
    fingerprint: bool = True

    def __post_init__(self) -> None:
        if self.type != "auto":
            try:
                find("weights", self.type)
            except ConfigError as error:
                raise ConfigError(f"weight_sync.type: {error}") from error
        ensure(
            self.fingerprint or self.type in ("auto", "load"),
            f"weight_sync.fingerprint=false has no effect with weight_sync.type={self.type}: "
            "delta finds by it what changed, the others do not hash all weights",
        )


@dataclass(kw_only=True)
class AsyncWeightSyncConfig:
    """How the weights that were trained get to the collectors.

    They go through Ray's object store, where each machine holds them once; a LoRA adapter is merged
    into them.

    Attributes:
        in_flight: what new weights do with conversations that are being collected: ``wait`` until
            all have their present answer, and go on with the new weights; ``keep`` what is there
            of the answers too (each token knows its version); or ``abort``: drop them and begin
            others.
        verify: as in the recipe of one process; each collector compares its own engine. Needs
            ``inference_model.backend=vllm`` to have an effect.
    """

    in_flight: Literal["wait", "keep", "abort"] = "wait"
    verify: bool = True


@dataclass(kw_only=True)
class AsyncTrainConfig(TrainConfig):
    """The loop beside which responses are collected.

    Attributes:
        max_policy_age: updates that the weights may have moved since a token was sampled.
        on_stale: what happens where that would be exceeded: collectors ``wait``; or they run on,
            and older rows are dropped (``drop``) or their older tokens not trained (``mask``).
        weight_update_frequency: training steps between two updates of the collectors' weights.
    """

    max_policy_age: int = 1
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    weight_update_frequency: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.max_policy_age >= 0,
            f"train.max_policy_age must not be negative, got {self.max_policy_age}",
        )
        ensure(
            self.weight_update_frequency >= 1,
            f"train.weight_update_frequency must be at least 1, got {self.weight_update_frequency}",
        )

    @property
    def staleness(self) -> StalenessRule:
        """The rule that the keys say."""
        return StalenessRule(max_policy_age=self.max_policy_age, on_stale=self.on_stale)


@dataclass(kw_only=True)
class AsyncTrainModelConfig(TrainModelConfig):
    """How the policy is held for training, and which GPUs are its own.

    Attributes:
        num_devices: GPUs that no collector of this machine gets, with ``ray.address=null``: 1 for
            the policy (the one of ``train.device``), 0 where it shares its GPU with them (then give
            ``ray.gpus_per_collector``, a part of 1, and
            ``inference_model.gpu_memory_utilization``). A cluster that runs already was told which
            GPUs it has.
    """

    num_devices: int = 1

    def __post_init__(self) -> None:
        ensure(
            self.num_devices in (0, 1),
            f"train_model.num_devices must be 0 or 1, got {self.num_devices}: the layers of a "
            "policy are not spread over GPUs",
        )


@dataclass(kw_only=True)
class RayConfig:
    """Where the collectors run.

    Attributes:
        address: of a cluster, ``auto`` for the one this machine belongs to; ``None`` starts Ray on
            this machine alone.
        num_cpus: CPUs that Ray may count on with ``address=null``; ``None`` for those it needs or
            finds, whichever are more.
        num_collectors: collectors side by side, each an actor with environments and sampler of its
            own.
        prompts_per_claim: prompts that a collector answers at a time; ``None`` for an equal share
            of ``train.prompts_per_batch``.
        cpus_per_collector: CPUs of each.
        gpus_per_collector: GPUs of each; ``None`` for none on the CPU, else
            ``inference_model.num_devices``. With 0 a collector samples on the CPU.
        max_restarts: times that a collector which died is built anew.
        timeout_s: seconds without rows, or without a sign of life of a collector, after which it is
            given up.
    """

    address: str | None = None
    num_cpus: int | None = None
    num_collectors: int = 2
    prompts_per_claim: int | None = None
    cpus_per_collector: float = 1.0
    gpus_per_collector: float | None = None
    max_restarts: int = 3
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("num_collectors", "prompts_per_claim", "num_cpus"):
            value = getattr(self, name)
            ensure(value is None or value >= 1, f"ray.{name} must be at least 1, got {value}")
        for name in ("cpus_per_collector", "gpus_per_collector", "max_restarts"):
            value = getattr(self, name)
            ensure(value is None or value >= 0, f"ray.{name} must not be negative, got {value}")
        ensure(self.timeout_s > 0, f"ray.timeout_s must be above 0, got {self.timeout_s}")
        ensure(
            self.address is None or self.num_cpus is None,
            "ray.num_cpus has no effect with ray.address: the cluster knows its CPUs",
        )

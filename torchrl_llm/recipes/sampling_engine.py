"""Sampler of a single-process recipe: the trained module, or a vLLM engine next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrl_llm._registry import find
from torchrl_llm._settings import ensure
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import LLMWrapperBase, TransformersWrapper, base_of, vLLMWrapper
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.grpo_config import GRPOConfig
from torchrl_llm.trainers.gathered_model import GatheredWeights
from torchrl_llm.weights import (
    CanaryCheck,
    InProcessWeights,
    SharedEngineWeights,
    SleepingEngineWeights,
    WeightUpdater,
)

# LoRA ranks for which vLLM has kernels.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# GPU kernels may compute float32 with 10 bits (TF32).
_TF32_NATS = 1e-3


def sync_type(config: GRPOConfig) -> str:
    """Type of the weight update, with ``auto`` resolved.

    Args:
        config: configuration with ``weight_sync.type``.
    """
    if config.weight_sync.type != "auto":
        return config.weight_sync.type
    if config.inference_model.sleep:
        return "load"
    if config.train_model.lora.enabled:
        return "adapter"
    engine = config.inference_model
    one_memory = builders.device_kind(config) == "cpu" and engine.num_devices == 1
    one_memory = one_memory and engine.backend == "vllm" and config.train.parallel != "fsdp2"
    return "shared" if one_memory else "load"


def engine_arguments(config: GRPOConfig, sync: str) -> dict[str, Any]:
    """Options of the configured engine.

    Args:
        config: configuration of the recipe.
        sync: how it gets its weights, see :func:`sync_type`.

    Returns:
        Options of :func:`~torchrl_llm.modules.backends.vllm.build_engine`.

    Raises:
        ConfigError: the engine has no kernels for the LoRA rank, or four bits in float32.
    """
    options = config.inference_model.engine_options
    # Shared weights have one type; otherwise the engine samples in autocast's precision.
    low = builders.samples_in_bfloat16(config) and sync != "shared"
    options["dtype"] = "bfloat16" if low else config.train_model.dtype
    if config.train.parallel != "none":
        # One engine per rank, on the rank's device, in the existing process group.
        options["distributed_executor_backend"] = "external_launcher"
    if sync == "shared":
        options["load_format"] = "dummy"  # it gets the trainer's weights immediately
    if sync == "adapter":
        rank = config.train_model.lora.r
        if rank > _RANKS[-1]:
            raise ConfigError(
                f"train_model.lora.r={rank} is above {_RANKS[-1]}, the most that vLLM can sample "
                "with; choose weight_sync.type=load, which merges the adapter"
            )
        options |= {"enable_lora": True, "max_lora_rank": min(r for r in _RANKS if r >= rank)}
    if config.model.quantization is not None:
        ensure(
            options["dtype"] != "float32",
            f"model.quantization={config.model.quantization} with inference_model.backend=vllm "
            "needs an engine in bfloat16, for its layers of four bits take no float32: choose "
            "train.mixed_precision=bfloat16 or train_model.dtype=bfloat16",
        )
        options["quantization"] = "bitsandbytes"
    return options


def make_canary(config: GRPOConfig, policy: TransformersWrapper, sync: str) -> CanaryCheck:
    """A canary that compares the configured engine with the trained policy.

    Args:
        config: configuration of the recipe.
        policy: the trained policy.
        sync: how the engine gets its weights, see :func:`sync_type`.
    """
    is_vllm = config.inference_model.backend == "vllm"
    dtype = torch.float32
    if is_vllm:
        dtype = getattr(torch, engine_arguments(config, sync)["dtype"])
    if dtype == torch.float32 and builders.device_of(config).type != "cpu":
        return CanaryCheck(policy, dtype=dtype, tolerance=_TF32_NATS)
    return CanaryCheck(policy, dtype=dtype)


def canary_metrics(canary: CanaryCheck | None) -> dict[str, float]:
    """Difference between engine and trainer at the last update; empty without a canary.

    Args:
        canary: the canary that measured it.

    Returns:
        ``train/canary_rounding``, about 1 (see
        :class:`~torchrl_llm.weights.CanaryReport`); and ``train/canary_distinct``, 1 if it could
        distinguish the new weights from older ones, 0 if only the digest proves them.
    """
    report = None if canary is None else canary.report
    if report is None:
        return {}
    return {
        "train/canary_rounding": report.rounding,
        "train/canary_distinct": float(report.followed is not None),
    }


def make_sampler(
    config: GRPOConfig,
    policy: TransformersWrapper,
    learner: TransformersWrapper,
    name: str = "policy",
) -> tuple[LLMWrapperBase, WeightUpdater]:
    """The collector's policy, and the updater of its weights.

    Args:
        config: configuration of the recipe.
        policy: samples and scores in this process.
        learner: the trained policy, see :func:`~torchrl_llm.recipes.parallel.make_learner`.
        name: name of the policy, unique in this run.

    Returns:
        The policy itself, whose weights are trained; or a :class:`~torchrl_llm.modules.vLLMWrapper`
        over an engine of this process, which gets its first weights with the first update.

    Raises:
        MissingExtraError: vLLM is configured but not installed.
        ConfigError: settings that engine and model do not support.
        ResourceError: the engine does not fit.
    """
    if config.inference_model.backend == "transformers":
        return policy, InProcessWeights()
    sync = sync_type(config)
    is_vllm = config.inference_model.backend == "vllm"
    options = engine_arguments(config, sync) if is_vllm else {}
    if config.inference_model.sleep and builders.device_kind(config) != "cpu":
        options["enable_sleep_mode"] = True
    make = find("backends", config.inference_model.backend)
    backend = make(base_of(config.model.name), tokenizer=policy.tokenizer, **options)
    sampler = vLLMWrapper(backend, tokenizer=policy.tokenizer, **builders.wrapper_options(config))
    canary = None
    if config.weight_sync.verify:
        canary = make_canary(config, policy, sync)
    gathers = learner is not policy and sync != "adapter"  # an adapter is sent from its shards
    model = policy.model if gathers else learner.model
    if sync == "shared":
        # The canary proves the version; also hashing all weights would double the cost.
        return sampler, SharedEngineWeights(model, backend, fingerprint=False, canary=canary)
    given: dict[str, Any] = {}
    if sync == "load":
        given["fingerprint"] = config.weight_sync.fingerprint
    if sync == "files":
        rank = dist.get_rank() if dist.is_initialized() else 0
        given["folder"] = Path(config.weight_sync.folder, f"{name}-{rank}")
    make_updater = SleepingEngineWeights if config.inference_model.sleep else find("weights", sync)
    updater = make_updater(backend, model=model, canary=canary, **given)
    return sampler, GatheredWeights(policy, updater) if gathers else updater

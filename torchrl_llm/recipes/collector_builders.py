"""What the collectors of a recipe build in their own processes, from the recipe's configuration.

The functions here run over there; what is sent is a :class:`CollectionConfig`, which says what to
build, and never a model or an environment. Next: :mod:`torchrl_llm.recipes.ray_collection`, which
starts such collectors.
"""

from __future__ import annotations

import gc
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from torchrl_llm._registry import find
from torchrl_llm.envs import TaskEnv
from torchrl_llm.modules import LLMWrapperBase, load_tokenizer, vLLMWrapper
from torchrl_llm.recipes.builders import (
    make_policy,
    make_tokenizer,
    make_train_env,
    max_turns,
    seed_everything,
    set_threads,
    wrapper_options,
)
from torchrl_llm.recipes.engine_groups import EngineConfig
from torchrl_llm.recipes.groups import (
    EnvConfig,
    LoraConfig,
    ModelConfig,
    RefModelConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_llm.recipes.grpo_config import AsyncGRPOConfig
from torchrl_llm.recipes.objective_groups import RewardComponentsConfig
from torchrl_llm.recipes.sampling_engine import engine_arguments
from torchrl_llm.trainers.run import EvalConfig


@dataclass(kw_only=True)
class CollectionConfig:
    """The groups of a recipe that its collectors read, and what they are told beside them.

    Attributes:
        rows_per_batch: responses that a collector samples at a time.
        in_flight: what new weights do with responses that are being sampled.
    """

    env: EnvConfig
    model: ModelConfig
    train: TrainConfig
    train_model: TrainModelConfig
    inference_model: EngineConfig
    ref_model: RefModelConfig
    reward: RewardComponentsConfig
    eval: EvalConfig
    seed: int
    rows_per_batch: int
    in_flight: Literal["wait", "keep", "abort"] = "wait"

    @classmethod
    def of(cls, config: AsyncGRPOConfig, *, device: Literal["auto", "cpu"]) -> CollectionConfig:
        """What the collectors of a recipe need of its configuration.

        Adapters and checkpointing of gradients are the trainer's alone: collectors get merged
        weights, and have no gradients. So is its GPU.

        Args:
            config: the recipe's.
            device: of the collectors; ``auto`` for the GPU that they see, if they see one.
        """
        names = ("env", "model", "inference_model", "ref_model", "reward", "eval", "seed")
        groups = {name: getattr(config, name) for name in names}
        held = replace(config.train_model, lora=LoraConfig(), gradient_checkpointing=False)
        return cls(
            **groups,
            train=replace(config.train, device=device),
            train_model=held,
            rows_per_batch=config.rows_per_claim,
            in_flight=config.weight_sync.in_flight,
        )


def make_collecting_policy(config: CollectionConfig) -> LLMWrapperBase:
    """The policy of a collector, in its own process; its first weights are the model's own.

    Objects that exist by then are taken out of the search for garbage, as in the trainer: half a
    million of the imports, at every few batches.

    Two collectors must not sample the same, nor one that was built anew what it sampled before:
    each seeds itself with what nobody else has.

    Args:
        config: what to build.
    """
    set_threads(config)
    seed_everything(secrets.randbits(32))
    policy = _policy(config)
    gc.freeze()
    return policy


def _policy(config: CollectionConfig) -> LLMWrapperBase:
    if config.inference_model.backend == "transformers":
        return make_policy(config)
    tokenizer = make_tokenizer(config.model.name, config.inference_model.max_tokens)
    options: dict[str, Any] = {}
    if config.inference_model.backend == "vllm":
        options = engine_arguments(config, "load")
        options["in_flight"] = "keep" if config.in_flight == "keep" else "wait"
    make = find("backends", config.inference_model.backend)
    backend = make(config.model.name, tokenizer=tokenizer, **options)
    return vLLMWrapper(backend, tokenizer=tokenizer, **wrapper_options(config))


def sent_dtype(config: AsyncGRPOConfig | CollectionConfig) -> torch.dtype | None:
    """The type in which weights go to collectors; ``None`` for that in which they are trained.

    Args:
        config: what the collectors build.
    """
    if config.inference_model.backend != "vllm":
        return None
    return getattr(torch, engine_arguments(config, "load")["dtype"])


def make_collecting_env(config: CollectionConfig) -> TaskEnv:
    """The environments of a collector, in its own process, with an order of prompts of their own.

    Args:
        config: what to build.
    """
    return make_train_env(config, load_tokenizer(config.model.name), seed=secrets.randbits(31))


def rollout_options(config: AsyncGRPOConfig) -> dict[str, Any]:
    """Arguments of a collector whose batches are the trajectories that it claims.

    Where episodes take one turn, that is a number of turns; where they take more, all that its
    environments begin together.

    Args:
        config: the recipe's.
    """
    if max_turns(config) == 1:
        return {"dialog_turns_per_batch": config.rows_per_claim}
    return {"reset_at_each_iter": True}

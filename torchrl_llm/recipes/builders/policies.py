"""Policy, tokenizer and reference of a configuration."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torchrl._utils import logger

from torchrl_llm import modules
from torchrl_llm._settings import ensure, naming
from torchrl_llm.data.scoring import TokenScorer, check_same_vocabulary
from torchrl_llm.envs import GameEnv, TaskEnv
from torchrl_llm.envs.datasets.task_env import tool_schemas
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.builders.devices import device_of, reference_device
from torchrl_llm.recipes.builders.problems import check_problems, task_rows, task_settings
from torchrl_llm.recipes.builders.task_envs import with_agent
from torchrl_llm.recipes.chat_env_task import ChatEnvTask
from torchrl_llm.recipes.data_config import ROWS
from torchrl_llm.recipes.shared_keys import SampledConfig, TrainedConfig
from torchrl_llm.recipes.tasks import task_class, tool_transform
from torchrl_llm.tools.call_parsers import MessageCallParser
from torchrl_llm.trainers.gathered_model import GatheredModel, whole_weights


def wrapper_options(config: SampledConfig) -> dict[str, Any]:
    """Options of a sampling policy: templates, handling of long prompts, generation arguments.

    Args:
        config: configuration of the recipe.
    """
    return {
        **config.model.template,
        "on_overlong": config.env.on_overlong,
        "max_prompt_length": config.env.max_prompt_length,
        "generate_kwargs": config.inference_model.arguments,
        "tools": _tool_schemas(config),
    }


def _tool_schemas(config: SampledConfig) -> list[dict[str, Any]] | None:
    """Tool schemas of the task for the chat template, if the prompt describes the tools."""
    task = task_class(config.env.dataset)
    has_tools = (
        task.make_tools is not TaskEnv.make_tools
        or task.tool_schemas is not TaskEnv.tool_schemas
        or isinstance(task, ChatEnvTask)  # the transforms of the agent define the tools
        or bool(config.env.tools)
        or config.agent.type != AgentConfig.default
    )
    if config.agent.owns_loop or not (config.model.is_told_of_tools and has_tools):
        return None
    own, made = config.env.dataset == ROWS, list(config.agent.build().make_transforms())
    if own and config.env.tools:
        made.insert(0, tool_transform(config.env.tools, max_turns=config.env.max_tool_turns))
    if own and made:  # no row has its own tools, so no environment is needed
        told = [each for each in made if isinstance(each.parser, MessageCallParser)]
        return [schema for each in told for schema in each.schemas] or None
    env = with_agent(config, task(**task_rows(config, task)[0], **task_settings(config)))
    try:
        return (env.tool_schemas if isinstance(env, TaskEnv) else tool_schemas(env)) or None
    finally:
        env.close()


def make_tokenizer(
    name: str | None, max_tokens: int, *, key: str = "inference_model.max_tokens"
) -> Any:
    """The tokenizer of ``model.name``, after a check of the model's context length.

    Both steps are fast, so their errors are raised before any weights are read.

    Args:
        name: value of ``model.name``.
        max_tokens: tokens that a response may have.
        key: dotted key of ``max_tokens``.

    Raises:
        ConfigError: the model does not exist, has no tokenizer, or its context is too short.
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
    """Tokens that a row may have: ``train.max_seq_len``, or else the model's context length.

    Args:
        config: configuration with ``model.name`` and ``train``.

    Raises:
        ConfigError: ``train.max_seq_len`` is longer than the model's context.
    """
    context, longest = modules.context_length(config.model.name), config.train.max_seq_len
    ensure(
        None in (context, longest) or longest <= context,
        f"train.max_seq_len={longest} is more than the {context} tokens of the model's context",
    )
    return context if longest is None else longest


def make_policy(config: SampledConfig, *, with_values: bool = False) -> modules.TransformersWrapper:
    """Make the policy for sampling and training; both use the same module.

    Args:
        config: configuration of the recipe.
        with_values: whether to add a value head.
    """
    _tell_small_model(config)
    tokenizer = make_tokenizer(config.model.name, config.inference_model.max_tokens)
    longest_row(config)
    check_problems(config)
    return load_policy(config, tokenizer, with_values=with_values, **wrapper_options(config))


def load_policy(
    config: TrainedConfig, tokenizer: Any, *, with_values: bool = False, **options: Any
) -> modules.TransformersWrapper:
    """The trained model, in a wrapper that samples with it.

    Args:
        config: configuration with ``model``, ``train`` and ``train_model``.
        tokenizer: tokenizer of the model.
        with_values: whether to add a value head.
        options: options of the wrapper.
    """
    wanted = config.train_model
    adapter = modules.find_adapter(config.model.name)
    if adapter is not None and not wanted.lora.enabled:
        logger.warning(
            f"model.name={adapter.name} is an adapter of {adapter.base}: it is merged, and all "
            "weights are trained; train_model.lora.enabled=true trains only the adapter"
        )
    model = modules.load_model(
        config.model.name,
        dtype=wanted.dtype,
        attn_implementation=wanted.attn_implementation,
        gradient_checkpointing=wanted.gradient_checkpointing,
        lora=wanted.lora.arguments,
        quantization=config.model.quantization,
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


def _tell_small_model(config: SampledConfig) -> None:
    """Warn if the task is too hard for the default model."""
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
    """The reference policy of the divergences.

    Args:
        config: configuration of the recipe; ``ref_model.name`` may name a different model.
        policy: the trained policy. With LoRA and without ``ref_model.name``, its model without
            adapters (or with the adapter that ``model.name`` names) is the reference.

    Raises:
        ConfigError: the model does not exist, or has a different vocabulary.
    """
    if config.train_model.lora.enabled and config.ref_model.name is None:
        if modules.find_adapter(config.model.name) is not None:
            with whole_weights(policy):
                return modules.AdapterAsLoaded(policy)
        return modules.AdapterDisabled(policy)
    name = config.ref_model.name or config.model.name
    device = reference_device(config)
    with naming("ref_model.name"):
        model = modules.load_model(name, dtype=config.train_model.dtype, device=device)
        reference = modules.TransformersBackend(
            model.requires_grad_(False), layout=config.train.packing
        )
        if config.ref_model.name is not None:
            with suppress(ConfigError):  # no tokenizer, but a known vocabulary size
                reference.tokenizer = modules.load_tokenizer(name)
            check_same_vocabulary(policy, reference, names=("the policy", "its reference"))
    if config.train.parallel == "fsdp2":
        train = config.train
        GatheredModel(model, model, gathers=train.gathers, timeout_s=train.timeout_s)
    return reference


def overlong_metrics(policy: modules.LLMWrapperBase) -> dict[str, int]:
    """Return the number of overlong prompts in this step, and reset the count.

    Args:
        policy: the policy that counted them.
    """
    counts = policy.overlong_counts
    total = sum(counts.values())
    counts.update(dict.fromkeys(counts, 0))
    return {"train/overlong": total}

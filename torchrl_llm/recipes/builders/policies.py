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
    """Options of a policy that samples: templates, long prompts, arguments of generation.

    Args:
        config: the recipe's.
    """
    return {
        **config.model.template,
        "on_overlong": config.env.on_overlong,
        "max_prompt_length": config.env.max_prompt_length,
        "generate_kwargs": config.inference_model.arguments,
        "tools": _tool_schemas(config),
    }


def _tool_schemas(config: SampledConfig) -> list[dict[str, Any]] | None:
    """The task's tools as chat templates take them, where the model is to be told of them."""
    task = task_class(config.env.dataset)
    has_tools = (
        task.make_tools is not TaskEnv.make_tools
        or task.tool_schemas is not TaskEnv.tool_schemas
        or isinstance(task, ChatEnvTask)  # its transforms say
        or bool(config.env.tools)
        or config.agent.type != AgentConfig.default
    )
    if config.agent.owns_loop or not (config.model.is_told_of_tools and has_tools):
        return None
    own, made = config.env.dataset == ROWS, list(config.agent.build().make_transforms())
    if own and config.env.tools:
        made.insert(0, tool_transform(config.env.tools, max_turns=config.env.max_tool_turns))
    if own and made:  # rows have no tools of their own, so that no environment is needed to ask
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
    """The tokenizer of ``model.name``, after a look at what says how long its context is.

    Neither takes long, so that what is wrong with them is told before any weights are read.

    Args:
        name: the model, as ``model.name`` gives it.
        max_tokens: tokens that a response may have.
        key: dotted key of that.

    Raises:
        ConfigError: no such model, no tokenizer with it, or no room in its context.
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
    """Tokens that a row may have: ``train.max_seq_len``, or else what the model's context holds.

    Args:
        config: its ``model.name`` and ``train``.

    Raises:
        ConfigError: longer rows are allowed than there can be.
    """
    context, longest = modules.context_length(config.model.name), config.train.max_seq_len
    ensure(
        None in (context, longest) or longest <= context,
        f"train.max_seq_len={longest} is more than the {context} tokens of the model's context",
    )
    return context if longest is None else longest


def make_policy(config: SampledConfig, *, with_values: bool = False) -> modules.TransformersWrapper:
    """The policy that samples and is trained; both use its one module.

    Args:
        config: the recipe's.
        with_values: give it a value head.
    """
    _tell_small_model(config)
    tokenizer = make_tokenizer(config.model.name, config.inference_model.max_tokens)
    longest_row(config)
    check_problems(config)
    options = wrapper_options(config)
    return load_policy(config, tokenizer, with_values=with_values, **options)


def load_policy(
    config: TrainedConfig, tokenizer: Any, *, with_values: bool = False, **options: Any
) -> modules.TransformersWrapper:
    """The model that is trained, in a wrapper that samples with it.

    Args:
        config: its ``model``, ``train`` and ``train_model``.
        tokenizer: of the model.
        with_values: give it a value head.
        options: of the wrapper.
    """
    wanted = config.train_model
    adapter = modules.find_adapter(config.model.name)
    if adapter is not None and not wanted.lora.enabled:
        logger.warning(
            f"model.name={adapter.name} is an adapter of {adapter.base}: it is merged, and all "
            "weights are trained; train_model.lora.enabled=true goes on with the adapter alone"
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
    """Say where a task is too hard for the model that is taken because none was named."""
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
    """The policy that divergences are measured from.

    Args:
        config: the recipe's; ``ref_model.name`` is another model.
        policy: with LoRA, and no other name, it is the reference itself, with its adapters off, or
            with the adapter that ``model.name`` is.

    Raises:
        ConfigError: no such model, or one with another vocabulary.
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
            with suppress(ConfigError):  # a folder of weights alone: their number of ids is known
                reference.tokenizer = modules.load_tokenizer(name)
            check_same_vocabulary(policy, reference, names=("the policy", "its reference"))
    if config.train.parallel == "fsdp2":
        train = config.train
        GatheredModel(model, model, gathers=train.gathers, timeout_s=train.timeout_s)
    return reference


def overlong_metrics(policy: modules.LLMWrapperBase) -> dict[str, int]:
    """How many prompts of this step were too long; counting starts over.

    Args:
        policy: the policy that was asked.
    """
    counts = policy.overlong_counts
    total = sum(counts.values())
    counts.update(dict.fromkeys(counts, 0))
    return {"train/overlong": total}

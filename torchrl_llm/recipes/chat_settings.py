"""Chat with the model of a run. It is prompted as in training, with the tools of its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrl._utils import logger as log

from torchrl_llm import modules
from torchrl_llm.envs import TaskEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.evaluation import Conversation
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.tasks import task_class, tool_transform
from torchrl_llm.tools import ToolTransform
from torchrl_llm.tools.call_parsers import MessageCallParser

_MAX_TOKENS = 256
# Keys that a chat reads; in a foreign configuration their values may have any type.
_TYPES = {
    "env": {
        "dataset": str,
        "system_prompt": str,
        "options": dict,
        "tools": list,
        "max_tool_turns": int,
    },
    "data": {"system_prompt": str},
    "model": {"name": str, "show_tools": bool, "chat_template_name": str, "template_kwargs": dict},
    "inference_model": {"max_tokens": int},
}


class ChatSettings(NamedTuple):
    """Settings of a :class:`~torchrl_llm.evaluation.Conversation` and of the policy that answers.

    Attributes:
        system_prompt: first message, ``None`` for none.
        tools: tools of the task, of ``env.tools`` and of the agent.
        schemas: schemas of the tools that the prompt describes, for a policy's ``tools``; ``None``
            for none (the model that ships with the package knows its tool without a description).
        shows_tools: whether prompts describe tools at all.
        chat_template_name: a family of templates; ``None`` for the tokenizer's own.
        template_kwargs: variables of the template; ``None`` for none.
        max_tokens: tokens that a response may have; ``None`` if not configured.
    """

    system_prompt: str | None = None
    tools: tuple[ToolTransform, ...] = ()
    schemas: list[dict[str, Any]] | None = None
    chat_template_name: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    max_tokens: int | None = None
    shows_tools: bool = True


def chat_settings(config: Mapping[str, Any]) -> ChatSettings:
    """The settings with which the model of a run was prompted in training.

    Data files are not opened, except by user-defined tasks. A task that cannot be loaded here has
    no tools; a warning reports it.

    Args:
        config: nested configuration of a run of any recipe; empty for none.

    Raises:
        ConfigError: unknown tools, or a value of a wrong type.

    Example:
        >>> chat_settings({"env": {"dataset": "calculator"}}).system_prompt
        'Use the calculator.'
    """
    check_types(config)
    env, model = group_of(config, "env"), group_of(config, "model")
    task_prompt, tools = _of_task(env)
    # Fine-tuning has no task: the system prompt is a key of its data.
    said = (env.get("system_prompt"), group_of(config, "data").get("system_prompt"), task_prompt)
    if env.get("tools"):
        tools += (tool_transform(env["tools"], max_turns=env.get("max_tool_turns", 4)),)
    if (agent := group_of(config, "agent")).get("type"):
        tools += tuple(from_mapping(AgentConfig, agent).build().make_transforms())
    told = model.get("show_tools")
    told = model.get("name") is not None if told is None else told
    named = [each for each in tools if isinstance(each.parser, MessageCallParser)]
    schemas = [schema for each in named for schema in each.schemas] if told else None
    return ChatSettings(
        next((text for text in said if text is not None), None),
        tools,
        schemas or None,
        model.get("chat_template_name"),
        model.get("template_kwargs") or None,
        group_of(config, "inference_model").get("max_tokens"),
        told,
    )


def check_types(config: Mapping[str, Any]) -> None:
    """Check the types of the keys that :func:`chat_settings` reads.

    Args:
        config: as for :func:`chat_settings`.

    Raises:
        ConfigError: a wrong type.
    """
    for name, keys in _TYPES.items():
        for key, kind in keys.items():
            value = group_of(config, name).get(key)
            if value is not None and type(value) is not kind:
                raise ConfigError(
                    f"{name}.{key} of the run's configuration must be {kind.__name__}, got "
                    f"{value!r:.100}"
                )


def group_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of a run's configuration; empty if missing.

    Args:
        config: as for :func:`chat_settings`.
        name: name of the group.

    Raises:
        ConfigError: the value is not a group.
    """
    group = config.get(name) or {}
    if not isinstance(group, Mapping):
        raise ConfigError(f"{name} of the run's configuration is no group of keys, got {group!r}")
    return group


def make_conversation(
    model: Any,
    tokenizer: Any,
    config: Mapping[str, Any],
    *,
    system_prompt: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
) -> Conversation:
    """A conversation with the model of a run.

    Args:
        model: a model from :func:`~torchrl_llm.modules.load_model`.
        tokenizer: its tokenizer.
        config: see :func:`chat_settings`.
        system_prompt: replaces the system prompt of the run.
        max_tokens: limit of an answer; ``None`` for the limit of the run, or 256.
        temperature: sampling temperature; 0 is greedy.

    Raises:
        ConfigError: unknown tools.
    """
    settings = chat_settings(config)
    policy = make_chat_policy(
        model, tokenizer, settings, max_tokens=max_tokens, temperature=temperature
    )
    system = settings.system_prompt if system_prompt is None else system_prompt
    return Conversation(policy, system_prompt=system, tools=settings.tools)


def make_chat_policy(
    model: Any,
    tokenizer: Any,
    settings: ChatSettings,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
) -> modules.TransformersWrapper:
    """A policy that is prompted like the model of a run in training.

    Args:
        model: a model from :func:`~torchrl_llm.modules.load_model`.
        tokenizer: its tokenizer.
        settings: settings of the run.
        max_tokens: limit of an answer; ``None`` for the limit of the run, or 256.
        temperature: sampling temperature; 0 is greedy.
    """
    wanted = (max_tokens, settings.max_tokens, _MAX_TOKENS)
    return modules.TransformersWrapper(
        model,
        tokenizer=tokenizer,
        chat_template_name=settings.chat_template_name,
        template_kwargs=settings.template_kwargs,
        tools=settings.schemas,
        generate_kwargs={
            "max_new_tokens": next(n for n in wanted if n is not None),
            "temperature": temperature,
        },
    )


def _of_task(env: Mapping[str, Any]) -> tuple[str | None, tuple[ToolTransform, ...]]:
    """System prompt and tools of a task."""
    name, task = env.get("dataset"), None
    if name is None:
        return None, ()
    try:
        task = task_class(name)
        data: dict[str, Any] = {}
        if ":" in name:
            data = {"data_files": env.get("data_files")}
        if data.get("data_files") is None and task.DATASET is not None:
            # A prompt needs no data: one empty row replaces the dataset.
            data = {"dataset": [dict.fromkeys(task.COLUMNS, "")]}
        made = task(**data, **(env.get("options") or {}), compute_reward=False)
        try:
            return made.base_env.system_prompt, tuple(made.make_tools())
        finally:
            made.close()
    except Exception as error:  # a missing file; a task that fails on the empty row
        if task is None or task.make_tools is not TaskEnv.make_tools:
            log.warning(f"the task {name!r} cannot be loaded here, nor can its tools: {error}")
        return getattr(task, "SYSTEM_PROMPT", None), ()

"""What is examined: a configuration, and what its run would begin with, each made once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from torchrl_llm import modules
from torchrl_llm.data.column import Chat
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import TorchRLLLMError
from torchrl_llm.modules.policies.context_limit import longest_prompt
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.data_config import ROWS
from torchrl_llm.trainers.run_folder import dotted

T = TypeVar("T")

NUM_DRAWN = 256
"""Prompts of a task that are looked at."""


class once(Generic[T]):  # noqa: N801 (used as a decorator)
    """Property that is made once; what it raises on purpose is kept as well, and raised again."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        if self._name not in vars(instance):
            try:
                made: Any = self._make(instance)
            except TorchRLLLMError as error:
                made = error
            vars(instance)[self._name] = made
        made = vars(instance)[self._name]
        if isinstance(made, TorchRLLLMError):
            raise made
        return made


class Task(NamedTuple):
    """A task of a configuration.

    Attributes:
        name: of the task.
        env: its environment, one conversation at a time.
        held_out: that of the held-out prompts, likewise; ``None`` without.
        prompts: the conversations that a run begins with, at most :data:`NUM_DRAWN`.
        data_key: dotted key that says where its rows come from.
        reward_key: dotted key that says what its reward is.
    """

    name: str
    env: Any
    held_out: Any
    prompts: list[Chat]
    data_key: str
    reward_key: str

    @classmethod
    def of(cls, name: str, env: Any, data_key: str, reward_key: str, held_out: Any = None) -> Task:
        """A task whose first prompts are drawn."""
        wanted = min(NUM_DRAWN, env.primer.num_rows or NUM_DRAWN)
        prompts = [env.reset()["history"].prompt.chats[0] for _ in range(wanted)]
        return cls(name, env, held_out, prompts, data_key, reward_key)


class Subject:
    """A configuration, and what a run with it would begin with.

    Args:
        config: of a recipe.
        page: module of the recipe's page.
        folder: where a run would write.
        samples: let the model answer, however long that takes.
        calibrates: run forward and backward to find the largest ``train.micro_token_budget``.

    Attributes:
        flat: dotted key to value.
        keys: dotted keys, groups included.
        reward_seconds: that an answer's reward takes, once it was measured; infinite where it was
            not waited for.
    """

    def __init__(
        self,
        config: Any,
        page: ModuleType,
        *,
        folder: Path = Path("outputs"),
        samples: bool = False,
        calibrates: bool = False,
    ) -> None:
        self.config, self.page, self.folder = config, page, folder
        self.samples, self.calibrates = samples, calibrates
        self.reward_seconds = 0.0
        self.flat = dotted(asdict(config))
        names = [key.split(".") for key in self.flat]
        self.keys = {".".join(parts[: n + 1]) for parts in names for n in range(len(parts))}

    @once
    def tokenizer(self) -> Any:
        """The model's, after a look at the room in its context."""
        key = next(k for k in ("inference_model.max_tokens", "eval.max_tokens") if k in self.keys)
        return builders.make_tokenizer(self.config.model.name, self.flat[key], key=key)

    @once
    def tools(self) -> list[dict[str, Any]] | None:
        """Those that the model is told of."""
        if "env.tools" in self.keys:
            return builders.wrapper_options(self.config)["tools"]
        if "tasks" in self.keys and self.config.model.is_told_of_tools:
            return [tool for task in self.tasks for tool in task.env.tool_schemas] or None
        return None

    @once
    def formatter(self) -> ChatFormatter:
        """The chat template with the model's tokenizer."""
        name = self.config.model.chat_template_name
        return ChatFormatter(self.tokenizer, chat_template_name=name, tools=self.tools)

    @once
    def model(self) -> nn.Module:
        """The layers without their numbers, adapters included."""
        wanted = self.config.train_model if "train_model" in self.keys else None
        with builders.naming("model.name"):
            if wanted is None:
                return modules.empty_model(self.config.model.name)
            lora = wanted.lora.arguments
            return modules.empty_model(self.config.model.name, dtype=wanted.dtype, lora=lora)

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return sum(each.numel() for each in self.model.parameters())

    @once
    def policy(self) -> Any:
        """The policy as the run would begin with it."""
        return builders.make_policy(self.config)

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its answer may have together."""
        limits = (
            modules.context_length(self.config.model.name),
            self.flat.get("inference_model.max_model_len"),
        )
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def longest_prompt(self) -> int | None:
        """Tokens that a prompt may have."""
        return longest_prompt(self.context, self.flat.get("env.max_prompt_length"))

    @property
    def max_turns(self) -> int:
        """How often the model is asked in an episode."""
        return builders.max_turns(self.config) if "env.max_tool_turns" in self.keys else 1

    @property
    def rows_per_step(self) -> int:
        """Answers, or rows, of a step; of an evaluation, those that are written together."""
        names = ("train.prompts_per_batch", "train.batch_size", "eval.batch_size")
        size = next(self.flat[name] for name in names if name in self.keys)
        return size * self.flat.get("env.repeats", 1)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt that was drawn."""
        chats = [chat for task in self.tasks for chat in task.prompts]
        return max(len(each.token_ids) for each in self.formatter.encode_batch(chats))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row in training, at most."""
        if "data.completion" in self.keys:
            return max(len(self.demonstrations.train[at].token_ids) for at in range(1))
        length = self.prompt_tokens + self.max_turns * self.flat["inference_model.max_tokens"]
        return min(length, self.context or length)

    @once
    def demonstrations(self) -> Any:
        """What is learned, and what is held out, of a recipe that learns from written answers."""
        return self.page.load_data(self.config, self.tokenizer)

    @once
    def tasks(self) -> list[Task]:
        """The tasks, each with an environment that holds one conversation."""
        config = deepcopy(self.config)
        config.eval.batch_size = 1
        if "tasks" in self.keys:
            return self._evaluated(config)
        if "env.repeats" not in self.keys:
            return self._answered(config)
        config.train.prompts_per_batch = config.env.repeats = 1
        name = config.env.dataset
        files = config.env.data_files is not None
        key = "data.source" if name == ROWS else "env.data_files" if files else "env.dataset"
        env = builders.make_train_env(config, self.tokenizer, seed=config.seed)
        held_out = builders.make_eval_env(config, self.tokenizer)
        return [Task.of(name, env, key, self._reward_key("env.dataset"), held_out)]

    def _evaluated(self, config: Any) -> list[Task]:
        config.eval.repeats = 1
        make_env = importlib.import_module("evaluate_utils").make_env
        tasks = []
        for name in config.tasks:
            key = "data.source" if name == ROWS else f"data_files.{name}"
            env = make_env(config, name, self.tokenizer)
            tasks.append(Task.of(name, env, key, self._reward_key("tasks")))
        return tasks

    def _answered(self, config: Any) -> list[Task]:
        """The held-out rows of a recipe that learns from written answers, where it answers them."""
        if "reward.function" not in self.keys or not config.answers:
            return []
        held_out = self.demonstrations.held_out
        if held_out is None:
            return []
        make_env = importlib.import_module("sft_utils").make_answer_env
        env = make_env(config, held_out, self.tokenizer)
        return [Task.of("held-out rows", env, "data.source", self._reward_key("reward"))]

    def _reward_key(self, otherwise: str) -> str:
        reward = self.config.reward
        if reward.function is not None:
            return "reward.function"
        return "reward.components" if reward.components else otherwise

"""The configuration to check, and the objects with which its run would begin, each made once."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from torchrl_llm import modules
from torchrl_llm._settings import dotted, naming
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.data_config import ROWS
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.rewards.function_reward import of_program

T = TypeVar("T")

_OF_PROGRAM = f"{of_program.__module__}:{of_program.__name__}"
NUM_DRAWN = 256
"""Number of prompts of a task that are checked."""


def once(make: Callable[[Any], T]) -> T:
    """Property that is computed once; an exception is cached as well, and raised again.

    Args:
        make: the method.
    """

    @functools.wraps(make)
    def get(self: Any) -> Any:
        kept = vars(self).setdefault("_made", {})
        if make not in kept:
            try:
                kept[make] = make(self)
            except Exception as error:  # also those of a user's task or reward
                kept[make] = error
        if isinstance(kept[make], Exception):
            raise kept[make]
        return kept[make]

    return property(get)  # type: ignore[return-value]


class Task(NamedTuple):
    """A task of a configuration: its environment, one conversation at a time, and its prompts."""

    name: str
    env: Any
    held_out: Any  # a second environment, or None
    prompts: list[Chat]  # first prompts of a run
    data_key: str  # key of the data source
    reward_key: str


class Subject:
    """A configuration, and the objects with which its run would begin.

    Args:
        config: configuration of a recipe.
        page: module of the recipe's page.
        folder: output folder of a run.
        samples: whether to sample answers even if that takes long.
        calibrates: whether to run forward and backward to find the largest
            ``train.micro_token_budget``.

    Attributes:
        flat: dotted key to value.
        keys: dotted keys, groups included.
        reward_seconds: time for the reward of one answer, once measured; infinite after a timeout.
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
        parts = [key.split(".") for key in self.flat]
        self.keys = {".".join(names[: n + 1]) for names in parts for n in range(len(names))}

    @once
    def tokenizer(self) -> Any:
        """The model's tokenizer, after a check of the room in its context."""
        keys = ("inference_model.max_tokens", "eval.max_tokens")
        key = next((key for key in keys if key in self.keys), "")  # without sampling there is none
        return builders.make_tokenizer(self.config.model.name, self.flat.get(key, 1), key=key)

    @once
    def formatter(self) -> ChatFormatter:
        """The chat template with the model's tokenizer and the tools that the prompt describes."""
        tools = None
        if "env.tools" in self.keys:
            tools = builders.wrapper_options(self.config)["tools"]
        elif "tasks" in self.keys and self.config.model.is_told_of_tools:
            tools = [tool for task in self.tasks for tool in task.env.tool_schemas]
        return ChatFormatter(self.tokenizer, tools=tools, **self.config.model.template)

    @once
    def model(self) -> nn.Module:
        """The model with its adapters, without values of the weights."""
        settings = {}
        if "train_model" in self.keys:
            wanted = self.config.train_model
            settings = {"dtype": wanted.dtype, "lora": wanted.lora.arguments}
        with naming("model.name"):
            return modules.empty_model(self.config.model.name, **settings)

    @property
    def has_program(self) -> bool:
        """Whether the agent is a program that owns its loop."""
        return "agent.type" in self.keys and self.config.agent.owns_loop

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(each.numel() for each in self.model.parameters())

    @once
    def policy(self) -> Any:
        """The policy at the start of the run."""
        builders.set_threads(self.config)
        if "inference_model.max_tokens" not in self.keys:
            make = getattr(self.page, "make_policy", builders.load_policy)
            return make(self.config, self.tokenizer)
        return builders.make_policy(self.config)

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its answer may have together."""
        engine = self.flat.get("inference_model.max_model_len")
        with naming("model.name"):
            limits = (modules.context_length(self.config.model.name), engine)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_turns(self) -> int:
        """Largest number of model calls in an episode."""
        return builders.max_turns(self.config) if "env.max_tool_turns" in self.keys else 1

    @property
    def rows_per_step(self) -> int:
        """Answers, or rows, per step; for an evaluation, answers per batch."""
        names = ("train.prompts_per_batch", "train.batch_size", "eval.batch_size")
        size = next(self.flat[name] for name in names if name in self.keys)
        return size * self.flat.get("env.repeats", 1)

    @once
    def prompt_tokens(self) -> int:
        """Tokens of the longest drawn prompt."""
        chats = [chat for task in self.tasks for chat in task.prompts]
        return max(len(each.token_ids) for each in self.formatter.encode_batch(chats))

    @once
    def demonstrations(self) -> Any:
        """Training and held-out rows of a recipe that learns from written answers."""
        return self.page.load_data(self.config, self.tokenizer)

    @once
    def pairs(self) -> Any:
        """Training and held-out rows of a preference recipe; the rows are not checked."""
        return self.page.load_data(self.config, self.tokenizer, read_first=0)

    @property
    def data_key(self) -> str:
        """The key of the data source."""
        names = ("data.source", "env.data_files", "env.dataset", "tasks")
        return next((name for name in names if self.flat.get(name) is not None), "data.source")

    @once
    def tasks(self) -> list[Task]:
        """The tasks, each with an environment that holds one conversation."""
        config, tokenizer = deepcopy(self.config), self.tokenizer
        config.eval.batch_size = 1
        if self.has_program:
            config.agent = AgentConfig.of()  # the user's prompts; rows and reward of the task
            if config.env.dataset == ROWS and not config.reward.components:
                config.reward.function = config.reward.function or _OF_PROGRAM
        if "tasks" in self.keys:
            config.eval.repeats = 1
            make_env = importlib.import_module("evaluate_utils").make_env
            keys = {name: f"data_files.{name}" for name in config.tasks} | {ROWS: "data.source"}
            envs = {name: make_env(config, name, tokenizer) for name in config.tasks}
            return [self._task(name, env, keys[name], "tasks") for name, env in envs.items()]
        if "env.repeats" in self.keys:
            config.train.prompts_per_batch = 1
            config.env.repeats = task_class(config.env.dataset).num_players(config.env.options)
            env = builders.make_train_env(config, tokenizer, seed=config.seed)
            held_out = builders.make_eval_env(config, tokenizer)
            return [self._task(config.env.dataset, env, self.data_key, "env.dataset", held_out)]
        if not config.answers or self.demonstrations.held_out is None:
            return []
        make_env = importlib.import_module("sft_utils").make_answer_env
        env = make_env(config, self.demonstrations.held_out, tokenizer)
        return [self._task("held-out rows", env, "data.source", "reward")]

    def _task(self, name: str, env: Any, key: str, own_reward: str, held_out: Any = None) -> Task:
        reward = self.config.reward
        own_reward = "reward.components" if reward.components else own_reward
        reward_key = own_reward if reward.function is None else "reward.function"
        wanted = min(NUM_DRAWN, env.primer.num_rows or NUM_DRAWN)
        prompts = [env.reset()["history"].prompt.chats[0] for _ in range(wanted)]
        return Task(name, env, held_out, prompts, key, reward_key)

"""Environments over datasets: :class:`DatasetChatEnv`, and :class:`TaskEnv` with a reward.

A new task is a subclass of :class:`TaskEnv`. It defines the source of its rows, the parts of a row
that are ``query`` and ``answer``, and the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import yaml
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm._checked import In, checked
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.chat_env import DatasetChatEnv
from torchrl_llm.envs.layers import first_of, insert
from torchrl_llm.envs.transforms.answer_gates import AnswerGate, CutAnswers
from torchrl_llm.envs.transforms.episode_limits import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.function_reward import as_reward
from torchrl_llm.rewards.reward_parser import RewardParser
from torchrl_llm.tools.call_parsers import MessageCallParser
from torchrl_llm.tools.tool_transform import ToolTransform

__all__ = ["DatasetChatEnv", "TaskEnv"]


def check_split(split: str) -> None:
    """Raise ``ConfigError`` for a split other than ``"train"`` and ``"test"``."""
    if split not in ("train", "test"):
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")


PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
"""``SYSTEM_PROMPT`` of the tasks in this package."""
# Transforms that read the results of tools.
_AFTER_TOOLS = (AnswerGate, RewardParser, StepCounter)


def tool_schemas(env: DatasetChatEnv) -> list[dict[str, Any]]:
    """Schemas of an environment's tools whose calls the chat template writes.

    Args:
        env: the environment.
    """
    made = [each for each in env.transform if isinstance(each, ToolTransform)]
    told = [each for each in made if isinstance(each.parser, MessageCallParser)]
    return [schema for each in told for schema in each.schemas]


def insert_tools(env: DatasetChatEnv, tools: ToolTransform) -> DatasetChatEnv:
    """Insert tools before the reward and the turn limit, or last if there is neither.

    Args:
        env: the environment.
        tools: the transform.
    """
    return insert(env, tools, before=_AFTER_TOOLS)


class TaskEnv(DatasetChatEnv):
    """A :class:`~torchrl_llm.envs.DatasetChatEnv` with a reward and a limit of turns.

    A task defines ``DATASET`` (or :meth:`generate`, if it generates its rows), ``COLUMNS``,
    ``SYSTEM_PROMPT``, ``REWARD`` (or :meth:`make_reward`, if the reward has arguments) and
    :meth:`make_row`; a task with tools or several turns also defines :meth:`make_tools`,
    ``MAX_STEPS`` and ``MAX_AUXILIARY_TURNS``.

    Tool transforms that are appended later are inserted before the reward and the limit, because
    both read the results of the tools.

    Args:
        dataset: the data; the task's own (``DATASET``) if neither this nor ``data_files`` is given.
        data_files: a file or several files, instead of ``dataset``, of any kind that
            :func:`~torchrl_llm.data.row_files.load_rows` reads.
        name: configuration of a hub dataset.
        split: split of the data; see the task.
        compute_reward: append the task's reward.
        reward: reward instead of the task's own: a function of ``(response, answer)`` or
            ``(response, row)``, or anything else that :func:`~torchrl_llm.rewards.as_reward`
            accepts.
        max_steps: turns after which an episode is cut; turns that only call tools to think do not
            count. ``None`` for no limit, ``"task"`` for the task's own limit (``MAX_STEPS``).
        cut_penalty: amount subtracted from the reward of an answer that was cut at its token limit,
            see :class:`~torchrl_llm.envs.transforms.CutAnswers`.
        kwargs: arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Raises:
        ConfigError: both ``dataset`` and ``data_files`` are given, ``reward`` is not a reward, or
            the penalty is negative.
        DataError: for data that is missing, malformed or lacks a column.
    """

    DATASET: ClassVar[str | None] = None
    NAME: ClassVar[str | None] = None
    REWARD: ClassVar[type[RewardParser] | None] = None
    MAX_STEPS: ClassVar[int | None] = 1
    MAX_AUXILIARY_TURNS: ClassVar[int] = 0
    settings: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of :meth:`generate`; set before this class's ``__init__`` runs."""
    PROGRAM: ClassVar[str | None] = None
    """The program that plays the task, if the environment's loop cannot."""
    NEEDS_LARGER_MODEL: ClassVar[bool] = False
    """Whether the tiny model that ships with the package cannot learn the task."""

    @checked
    def __init__(
        self,
        *,
        dataset: Any = None,
        data_files: str | Path | list[str | Path] | None = None,
        name: str | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        reward: Any = None,
        max_steps: int | Literal["task"] | None = "task",
        cut_penalty: Annotated[float, In("[0, inf)")] = 0.0,
        **kwargs: Any,
    ) -> None:
        if reward is not None and not compute_reward:
            raise ConfigError("reward has no effect with compute_reward=False")
        dataset = self._dataset(dataset, data_files)
        if dataset is None:
            dataset = self.default_dataset(split, **self.settings)
            name = self.NAME if name is None else name
        else:
            defaults = inspect.signature(self.generate).parameters
            changed = [f"{k}={v!r}" for k, v in self.settings.items() if v != defaults[k].default]
            if changed:
                raise ConfigError(f"{', '.join(changed)} has no effect on dataset or data_files")
        super().__init__(dataset=dataset, name=name, split=split, **kwargs)
        for tool in self.make_tools():
            self.append_transform(tool)
        if compute_reward:
            self.append_transform(CutAnswers(cut_penalty))
            self.append_transform(self.make_reward() if reward is None else as_reward(reward))
        self.limit_steps(max_steps)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        compute_reward: bool = False,
        max_steps: int | Literal["task"] | None = None,
        **kwargs: Any,
    ) -> TaskEnv:
        """The task over rows that have its columns; without its reward by default, as in TorchRL.

        Args:
            dataloader: see :meth:`~torchrl_llm.envs.DatasetChatEnv.from_dataloader`.
            compute_reward: append the task's reward.
            max_steps: as for the constructor; no limit if not given.
            kwargs: as for :meth:`~torchrl_llm.envs.DatasetChatEnv.from_dataloader`.
        """
        return super().from_dataloader(
            dataloader, compute_reward=compute_reward, max_steps=max_steps, **kwargs
        )

    @staticmethod
    def _dataset(dataset: Any, data_files: str | Path | list[str | Path] | None) -> Any:
        """The data from either argument; ``None`` if neither is given."""
        if data_files is None:
            return dataset
        if dataset is not None:
            raise ConfigError("pass dataset or data_files, not both")
        files = data_files if isinstance(data_files, (list, tuple)) else [data_files]
        return [Path(file) for file in files]

    def limit_steps(self, max_steps: int | Literal["task"] | None) -> None:
        """Cut episodes after a number of steps.

        Args:
            max_steps: as for the constructor.
        """
        max_steps = self.MAX_STEPS if max_steps == "task" else max_steps
        if max_steps is not None:
            self.append_transform(StepCounter(max_steps=max_steps))

    @classmethod
    def max_turns(cls, max_steps: int | None = None) -> int | None:
        """Return the maximum number of turns of the model in an episode; ``None`` without a limit.

        Args:
            max_steps: limit of steps; the task's own if not given.
        """
        steps = cls.MAX_STEPS if max_steps is None else max_steps
        return None if steps is None else steps * (1 + cls.MAX_AUXILIARY_TURNS)

    @classmethod
    def num_players(cls, options: Mapping[str, Any]) -> int:
        """Rows of an episode; more than one where players share it.

        Args:
            options: arguments of the task.
        """
        return 1

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Append a transform; one with tools comes before the reward and the limit of turns.

        Args:
            transform: the transform.
        """
        if isinstance(transform, ToolTransform) and first_of(self, _AFTER_TOOLS) is not None:
            return insert_tools(self, transform)
        return super().append_transform(transform)

    def make_tools(self) -> Sequence[Transform]:
        """Transforms with the task's tools; none by default."""
        return ()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools whose calls the chat template writes, for a policy's ``tools``.

        Tools with their own parser are not included: no template describes the form of their calls.
        """
        return tool_schemas(self)

    @classmethod
    def default_dataset(cls, split: str | None, **settings: Any) -> Any:
        """The task's own data: ``DATASET``, or rows that it generates (``train`` by default)."""
        if cls.DATASET is None:
            return cls.generate("train" if split is None else split, **settings)
        return cls.DATASET

    @classmethod
    def generate(cls, split: str) -> GeneratedRows:
        """Rows that the task generates; a subclass may have settings as further arguments.

        Args:
            split: ``"train"`` or ``"test"``; no row is in both.
        """
        raise ConfigError(f"{cls.__name__} has no data of its own: pass dataset or data_files")

    def make_reward(self) -> RewardParser:
        """The task's reward: a ``REWARD`` with its defaults, if not overridden."""
        if self.REWARD is None:
            raise ConfigError(f"{type(self).__name__} has no reward: pass compute_reward=False")
        return self.REWARD()

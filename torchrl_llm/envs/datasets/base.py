"""Environments over data sets: :class:`DatasetChatEnv`, and :class:`TaskEnv` with a reward.

A new task is a subclass of :class:`TaskEnv` in a file of its own: where its rows come from, what of
a row is the ``query`` and what the ``answer``, and which reward compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torchrl.data import Composite
from torchrl.envs import Compose, Transform, TransformedEnv

from torchrl_llm.envs.chat import ChatEnv, Mode
from torchrl_llm.envs.datasets.loading import MappedRows, RowLoader, load_rows
from torchrl_llm.envs.reward.base import RewardParser
from torchrl_llm.envs.transforms.dataloading import DataLoadingPrimer
from torchrl_llm.envs.transforms.ray_dataloading import RayDataLoadingPrimer
from torchrl_llm.envs.transforms.step_counter import StepCounter
from torchrl_llm.envs.transforms.tools.base import ToolTransform
from torchrl_llm.envs.transforms.tools.parsers import MessageCallParser
from torchrl_llm.errors import ConfigError, DataError

__all__ = ["DatasetChatEnv", "TaskEnv"]


class _Loader:
    """Marks a data loader that is to be used as it is."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader


class DatasetChatEnv(TransformedEnv):
    """A :class:`ChatEnv` whose conversations start from the rows of a data set.

    It is a ``TransformedEnv`` over a :class:`~torchrl_llm.envs.ChatEnv` with a
    :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer`; append further transforms to it.
    Subclasses turn the rows of a file into ``query`` and ``answer`` in :meth:`make_row`.

    Args:
        dataset: a sequence of dicts, a JSON-lines file, several of these, or the id of a data set
            on the hub; see :func:`~torchrl_llm.envs.datasets.loading.load_rows`.
        shuffle: whether each epoch has an order of its own.
        name: configuration of a hub data set.
        split: split of a hub data set; ``train`` if not given.
        num_envs: ``B``, conversations at a time.
        repeats: how many conversations each row starts; they share a ``group_id``.
        batch_size_dl: how many rows ``collate_fn`` sees at a time.
        seed: seed of the order; ``set_seed`` starts the data over with another one.
        group_repeats: promise that all repeats of a row start in the same reset; ``num_envs`` must
            be a multiple of ``repeats``.
        tokenizer: see :class:`ChatEnv`.
        device: device of the tensors.
        template_kwargs: see :class:`ChatEnv`.
        collate_fn: list of rows to one dict of columns.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        data_key: the column that holds the user's message.
        primers: specs of the columns, taken from the first row if not given.
        system_prompt: first message; the class's ``SYSTEM_PROMPT`` if not given.
        worker_id: number of this worker, see :class:`~torchrl_llm.envs.ids.IdCounter`.
        ray_backend: draw the rows from an actor that all environments with the same
            ``dataloader_actor_name`` ask, see
            :class:`~torchrl_llm.envs.transforms.RayDataLoadingPrimer`.
        dataloader_actor_name: name of that actor.

    ``state_dict()`` holds the position in the data and all counters, for an exact resume.

    Raises:
        DataError: for data that is missing, malformed or lacks a column.
        ConfigError: for impossible arguments.

    Example:
        >>> rows = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]
        >>> env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=2)
        >>> env.reset()["history"].prompt.content
        [['0 + 1 ='], ['1 + 1 =']]
    """

    SYSTEM_PROMPT: str | None = None
    COLUMNS: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        dataset: Any,
        shuffle: bool = True,
        name: str | None = None,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        device: torch.device | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
        input_mode: Mode = "history",
        data_key: str | None = None,
        primers: Composite | None = None,
        system_prompt: str | None = None,
        worker_id: int | None = None,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
    ) -> None:
        if dataloader_actor_name is not None and not ray_backend:
            raise ConfigError("dataloader_actor_name has no effect without ray_backend=True")
        data_key = "query" if data_key is None else data_key
        if isinstance(dataset, _Loader):
            loader = dataset.loader
        else:
            rows = load_rows(dataset, columns=self.COLUMNS, name=name, split=split)
            loader = RowLoader(
                MappedRows(rows, self.make_row),
                shuffle=shuffle,
                seed=seed,
                batch_size=batch_size_dl,
                collate_fn=collate_fn,
            )
        make_primer: Callable[..., DataLoadingPrimer] = DataLoadingPrimer
        if ray_backend:
            make_primer = partial(RayDataLoadingPrimer, actor_name=dataloader_actor_name)
        primer = make_primer(
            loader,
            primers=primers,
            repeats=repeats,
            device=device,
            group_repeats=group_repeats,
            worker_id=worker_id,
        )
        primer.check_batch(num_envs)
        if data_key not in primer.data_keys:
            raise DataError(
                f"the rows lack the column {data_key!r}; they have {sorted(primer.data_keys)}"
            )
        base_env = ChatEnv(
            input_mode=input_mode,
            batch_size=(num_envs,),
            system_prompt=self.SYSTEM_PROMPT if system_prompt is None else system_prompt,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=data_key,
            device=device,
            worker_id=worker_id,
        )
        super().__init__(base_env, Compose(primer))

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of the data set as the environment hands it out; the row itself here."""
        return row

    @classmethod
    def from_dataloader(
        cls, dataloader: Iterable[Any], *, batch_size: Sequence[int] = (1,), **kwargs: Any
    ) -> DatasetChatEnv:
        """An environment over a data loader that exists already.

        Args:
            dataloader: see :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer`.
            batch_size: ``(B,)``, conversations at a time.
            kwargs: the constructor's arguments, except those that build the loader.

        Raises:
            ConfigError: for an argument that only the loader could honour.
        """
        own = {"dataset", "shuffle", "name", "split", "batch_size_dl", "seed", "collate_fn"}
        if unused := sorted(own & set(kwargs)):
            raise ConfigError(f"{unused} would have no effect: the data loader decides these")
        if len(batch_size) != 1:
            raise ConfigError(f"batch_size must be (B,), got {tuple(batch_size)}")
        return cls(dataset=_Loader(dataloader), num_envs=batch_size[0], **kwargs)

    @property
    def primer(self) -> DataLoadingPrimer:
        """The transform that draws the rows."""
        return next(t for t in self.transform if isinstance(t, DataLoadingPrimer))

    def reset_dataloader(self) -> DatasetChatEnv:
        """Start the data over."""
        self.primer.reset_dataloader()
        return self

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Start the data over, in the order of another seed.

        Returns:
            The seed for the next environment.
        """
        self.primer.reset_dataloader(seed)
        return super().set_seed(seed, static_seed=static_seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """State of the transforms (position in the data, counters) and of the base environment."""
        return {
            "transform": self.transform.state_dict(*args, **kwargs),
            "base_env": self.base_env.state_dict(*args, **kwargs),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.transform.load_state_dict(state_dict["transform"], **kwargs)
        self.base_env.load_state_dict(state_dict["base_env"], **kwargs)


class TaskEnv(DatasetChatEnv):
    """A :class:`~torchrl_llm.envs.DatasetChatEnv` with a reward and a limit of turns.

    A task writes ``DATASET`` (or overrides :meth:`default_dataset`), ``COLUMNS``,
    ``SYSTEM_PROMPT``, :meth:`make_row` and :meth:`make_reward`; one with tools or several turns
    also :meth:`make_tools`, ``MAX_STEPS`` and ``MAX_AUXILIARY_TURNS``.

    Tool transforms that are appended later are put in front of the reward and the limit, which both
    look at what the tools have said of a turn.

    Args:
        dataset: the data; the task's own (``DATASET``) if neither this nor ``data_files`` is given.
        data_files: a JSON-lines file or several of them, instead of ``dataset``.
        name: configuration of a hub data set.
        split: split of the data; see the task.
        compute_reward: append the task's reward.
        max_steps: turns after which an episode is cut, those that only called tools to think not
            counted; ``None`` never cuts, ``"task"`` is the task's own limit (``MAX_STEPS``).
        kwargs: arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Raises:
        ConfigError: when both ``dataset`` and ``data_files`` are given.
        DataError: for data that is missing, malformed or lacks a column.
    """

    DATASET: ClassVar[str | None] = None
    NAME: ClassVar[str | None] = None
    MAX_STEPS: ClassVar[int | None] = 1
    MAX_AUXILIARY_TURNS: ClassVar[int] = 0

    def __init__(
        self,
        *,
        dataset: Any = None,
        data_files: str | Path | list[str | Path] | None = None,
        name: str | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        max_steps: int | Literal["task"] | None = "task",
        **kwargs: Any,
    ) -> None:
        if dataset is not None and data_files is not None:
            raise ConfigError("pass dataset or data_files, not both")
        if data_files is not None:
            files = data_files if isinstance(data_files, (list, tuple)) else [data_files]
            dataset = [Path(file) for file in files]
        elif dataset is None:
            dataset = self.default_dataset(split)
            name = self.NAME if name is None else name
        super().__init__(dataset=dataset, name=name, split=split, **kwargs)
        for tool in self.make_tools():
            self.append_transform(tool)
        if compute_reward:
            self.append_transform(self.make_reward())
        self.limit_steps(max_steps)

    def limit_steps(self, max_steps: int | Literal["task"] | None) -> None:
        """Cut episodes after so many steps.

        Args:
            max_steps: as for the constructor.
        """
        max_steps = self.MAX_STEPS if max_steps == "task" else max_steps
        if max_steps is not None:
            self.append_transform(StepCounter(max_steps=max_steps))

    @classmethod
    def max_turns(cls, max_steps: int | None = None) -> int | None:
        """How often the model can be asked in an episode; ``None`` without a limit.

        Args:
            max_steps: limit of steps; the task's own if not given.
        """
        steps = cls.MAX_STEPS if max_steps is None else max_steps
        return None if steps is None else steps * (1 + cls.MAX_AUXILIARY_TURNS)

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Append a transform; one with tools comes before the reward and the limit of turns.

        Args:
            transform: the transform.
        """
        if isinstance(transform, ToolTransform):
            after = (RewardParser, StepCounter)
            for index, present in enumerate(self.transform):
                if isinstance(present, after):
                    return self.insert_transform(index, transform)
        return super().append_transform(transform)

    def make_tools(self) -> Sequence[Transform]:
        """Transforms with the task's tools; none by default."""
        return ()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that are called as the chat template writes calls, for a policy's ``tools``.

        Those with a parser of their own are called in a form that no template describes.
        """
        made = [each for each in self.transform if isinstance(each, ToolTransform)]
        told = [each for each in made if isinstance(each.parser, MessageCallParser)]
        return [schema for each in told for schema in each.schemas]

    @classmethod
    def default_dataset(cls, split: str | None) -> Any:
        """The task's own data: ``DATASET``, or rows that a task makes itself for each split."""
        if cls.DATASET is None:
            raise ConfigError(f"{cls.__name__} has no data of its own: pass dataset or data_files")
        return cls.DATASET

    def make_reward(self) -> RewardParser:
        """The task's reward."""
        raise ConfigError(f"{type(self).__name__} has no reward: pass compute_reward=False")

"""Base of the environments whose world changes by the model's actions.

A game, a remote server and a simulator are each a :class:`WorldTransform`, which gets the model's
turns and returns the world's reactions. The base class writes messages, rewards, ends and errors.
:class:`WorldEnv` is the environment around such a transform. A plain task, whose answers are only
scored, is a :class:`~torchrl_llm.envs.datasets.TaskEnv` with a reward.

Next: :mod:`torchrl_llm.envs.games.game_env` plays games, :mod:`torchrl_llm.envs.libs.sessions`
drives remote worlds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.failures import NO_FAILURE, WORLD, Failure, tell_failures
from torchrl_llm.data.row_files import GeneratedRows, load_rows
from torchrl_llm.envs.actions import (
    CUT_OFF,
    ActionParser,
    ActionTool,
    IncompleteCompletion,
    call_link,
)
from torchrl_llm.envs.datasets.task_env import TaskEnv, check_split
from torchrl_llm.envs.transforms.answer_gates import ModelTurn, read_turns
from torchrl_llm.envs.transforms.episode_limits import write_reason
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards import reward_parser, reward_scorer
from torchrl_llm.tools.call_parsers import MessageCallParser
from torchrl_llm.tools.tool_transform import ToolTransform

_NUM_TRAIN, _NUM_TEST = 65_536, 1_024


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """How the world reacts to a turn.

    Args:
        observation: the text for the model.
        reward: reward of this turn.
        for_form: reward of the action's parser, added to ``reward``.
        terminated: the episode has ended by its rules.
        truncated: the world has cut it.
        success: the model has solved the task.
        error: a failure, which makes the reward invalid and ends the episode.
    """

    observation: str
    reward: float = 0.0
    for_form: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    error: Exception | None = None

    def checked(self) -> Self:
        """The reaction; or a failure if its reward is not finite or a flag is no bool."""
        error = self.error
        if error is None:
            names = ("terminated", "truncated", "success")
            score = (self.reward, self.terminated, self.truncated, self.success)
            if not self.for_form and reward_scorer.is_usual(score):
                return self
            try:
                reward = reward_scorer.checked_score(self.reward).reward + self.for_form
                flags = {
                    name: reward_scorer.checked_flag(name, getattr(self, name)) for name in names
                }
                return replace(self, reward=reward, for_form=0.0, **flags)
            except RewardError as raised:
                error = raised
        return replace(self, error=error, terminated=True, truncated=False, success=False)


class WorldTransform(Transform):
    """Lets a world react to the turns of the model; subclasses write :meth:`react`.

    At each step it reacts to the rows that are stepped, except turns that only called tools to
    think (``("tools", "auxiliary")``). The observation is appended to the next prompt as a user's
    message, or as a tool's if it answers a call. It writes

    - ``"reward"``, float32 ``[B, 1, 1]``; ``"success"``, bool ``[B, 1, 1]``; ``"reward_valid"``,
      bool ``[B]``; and ``"error"``, the strings of a :class:`~torchrl_llm.rewards.RewardParser`;
    - ``"done"``, ``"terminated"``, ``"truncated"`` and ``"truncation_reason"`` (``ENV``) if an
      episode ends.

    A reaction with an error ends the row's episode with an invalid NaN reward; the log shows the
    first error of each kind.

    Args:
        parser: reads actions.
        with_reward: write the reward and its related keys.
        accept_cut: also read answers that were cut at their token limit.
        tool_role: role of the messages that answer a tool call.
    """

    def __init__(
        self,
        parser: ActionParser,
        *,
        with_reward: bool = True,
        accept_cut: bool = False,
        tool_role: str = "tool",
    ) -> None:
        super().__init__()
        self.accept_cut = accept_cut
        self.parser = parser
        self.with_reward = with_reward
        self.tool_role = tool_role

    @abstractmethod
    def react(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> Sequence[Reaction]:
        """Return the reactions of the world.

        Args:
            td: all rows, as the policy left them.
            turns: the rows that act.

        Returns:
            A reaction for each of ``turns``; a failure is a reaction with an error.
        """

    def write(
        self, td: TensorDictBase, next_td: TensorDictBase, reactions: Sequence[Reaction | None]
    ) -> None:
        """Write further columns of this kind of world; none by default.

        Args:
            td: all rows.
            next_td: where to write.
            reactions: reaction to the step in each row; ``None`` for none.
        """

    def answer(self, turn: ModelTurn) -> Mapping[str, Any]:
        """The message of a turn.

        Args:
            turn: the model's turn.

        Raises:
            ActionError: there is no message, or it was cut.
        """
        return turn.said(accept_cut=self.accept_cut)

    def reply(self, turn: ModelTurn, text: str) -> dict[str, Any]:
        """The message with the result of a turn; a tool's message if it answers a call.

        Args:
            turn: the model's turn.
            text: the text for the model.
        """
        calls = () if turn.message is None else turn.message.get("tool_calls") or ()
        if self.parser.form != "call" or not calls or turn.answered:
            return {"role": self.parent.base_env.user_role, "content": text}
        reply = {"role": self.tool_role, "content": text, "name": self.parser.name}
        identity = calls[-1].get("id")
        return reply if identity is None else {**reply, "tool_call_id": identity}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        size = next_tensordict.batch_size.numel()
        turns = read_turns(tensordict, next_tensordict, self.parent.mode)
        by_row = self._react(tensordict, next_tensordict, turns)
        _write_ends(next_tensordict, by_row)
        if self.with_reward:
            _write_reward(tensordict, next_tensordict, by_row)
            self._write_cuts(next_tensordict, turns)
        else:
            tell_failures([_told(each) for each in by_row], tensordict.__getitem__, size)
        self.write(tensordict, next_tensordict, by_row)
        return next_tensordict

    def _react(
        self, td: TensorDictBase, next_td: TensorDictBase, turns: Sequence[ModelTurn]
    ) -> list[Reaction | None]:
        """Append the reactions to prompts that continue; return one per row, ``None`` for none."""
        size = next_td.batch_size.numel()
        replies: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        by_row: list[Reaction | None] = [None] * size
        for turn, reaction in zip(turns, self.react(td, turns), strict=True):
            checked = by_row[turn.row] = reaction.checked()
            replies[turn.row] = [self.reply(turn, checked.observation)]
        self.parent.mode.append(td, next_td, replies)
        return by_row

    def _write_cuts(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> None:
        """Write for each cut turn why it was no action."""
        if not self.accept_cut and (cut := [turn.row for turn in turns if turn.cut]):
            failures = reward_parser.written_failures(td)
            for row in cut:
                if not failures[row].kind:
                    failures[row] = Failure.told(
                        IncompleteCompletion.__name__, CUT_OFF, source=WORLD
                    )
            reward_parser.set_errors(td, failures)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the reward's keys."""
        if not self.with_reward:
            return reward_spec
        return reward_parser.add_reward_specs(reward_spec, ["reward"], "success")


def _write_reward(
    before: TensorDictBase, td: TensorDictBase, reactions: Sequence[Reaction | None]
) -> None:
    # Rows that do not act keep a neutral reward, as EnvBase gives a row that is not stepped.
    cell = (len(reactions), 1, 1)
    errors = [None if reaction is None else reaction.error for reaction in reactions]
    rewards = [
        float("nan") if error is not None else 0.0 if reaction is None else reaction.reward
        for reaction, error in zip(reactions, errors, strict=True)
    ]
    success = [reaction is not None and reaction.success for reaction in reactions]
    td.set("reward", torch.tensor(rewards, dtype=torch.float32, device=td.device).view(cell))
    td.set("success", torch.tensor(success, device=td.device).view(cell))
    td.set("reward_valid", torch.tensor([e is None for e in errors], device=td.device))
    reward_parser.write_errors(td, [_told(reaction) for reaction in reactions], before)


def _told(reaction: Reaction | None) -> Failure:
    error = None if reaction is None else reaction.error
    return NO_FAILURE if error is None else Failure.of(error, WORLD)


def _write_ends(td: TensorDictBase, reactions: Sequence[Reaction | None]) -> None:
    def flag(ends: Sequence[bool]) -> Tensor:
        return torch.tensor(ends, dtype=torch.bool, device=td.device).unsqueeze(-1)

    rules = [reaction is not None and reaction.terminated for reaction in reactions]
    cuts = [reaction is not None and reaction.truncated for reaction in reactions]
    if not any(rules) and not any(cuts):
        return
    terminated = flag(rules)
    truncated = flag(cuts) & ~terminated
    reward_parser.raise_flags(
        td, terminated=terminated, truncated=truncated, done=terminated | truncated
    )
    write_reason(td, truncated, TruncationReason.ENV)


class WorldEnv(TaskEnv):
    """Base of the environments with a :class:`WorldTransform`.

    Args:
        world: the transform.
        rows: the data rows with which episodes begin.
        max_steps: turns after which an episode is cut; ``None`` for no limit, ``"task"`` for
            ``MAX_STEPS``.
        template_kwargs: as in :class:`~torchrl_llm.envs.ChatEnv`; the action tool is added to
            ``tools`` in text and tokens mode.
        kwargs: further arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`.
    """

    WORLD: ClassVar[Callable[[], Any] | None] = None
    """The class of the user's world: a session, or the rules of a game."""
    WORLD_FIRST: ClassVar[bool] = False
    """Whether the world comes before the transform that draws the rows."""

    def __init__(
        self,
        world: WorldTransform,
        rows: Any,
        *,
        max_steps: int | Literal["task"] | None = "task",
        template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        parser = call_link(world.parser)
        if parser is not None and kwargs.get("input_mode", "history") != "history":
            given = dict(template_kwargs or {})
            template_kwargs = {**given, "tools": [*(given.get("tools") or ()), parser.tool.schema]}
        super().__init__(
            dataset=rows,
            compute_reward=False,
            max_steps=None,
            template_kwargs=template_kwargs,
            **kwargs,
        )
        self.insert_transform(0 if self.WORLD_FIRST else len(self.transform), world)
        self.limit_steps(max_steps)

    @classmethod
    def of(cls, world: type) -> type[Self]:
        """Make the environment class of a world that is constructed without arguments.

        Args:
            world: a class.
        """
        own = {"WORLD": world, "PLAYERS": getattr(world, "players", ())}
        told = {name: getattr(world, name) for name in ("__doc__", "__module__")}
        return type(world.__name__, (cls,), own | told)

    @classmethod
    def generate(cls, split: str) -> GeneratedRows:
        """The seeds of a split; no seed is in both."""
        check_split(split)
        if split == "test":
            return GeneratedRows(_seed_row, _NUM_TEST, offset=_NUM_TRAIN)
        return GeneratedRows(_seed_row, _NUM_TRAIN)

    @classmethod
    def read_rows(
        cls,
        dataset: Any,
        data_files: str | Path | list[str | Path] | None,
        split: str | None,
        *,
        columns: Sequence[str],
    ) -> Any:
        """Load the rows with which episodes begin.

        Args:
            dataset: rows; the rows of ``split`` if neither this nor ``data_files`` is given.
            data_files: a JSON-lines file, or several.
            split: ``"train"`` or ``"test"``.
            columns: names that rows must have.

        Raises:
            ConfigError: when both are given.
            DataError: for data that is missing, malformed or lacks a column.
        """
        dataset = cls._dataset(dataset, data_files)
        if dataset is None:
            dataset = cls.default_dataset(split)
        return load_rows(dataset, columns=columns)

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Append a transform; one with tools comes before the world.

        Args:
            transform: the transform.

        Raises:
            ConfigError: the actions are tool calls, and the transform does not know their tool.
        """
        worlds = [i for i, t in enumerate(self.transform) if isinstance(t, WorldTransform)]
        if not isinstance(transform, ToolTransform) or not worlds:
            return super().append_transform(transform)
        parser = call_link(self.world.parser)
        if parser is not None and parser.name not in transform.tools:
            raise ConfigError(
                f"the transform would answer calls of {parser.name!r} as calls of an unknown tool: "
                f"give it env.action_tool next to {sorted(transform.tools)}"
            )
        return self.insert_transform(worlds[0], transform)

    def read_with(self, parser: ActionParser) -> None:
        """Read actions with a different parser.

        Args:
            parser: the parser.

        Raises:
            ConfigError: it reads tool calls, and the texts or tokens of this environment are
                templated without the tool.
        """
        new, mode = call_link(parser), self.base_env.input_mode
        if new is not None and mode != "history" and call_link(self.world.parser) is None:
            raise ConfigError(
                f"{type(new).__name__} reads calls of {new.name!r}, which the prompts of this "
                f"environment in {mode} mode do not describe; give it the parser when it is made"
            )
        old, prompt = self.world.parser, self.base_env.system_prompt
        self.world.parser = parser
        if prompt is not None and old.help and prompt.endswith(old.help):
            self.base_env.give_system_prompt(prompt.removesuffix(old.help) + parser.help)

    @property
    def world(self) -> WorldTransform:
        """The transform with the world."""
        return next(t for t in self.transform if isinstance(t, WorldTransform))

    @property
    def acts_by_calls(self) -> bool:
        """Whether an action is a tool call."""
        return call_link(self.world.parser) is not None

    @property
    def action_tool(self) -> ActionTool:
        """The tool whose call is an action; chat templates take its ``schema``.

        Raises:
            ConfigError: the actions of this environment are no tool calls.
        """
        parser = call_link(self.world.parser)
        if parser is None:
            form = self.world.parser.form
            raise ConfigError(f"actions={form!r} are no tool calls; pass actions='call'")
        return parser.tool

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of the transforms' tools, and of the action tool if actions are tool calls."""
        schemas, parser = super().tool_schemas, call_link(self.world.parser)
        if parser is None or not isinstance(parser.calls, MessageCallParser):
            return schemas
        acting = parser.tool.schema
        return schemas if acting in schemas else [*schemas, acting]


def _seed_row(index: int) -> Mapping[str, Any]:
    return {"seed": index}

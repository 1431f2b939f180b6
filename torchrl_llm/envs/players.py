"""Episodes of several players: ``MultiAgentChatEnv``, and the world that they share.

A player is a row. An episode of ``P`` players is ``P`` consecutive rows of the environment. They
share one ``"episode_id"``, one drawn row of data and one ``"group_id"``; each has its own name
(``"agent"``) and conversation. ``"active"`` marks the players who must act next: collectors and
:func:`~torchrl_llm.evaluation.evaluate` step those rows only.

Next: :mod:`torchrl_llm.envs.games.game_env` plays games.

Shape legend: ``B`` rows, ``P`` of each episode.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm._checked import checked
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.actions import ActionParser
from torchrl_llm.envs.ids import IdCounter
from torchrl_llm.envs.transforms.answer_gates import ModelTurn
from torchrl_llm.envs.transforms.context_strategy import chat_env_of
from torchrl_llm.envs.transforms.episode_limits import write_reason
from torchrl_llm.envs.world import Reaction, WorldEnv, WorldTransform
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.reward_parser import raise_flags
from torchrl_llm.tools.tool_transform import ToolTransform

TOLD_KEY = "untold"
Rewards = Literal["own", "team"]
_NOTHING = Reaction(observation="")


def joined(*texts: str) -> str:
    """Join texts for a player, one line per text; empty texts are left out.

    Args:
        texts: the texts.
    """
    return "\n".join(filter(None, texts))


class Episode(NamedTuple):
    """Turns of the players of an episode in a step.

    Attributes:
        rows: row of each player, by name.
        turns: turn of each player who acted; none for a player who only called tools to think.
        active: who had to act.
    """

    rows: Mapping[str, int]
    turns: Mapping[str, ModelTurn]
    active: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EpisodeReaction:
    """How the world reacts to the players of an episode.

    Args:
        players: a reaction for each player who acted, or who gets a text or a reward. An empty
            observation adds no text.
        active: who must act next; none if the episode ends.
        error: a failure for all of them, which ends the episode without a valid reward.
    """

    players: Mapping[str, Reaction]
    active: Collection[str] = ()
    error: Exception | None = None


class Opening(NamedTuple):
    """How an episode begins.

    Attributes:
        observations: the text for each player who must act.
        columns: further text columns of the episode's rows.
    """

    observations: Mapping[str, str]
    columns: Mapping[str, str]


class PlayersTransform(WorldTransform):
    """A world of several players; subclasses write :meth:`open` and :meth:`react_together`.

    If players share an episode, it writes these columns, in addition to the columns of every
    :class:`~torchrl_llm.envs.world.WorldTransform`:

    - ``"agent"``, the name of the row's player, and ``"episode_id"``, int64 ``[B]``;
    - ``"active"``, bool ``[B, 1]``: the row's player must act next;
    - ``"untold"``, the text that the player has not read yet.

    Texts for a player are kept until the player must act; they then become one user message. A
    single player also reads the text that ends the episode. The reward and the end of a step are
    written in that step for all players. If a player did not act, the reward and the end are in a
    row that is not stepped; the collector moves them to the last row in which the player acted.

    Args:
        players: names of the players with a row, in the order of their rows.
        parser: reads actions.
        rewards: ``"own"``, or ``"team"``: each player gets the sum of the rewards of all.
        with_reward: see :class:`~torchrl_llm.envs.world.WorldTransform`.
        accept_cut: see :class:`~torchrl_llm.envs.world.WorldTransform`.
        worker_id: number of this worker for ``"episode_id"``.
        shared: whether there are several players, including scripted ones without a row. A single
            player acts in every step and reads everything at once, so these columns are not needed.

    Raises:
        ConfigError: no player, a name twice, or an unknown word for ``rewards``.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    """Names of the columns of an :class:`Opening`."""

    @checked
    def __init__(
        self,
        players: Sequence[str],
        parser: ActionParser,
        *,
        rewards: Rewards = "own",
        with_reward: bool = True,
        accept_cut: bool = False,
        worker_id: int | None = None,
        shared: bool = True,
    ) -> None:
        super().__init__(parser, with_reward=with_reward, accept_cut=accept_cut)
        if not players or len(set(players)) < len(players):
            raise ConfigError(f"players must be different names, got {list(players)}")
        self.players, self.rewards = tuple(players), rewards
        self.shared = shared
        self._texts = (*(("agent", TOLD_KEY) if self.shared else ()), *self.COLUMNS)
        self._episodes = IdCounter("episode", worker_id)

    @abstractmethod
    def open(self, row: Mapping[str, Any]) -> Opening:
        """How an episode begins.

        Args:
            row: the drawn row of data.
        """

    @abstractmethod
    def react_together(
        self, td: TensorDictBase, episodes: Sequence[Episode]
    ) -> Sequence[EpisodeReaction]:
        """How the world reacts to the players of each episode.

        Args:
            td: all rows, as the policy left them.
            episodes: the episodes in which a player acted.

        Returns:
            A reaction for each of ``episodes``. If one episode fails, its reaction has an error; if
            this method raises, all episodes fail.
        """

    def react(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> Sequence[Reaction]:
        """Not used: a world of several players reacts to whole episodes."""
        raise NotImplementedError

    # Reset

    def _episodes_of(self, size: int) -> list[range]:
        width = len(self.players)
        return [range(first, first + width) for first in range(0, size, width)]

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        size = tensordict.batch_size.numel()
        mask = tensordict.get("_reset", None)
        begins = [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()
        query = chat_env_of(self).data_key
        texts: dict[str, list[str]] = {name: [""] * size for name in (query, *self._texts)}
        active = torch.zeros(size, 1, dtype=torch.bool)
        ids = torch.full((size,), -1, dtype=torch.int64)
        for rows in self._episodes_of(size):
            starts = {begins[row] for row in rows}
            if starts == {True}:
                ids[list(rows)] = self._episodes.next_id()
                opening = self.open(_data_of(tensordict, rows[0]))
                for row, player in zip(rows, self.players, strict=True):
                    if "agent" in texts:
                        texts["agent"][row] = player
                    texts[query][row] = opening.observations.get(player, "")
                    active[row] = player in opening.observations
                    for name in self.COLUMNS:
                        texts[name][row] = opening.columns[name]
            elif True in starts:
                raise DataError("the rows of an episode begin together: reset all of its players")
        for name, values in texts.items():
            tensordict.set(name, Column.of(values))
        if self.shared:
            tensordict.set("active", active.to(tensordict.device) if tensordict.device else active)
            tensordict.set("episode_id", ids.to(tensordict.device) if tensordict.device else ids)
        return tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for name in (*self._texts, *(("active", "episode_id") if self.shared else ())):
            tensordict_reset.set(name, tensordict.get(name))
        return tensordict_reset

    # Step

    def _react(
        self, td: TensorDictBase, next_td: TensorDictBase, turns: Sequence[ModelTurn]
    ) -> list[Reaction | None]:
        size = next_td.batch_size.numel()
        by_row: list[Reaction | None] = [None] * size
        acted = {turn.row: turn for turn in turns}
        before, untold = [True] * size, [""] * size
        if self.shared:
            before, untold = td.get("active").reshape(size).tolist(), td.get(TOLD_KEY).tolist()
        active = list(before)
        episodes = []
        for rows in self._episodes_of(size):
            if any(row in acted for row in rows):
                named = dict(zip(self.players, rows, strict=True))
                theirs = {name: acted[row] for name, row in named.items() if row in acted}
                had = tuple(name for name, row in named.items() if before[row])
                episodes.append(Episode(named, theirs, had))
        try:
            reactions = self.react_together(td, episodes)
        except Exception as error:  # a failed world is data, with any exception
            reactions = [EpisodeReaction(players={}, error=error)] * len(episodes)
        for episode, reaction in zip(episodes, reactions, strict=True):
            for name, each in self._each(episode, reaction).items():
                row = episode.rows[name]
                by_row[row] = each
                active[row] = name in reaction.active and not _ends(each)
                untold[row] = joined(untold[row], each.observation)
        self._tell(td, next_td, untold, active, acted)
        self._carry(td, next_td, untold, active)
        return by_row

    def _each(self, episode: Episode, reaction: EpisodeReaction) -> dict[str, Reaction]:
        """Return a checked reaction for each player; if one has ended, all have."""
        given = {name: reaction.players.get(name, _NOTHING).checked() for name in self.players}
        if self.rewards == "team":
            total = math.fsum(each.reward for each in given.values())
            given = {name: replace(each, reward=total) for name, each in given.items()}
        errors = (each.error for each in given.values() if each.error is not None)
        error = reaction.error or next(errors, None)
        if error is not None:
            failed = {"error": error, "terminated": True, "truncated": False, "success": False}
            return {name: replace(each, **failed) for name, each in given.items()}
        if not any(map(_ends, given.values())) and reaction.active:
            return given
        truncated = any(each.truncated for each in given.values())
        ends = {"terminated": not truncated, "truncated": truncated}
        return {name: replace(each, **ends) for name, each in given.items()}

    def _tell(
        self,
        td: TensorDictBase,
        next_td: TensorDictBase,
        untold: list[str],
        active: Sequence[bool],
        acted: Mapping[int, ModelTurn],
    ) -> None:
        """Append unread texts to the prompts of the players who must act."""
        counts = next_td.get("turn").reshape(-1).tolist()
        added: list[list[dict[str, Any]]] = [[] for _ in untold]
        first = {}
        for row, (text, goes) in enumerate(zip(untold, active, strict=True)):
            if not text or not (goes or not self.shared):
                continue
            if counts[row]:
                turn = acted.get(row) or ModelTurn(row, None, False, False)
                added[row] = [self.reply(turn, text)]
            else:
                first[row] = chat_env_of(self).start(text)
            untold[row] = ""
        if any(added):
            self.parent.mode.append(td, next_td, added)
        if first:
            self.parent.mode.replace(next_td, first)

    def _carry(
        self,
        td: TensorDictBase,
        next_td: TensorDictBase,
        untold: Sequence[str],
        active: Sequence[bool],
    ) -> None:
        if self.shared:
            flags = torch.tensor(active, dtype=torch.bool, device=next_td.device)
            next_td.set("active", flags.unsqueeze(-1))
            next_td.set(TOLD_KEY, Column.of(untold))
        for name in (*self._texts, *(("episode_id",) if self.shared else ())):
            if next_td.get(name, None) is None:
                value = td.get(name)
                next_td.set(name, value if isinstance(value, torch.Tensor) else value.copy())

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the columns of players."""
        shape, device = observation_spec.shape, observation_spec.device
        for name in self._texts:
            observation_spec[name] = ColumnSpec((*shape, -1), example_data="")
        if self.shared:
            ids = Unbounded(shape=shape, dtype=torch.int64, device=device)
            observation_spec["episode_id"] = ids
            active = Unbounded(shape=(*shape, 1), dtype=torch.bool, device=device)
            observation_spec["active"] = active
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Adds them to the input of a step."""
        return self.transform_observation_spec(state_spec)

    def get_extra_state(self) -> dict[str, Any]:
        """The counter of episodes."""
        return {"episodes": self._episodes.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        self._episodes.load_state_dict(state["episodes"])


def _ends(reaction: Reaction) -> bool:
    return reaction.terminated or reaction.truncated


def _data_of(td: TensorDictBase, row: int) -> dict[str, Any]:
    """The columns of a drawn row."""
    found = {}
    for name, value in td.items():
        column = value.tolist() if hasattr(value, "tolist") else None
        if isinstance(column, list) and len(column) == td.batch_size.numel():
            found[name] = column[row]
    return found


class EpisodeEnds(Transform):
    """Ends an episode for all players if it ends for one: by a turn limit or a full context.

    The other players are truncated with the reason ``ENV``. It must be the last transform.

    Args:
        num_players: ``P``, rows of an episode.
    """

    def __init__(self, num_players: int) -> None:
        super().__init__()
        self.num_players = num_players

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get("done")
        size = next_tensordict.batch_size.numel()
        ended = done.reshape(-1, self.num_players).any(-1).repeat_interleave(self.num_players)
        spread = ended.view(size, 1) & ~done.view(size, 1)
        if spread.any():
            raise_flags(next_tensordict, done=spread, truncated=spread)
            write_reason(next_tensordict, spread, TruncationReason.ENV)
        active = next_tensordict.get("active")
        next_tensordict.set("active", active & ~next_tensordict.get("done").view(active.shape))
        return next_tensordict


class MultiAgentChatEnv(WorldEnv):
    """Base of the environments in which several players share an episode, with one row per player.

    Args:
        world: the players and what happens between them.
        rows: the data rows with which episodes begin.
        num_envs: ``B``, rows: a multiple of the number of players.
        repeats: number of rows that each drawn row of data starts: a multiple of the number of
            players, because an episode has one row per player. One episode if not given.
        kwargs: further arguments of :class:`~torchrl_llm.envs.world.WorldEnv`; history mode only
            where there are several players.

    Raises:
        ConfigError: a number of rows is no multiple; or the mode is not history (other modes cannot
            continue the prompt of a waiting player).
    """

    WORLD_FIRST = True

    def __init__(
        self,
        world: PlayersTransform,
        rows: Any,
        *,
        num_envs: int | None = None,
        repeats: int | None = None,
        **kwargs: Any,
    ) -> None:
        width = len(world.players)
        num_envs = width if num_envs is None else num_envs
        repeats = width if repeats is None else repeats
        for name, number in (("num_envs", num_envs), ("repeats", repeats)):
            if number < 1 or number % width:
                raise ConfigError(
                    f"{name} counts rows, and an episode has {width}, one for each of "
                    f"{list(world.players)}; got {number}, which is no multiple"
                )
        if (mode := kwargs.get("input_mode", "history")) != "history" and world.shared:
            raise ConfigError(
                f"{type(self).__name__} is for input_mode='history', got {mode!r}: the prompt of a "
                "player who waits is continued later, which needs the conversation"
            )
        super().__init__(world, rows, num_envs=num_envs, repeats=repeats, **kwargs)
        if world.shared:
            self.append_transform(EpisodeEnds(width))

    @property
    def players(self) -> tuple[str, ...]:
        """Names of the players with a row."""
        return self.world.players

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Append a transform; the one that ends an episode for all of its players stays last.

        Args:
            transform: the transform.
        """
        last = len(self.transform) - 1
        if isinstance(transform, ToolTransform) or not isinstance(
            self.transform[last], EpisodeEnds
        ):
            return super().append_transform(transform)
        return self.insert_transform(last, transform)

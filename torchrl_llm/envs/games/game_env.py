"""Games as environments of conversations: :class:`GameEnv`, for one player or several.

The rules are a :class:`~torchrl_llm.envs.games.Game` or a
:class:`~torchrl_llm.envs.games.TableGame`. A policy plays a seat, which then has a row; or a
scripted player, which acts within the environment, without a row. A game for one player is a table
with one seat. :class:`TableSteps` plays the answers. It has no state itself: the state of each row
is in the tensordict, as text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_llm._checked import In, checked
from torchrl_llm.data.column import Column
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.actions import ActionError, ActionForm, ActionParser, make_action_parser
from torchrl_llm.envs.games.game import Game, IllegalAction, Player, Rules, TableOutcome, play
from torchrl_llm.envs.players import (
    Episode,
    EpisodeReaction,
    MultiAgentChatEnv,
    Opening,
    PlayersTransform,
    Rewards,
    joined,
)
from torchrl_llm.envs.transforms.answer_gates import ModelTurn
from torchrl_llm.envs.world import Reaction
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.reward_scorer import checked_flag, checked_score

STATE_KEY = "game_state"
SEED_KEY = "game_seed"
COMMITTED_KEY = "game_committed"
SCRIPTED = {"random": "legal_actions", "best": "best_actions"}
"""Names of scripted players, and the actions from which they choose by the seed of the game."""


@dataclass(frozen=True, kw_only=True)
class Played(Reaction):
    """A reaction with the state after it, as text.

    Args:
        state: the state.
        action: the action, empty for none.
        legal: the rules allow it.
        committed: an action that waits for the actions of others.
    """

    state: str
    action: str = ""
    legal: bool = True
    committed: str = ""


class _Progress(NamedTuple):
    """A game after its scripted moves: a player with a row must act, or the game is over."""

    state: Any
    told: dict[str, str]
    rewards: dict[str, float]
    success: frozenset[str]
    waiting: Mapping[str, str]
    active: tuple[str, ...] = ()
    truncated: bool = False


class TableSteps(PlayersTransform):
    """Plays a game with the answers of models.

    In addition to what every :class:`~torchrl_llm.envs.players.PlayersTransform` writes:

    - ``"game_state"``, the state after the step, as text, the same in all rows of an episode;
    - ``"game_action"``, the action of the row's player in this step, empty if there was none, and
      ``"game_legal"``, bool ``[B]``;
    - ``"game_committed"``, an action that waits for the actions of others in the same step.

    A turn without a legal action does not change the game. Its reward is ``invalid_reward``; the
    player reads the reason and must act again, while the actions of the others wait. With
    ``stop_on_invalid`` such a turn ends the game.

    Args:
        game: the rules.
        parser: reads actions.
        seats: scripted players, by the names of players without a row: a function, ``"random"`` or
            ``"best"``.
        rewards: see :class:`~torchrl_llm.envs.players.PlayersTransform`.
        invalid_reward: reward of a turn without a legal action.
        stop_on_invalid: such a turn ends the game; the other players get no reward for it.
        accept_cut: also read answers that were cut at their token limit.
        with_reward: see :class:`~torchrl_llm.envs.world.WorldTransform`.
        worker_id: see :class:`~torchrl_llm.envs.players.PlayersTransform`.

    Raises:
        ConfigError: an unknown seat, no seat left for a policy, an invalid player in a seat, or an
            ``invalid_reward`` that is not finite.
    """

    COLUMNS = (STATE_KEY, SEED_KEY, COMMITTED_KEY)

    @checked
    def __init__(
        self,
        game: Rules,
        parser: ActionParser,
        *,
        seats: Mapping[str, Player | str] | None = None,
        rewards: Rewards = "own",
        invalid_reward: Annotated[float, In("(-inf, inf)")] = -0.3,
        stop_on_invalid: bool = False,
        accept_cut: bool = False,
        with_reward: bool = True,
        worker_id: int | None = None,
    ) -> None:
        seats = dict(seats or {})
        _check_seats(game, seats)
        super().__init__(
            [player for player in game.players if player not in seats],
            parser,
            rewards=rewards,
            with_reward=with_reward,
            accept_cut=accept_cut,
            worker_id=worker_id,
            shared=len(game.players) > 1,
        )
        self.game, self.seats = game, seats
        self.invalid_reward, self.stop_on_invalid = invalid_reward, stop_on_invalid

    def open(self, row: Mapping[str, Any]) -> Opening:
        """See :meth:`~torchrl_llm.envs.players.PlayersTransform.open`."""
        seed = row["seed"]
        begun = self._advance(self.game.reset(seed), {}, str(seed))
        seen = {
            player: begun.told[player] or self.game.seat(player).observe(begun.state)
            for player in begun.active
        }
        columns = {STATE_KEY: self.game.dump(begun.state), SEED_KEY: str(seed), COMMITTED_KEY: ""}
        return Opening(seen, columns)

    def _advance(self, state: Any, waiting: Mapping[str, str], seed: str) -> _Progress:
        """Continue the game while each player who must act is scripted or has a waiting action."""
        everyone = self.game.players
        told, rewards = dict.fromkeys(everyone, ""), dict.fromkeys(everyone, 0.0)
        success: frozenset[str] = frozenset()
        while active := self.game.active(state):
            missing = [p for p in active if p not in self.seats and p not in waiting]
            if missing:
                return _Progress(state, told, rewards, success, waiting, tuple(missing))
            actions = {
                p: waiting[p] if p in waiting else self._scripted(p, state, seed) for p in active
            }
            outcome, waiting = _checked(self.game.play_step(state, actions)), {}
            state, success = outcome.state, success | frozenset(outcome.success)
            for player in everyone:
                told[player] = joined(told[player], outcome.observations.get(player, ""))
                rewards[player] += outcome.rewards.get(player, 0.0)
            if outcome.terminated or outcome.truncated:
                cut = not outcome.terminated
                return _Progress(state, told, rewards, success, waiting, truncated=cut)
        return _Progress(state, told, rewards, success, waiting)

    def _scripted(self, player: str, state: Any, seed: str) -> str:
        seat, sits = self.game.seat(player), self.seats[player]
        if not isinstance(sits, str):
            return sits(seat, state)
        choices = getattr(seat, SCRIPTED[sits])(state)
        return random.Random(f"{seed} {player} {self.game.dump(state)}").choice(choices)

    def react_together(
        self, td: TensorDictBase, episodes: Sequence[Episode]
    ) -> list[EpisodeReaction]:
        """See :meth:`~torchrl_llm.envs.players.PlayersTransform.react_together`."""
        states, seeds = td.get(STATE_KEY).tolist(), td.get(SEED_KEY).tolist()
        committed = td.get(COMMITTED_KEY).tolist()
        reactions = []
        for episode in episodes:
            first = next(iter(episode.rows.values()))
            waiting = {
                player: committed[row] for player, row in episode.rows.items() if committed[row]
            }
            try:
                reactions.append(self._play(states[first], waiting, episode, seeds[first]))
            except Exception as error:  # a failed game is data, with any exception
                failed = Played(
                    observation="The game has failed.", state=states[first], legal=False
                )
                reactions.append(
                    EpisodeReaction(players=dict.fromkeys(episode.turns, failed), error=error)
                )
        return reactions

    def _play(
        self, text: str, waiting: dict[str, str], episode: Episode, seed: str
    ) -> EpisodeReaction:
        state = self.game.load(text)
        acted = {
            player: self._read(state, player, turn, waiting)
            for player, turn in episode.turns.items()
        }
        nothing = {"observation": "", "reward": 0.0}
        if self.stop_on_invalid and not all(each["legal"] for each in acted.values()):
            last = {player: {**nothing, **acted.get(player, {})} for player in episode.rows}
            return EpisodeReaction(
                players={name: Played(**each, state=text) for name, each in last.items()}
            )
        after = self._advance(state, waiting, seed)
        text = self.game.dump(after.state)
        players = {}
        for player in episode.rows:
            done = {**nothing, **acted.get(player, {})}
            done["observation"] = joined(done["observation"], after.told[player])
            done["reward"] += after.rewards[player]
            players[player] = Played(
                **done,
                success=player in after.success,
                terminated=not after.active and not after.truncated,
                truncated=after.truncated,
                state=text,
                committed=after.waiting.get(player, ""),
            )
        return EpisodeReaction(players=players, active=after.active)

    def _read(
        self, state: Any, player: str, turn: ModelTurn, waiting: dict[str, str]
    ) -> dict[str, Any]:
        """Fields of the reaction to a single turn; a legal action is added to the waiting ones."""
        action, for_form = "", 0.0
        try:
            action, for_form = self.parser.read(self.answer(turn))
            action = self.game.normalize(action)
            waiting[player] = self.game.seat(player).check(state, action)
        except (ActionError, IllegalAction) as error:
            return {
                "observation": f"{error}"
                if self.stop_on_invalid
                else f"{error} {self.parser.help}",
                "reward": self.invalid_reward,
                "for_form": error.reward if isinstance(error, ActionError) else for_form,
                "action": action,
                "legal": False,
            }
        return {"for_form": for_form, "action": action, "legal": True}

    # Columns

    def write(
        self, td: TensorDictBase, next_td: TensorDictBase, reactions: Sequence[Reaction | None]
    ) -> None:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.write`."""
        states, committed = td.get(STATE_KEY).tolist(), td.get(COMMITTED_KEY).tolist()
        actions, legal = [""] * len(states), [True] * len(states)
        for row, played in enumerate(reactions):
            if isinstance(played, Played):
                states[row], committed[row] = played.state, played.committed
                actions[row], legal[row] = played.action, played.legal
        next_td.set(STATE_KEY, Column.of(states))
        next_td.set(COMMITTED_KEY, Column.of(committed))
        _write_turn(next_td, actions, legal)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size = tensordict_reset.batch_size.numel()
        _write_turn(tensordict_reset, [""] * size, [True] * size)
        return super()._reset(tensordict, tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the columns of the game."""
        spec = super().transform_observation_spec(observation_spec)
        spec["game_action"] = ColumnSpec((*spec.shape, -1), example_data="")
        spec["game_legal"] = Unbounded(shape=spec.shape, dtype=torch.bool, device=spec.device)
        return spec


def _checked(outcome: TableOutcome) -> TableOutcome:
    """Outcome with numeric rewards; raises for other rewards, and for flags that are no bools."""
    return TableOutcome(
        outcome.state,
        outcome.observations,
        {player: checked_score(each).reward for player, each in outcome.rewards.items()},
        checked_flag("terminated", outcome.terminated),
        outcome.success,
        checked_flag("truncated", outcome.truncated),
    )


def _write_turn(td: TensorDictBase, actions: Sequence[str], legal: Sequence[bool]) -> None:
    """Write the actions of a step, and whether the rules allow them."""
    td.set("game_action", Column.of(actions))
    td.set("game_legal", torch.tensor(legal, device=td.device))


def _check_seats(game: Rules, seats: Mapping[str, Player | str]) -> None:
    if unknown := sorted(set(seats) - set(game.players)):
        raise ConfigError(f"{game.name!r} has the players {list(game.players)}, got {unknown}")
    if len(seats) == len(game.players):
        raise ConfigError("all seats are scripted: leave one to a policy")
    for player, sits in seats.items():
        if not callable(sits) and sits not in SCRIPTED:
            raise ConfigError(
                f"the seat {player!r} needs a function of (game, state) or one of "
                f"{list(SCRIPTED)}, got {sits!r}"
            )


class GameEnv(MultiAgentChatEnv):
    """A game that language models play, with one row per player.

    Each drawn row is a seed and starts a game. Each seat of a policy has one row, whose system
    prompt contains the rules and the form of an answer. The observation is the user's message, and
    the model answers with an action. See :class:`TableSteps` for the columns, and
    :class:`~torchrl_llm.envs.players.PlayersTransform` for the rewards and ends of several players.
    All repeats of a row play the same game, and their opponents reply to equal actions equally.

    Three things end an episode: the rules (``terminated``), a limit of the game itself
    (``truncated`` with the reason ``ENV``), and ``max_steps`` turns (reason ``MAX_STEPS``). A turn
    without a legal action counts as a turn, although the game does not change.

    Args:
        game: the game: a :class:`~torchrl_llm.envs.games.Game` or a
            :class:`~torchrl_llm.envs.games.TableGame`; created from ``WORLD`` if not given.
        seats: see :class:`TableSteps`.
        rewards: ``"own"``, or ``"team"``: each player gets the sum of the rewards of all.
        actions: how an answer writes its action: ``"tag"``, ``"bare"``, ``"boxed"``, ``"call"``, or
            a parser. With ``"call"`` in history mode pass ``env.tool_schemas`` to the policy as
            ``tools``.
        invalid_reward: reward of a turn without a legal action; if not given, the game's
            ``invalid_reward``, or its ``forfeit_reward`` if such a turn ends the game.
        stop_on_invalid: such a turn ends the game; the other players get no reward for it.
        accept_cut: also read answers that were cut at their token limit.
        dataset: rows with a ``seed``; the rows of ``split`` if neither this nor ``data_files`` is
            given.
        data_files: a JSON-lines file of such rows, or several.
        split: ``"train"`` or ``"test"``.
        compute_reward: write the reward.
        system_prompt: system prompt instead of the rules and the form of an answer.
        worker_id: number of this worker for ids.
        kwargs: further arguments of :class:`~torchrl_llm.envs.players.MultiAgentChatEnv`.

    Raises:
        ConfigError: for impossible arguments.
        DataError: for a row without a whole number as ``seed``.

    Example:
        >>> from torchrl_llm.data.history import History
        >>> from torchrl_llm.envs.games import TicTacToe, TicTacToeForTwo
        >>> env = GameEnv(TicTacToe(player="X"), num_envs=1, shuffle=False)
        >>> td = env.reset()
        >>> chat = td["history"].prompt.chats[0]
        >>> answer = {"role": "assistant", "content": "<move>5</move>"}
        >>> td["history"].full = History.of([chat + [answer]])
        >>> td = env.step(td)["next"]
        >>> print(td["history"].prompt.chats[0][-1]["content"])
        O takes 8.
        1 2 3
        4 X 6
        7 O 9
        You are X. Your move.
        >>> td = GameEnv(TicTacToeForTwo(), shuffle=False).reset()
        >>> list(td["agent"]), td["active"].flatten().tolist()
        (['X', 'O'], [True, False])
    """

    MAX_STEPS: ClassVar[int | None] = 64
    PLAYERS: ClassVar[tuple[str, ...]] = ()
    """The players of a game for several; a class with ``WORLD`` does not need to name them."""

    def __init__(
        self,
        game: Rules | None = None,
        *,
        seats: Mapping[str, Player | str] | None = None,
        rewards: Rewards = "own",
        actions: ActionForm | ActionParser = "tag",
        invalid_reward: float | None = None,
        stop_on_invalid: bool = False,
        accept_cut: bool = False,
        dataset: Any = None,
        data_files: str | Path | list[str | Path] | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        system_prompt: str | None = None,
        worker_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if game is None:
            game = self.WORLD()
        parser = make_action_parser(actions, game.action_name, game.action_help)
        if invalid_reward is None:
            invalid_reward = game.forfeit_reward if stop_on_invalid else game.invalid_reward
        steps = TableSteps(
            game,
            parser,
            seats=seats,
            rewards=rewards,
            invalid_reward=invalid_reward,
            stop_on_invalid=stop_on_invalid,
            accept_cut=accept_cut,
            with_reward=compute_reward,
            worker_id=worker_id,
        )
        rows = self.read_rows(dataset, data_files, split, columns=("seed",))
        if system_prompt is None:
            system_prompt = f"{game.rules} {parser.help}"
        rows = MappedRows(rows, _with_query)
        super().__init__(steps, rows, system_prompt=system_prompt, worker_id=worker_id, **kwargs)

    @classmethod
    def num_players(cls, options: Mapping[str, Any]) -> int:
        """See :meth:`~torchrl_llm.envs.TaskEnv.num_players`; a scripted seat has no row."""
        return max(1, len(cls.PLAYERS) - len(options.get("seats") or {}))

    @property
    def game(self) -> Rules:
        """The rules."""
        return self.world.game

    def demonstrate(self, player: Player, seed: int) -> list[dict[str, Any]]:
        """A game for one player as a conversation: data for a model to imitate.

        The messages are the same as in the environment in history mode, and answers have the form
        that the environment reads.

        Args:
            player: chooses the actions, all of them legal.
            seed: seed of the game.

        Returns:
            The messages, from the system prompt to the last action.

        Raises:
            ConfigError: the game has several players, each with a different conversation.

        Example:
            >>> from torchrl_llm.envs.games import TicTacToe, expert
            >>> env = GameEnv(TicTacToe(player="X"), num_envs=1, system_prompt="Play.")
            >>> chat = env.demonstrate(expert(0), seed=1)
            >>> [message["role"] for message in chat[:3]], chat[2]["content"]
            (['system', 'user', 'assistant'], '<move>7</move>')
        """
        if not isinstance(self.game, Game):
            raise ConfigError(f"demonstrate needs a game for one player, got {self.game.name!r}")
        parser, system = self.world.parser, self.base_env.system_prompt
        chat = [] if system is None else [{"role": "system", "content": system}]
        told = {"role": self.base_env.user_role}
        for turn in play(self.game, player, seed):
            answer = parser.message(turn.action)
            chat += [{**told, "content": turn.observation}, answer]
            reply = self.world.reply(ModelTurn(0, answer, False, False), "")
            told = {name: value for name, value in reply.items() if name != "content"}
        return chat


def _with_query(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**row, "seed": seed_of(row), "query": ""}  # a reset writes each player's prompt


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the seed of a game from a drawn row.

    Args:
        row: a row with a column ``"seed"``.

    Raises:
        DataError: it is no whole number.
    """
    seed = row["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"a game needs a whole number as 'seed', got {seed!r}")
    return seed

"""The rules of a game as functions of an immutable state: no model, no tensors, no batch.

A :class:`Game` says how a state begins from a seed, which actions it allows and what each of them
leads to. The same seed and the same actions lead to the same states always, opponents included, so
a state that was written down (:meth:`Game.dump`) can be continued anywhere.

:func:`play` lets any function play. Next: :mod:`torchrl_llm.envs.games.game_env` makes an
environment for language models of a game, :mod:`torchrl_llm.envs.games.tic_tac_toe` is one.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import DataError, TorchRLLLMError
from torchrl_llm.rewards.reward_scorer import checked_flag

State = TypeVar("State")
Player = Callable[[Any, Any], str]
"""A scripted player: game (or a seat at a table) and state to action."""


class IllegalAction(TorchRLLLMError, ValueError):
    """The rules do not allow an action in this state; the message is for the player."""


class Outcome(NamedTuple):
    """What an action leads to.

    Attributes:
        state: the state after it, and after what others did in answer.
        observation: what the player is told.
        reward: reward of this action.
        terminated: the game has ended by its rules.
        truncated: the game was cut, by a limit of moves for instance.
        success: the player has done what the game asks for.
    """

    state: Any
    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False


class TableOutcome(NamedTuple):
    """What the actions of a step lead to, at a table of several players or of one.

    Attributes:
        state: the state after it.
        observations: what each player is told of the step, those who did not act included; empty
            for who need not be told.
        rewards: of each player in this step.
        terminated: the game has ended by its rules.
        success: players who have done what the game asks for.
        truncated: the game was cut, by a limit of moves for instance.
    """

    state: Any
    observations: Mapping[str, str]
    rewards: Mapping[str, float]
    terminated: bool = False
    success: tuple[str, ...] = ()
    truncated: bool = False


class Turn(NamedTuple):
    """One turn of a game that was played: what was seen, what was done, what came of it."""

    observation: str
    action: str
    outcome: Outcome


class Rules(ABC, Generic[State]):
    """What rules for one player and for several share: names, and states as text.

    Attributes:
        name: name of the game.
        version: counted up when states of older versions can no longer be continued.
        rules: the rules in a few sentences, for the player; they say nothing of forms of answers.
        action_name: what an action is called, ``"move"``; one word.
        action_help: how an action is written, for the player.
        state_type: the frozen dataclass of the states, whose fields are strings, numbers, bools,
            and tuples of these.
        players: names of the players.
        invalid_reward: reward of a turn without a legal action. Until the turns run out, or the
            game is given up, it must add up to no more than the worst end: answering nonsense
            must not pay.
        forfeit_reward: reward of such a turn where it ends the game: the worst end there is.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    action_name: ClassVar[str] = "action"
    action_help: ClassVar[str]
    state_type: ClassVar[type]
    players: ClassVar[tuple[str, ...]]
    invalid_reward: ClassVar[float]
    forfeit_reward: ClassVar[float]

    @property
    @abstractmethod
    def rules(self) -> str:
        """The rules, see above; a subclass may write them as a plain attribute."""

    @abstractmethod
    def reset(self, seed: int) -> State:
        """The first state in which a player acts, a function of the seed."""

    @abstractmethod
    def active(self, state: State) -> tuple[str, ...]:
        """The players who must act now, in the order of ``players``; none where it is over."""

    @abstractmethod
    def seat(self, player: str) -> Any:
        """The game as one of its players sees it: what it has of a state needs no name.

        Args:
            player: which.

        Raises:
            ConfigError: there is no such player.
        """

    @abstractmethod
    def play_step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """The outcome of an action of each active player that its seat has checked.

        Args:
            state: a state in which the game is not over.
            actions: in the spelling of the rules.
        """

    def normalize(self, action: str) -> str:
        """An action as the player wrote it, in the spelling of ``legal_actions``."""
        return action.strip().lower()

    def dump(self, state: State) -> str:
        """A state as text, with the name and version of its game."""
        text = {"game": self.name, "version": self.version}
        # asdict takes as long as all of the rest: it looks for states within the state.
        for field in fields(state):  # type: ignore[arg-type]
            text[field.name] = getattr(state, field.name)
        return json.dumps(text)

    def load(self, text: str) -> State:
        """Read a state that :meth:`dump` wrote.

        Raises:
            DataError: the text is no state, or one of another game or version.
        """
        try:
            values = json.loads(text)
            told = (values.pop("game"), values.pop("version"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{shortened(str(text))} is no state of a game") from error
        if told != (self.name, self.version):
            raise DataError(
                f"a state of {told[0]!r}, version {told[1]}, cannot be continued by "
                f"{self.name!r}, version {self.version}"
            )
        try:
            return self.state_type(**{key: _frozen(value) for key, value in values.items()})
        except TypeError as error:
            raise DataError(f"{shortened(text)} is no state of {self.name!r}: {error}") from error


class Game(Rules[State]):
    """The rules of a game for one player; opponents are a part of it.

    It is a table of one: the game itself is its only seat.
    """

    players = ("player",)
    invalid_reward: ClassVar[float] = -0.1
    forfeit_reward: ClassVar[float] = -0.1

    def active(self, state: State) -> tuple[str, ...]:
        """The player; a game of one says in its outcomes that it is over."""
        return self.players

    def seat(self, player: str) -> Game[State]:
        """See ``Rules.seat``."""
        return self

    def play_step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """See ``Rules.play_step``."""
        [(player, action)] = actions.items()
        # A step of one's own is honoured; the usual one would check the action once more.
        usual = getattr(self.step, "__func__", None) is Game.step
        outcome = (self._apply if usual else self.step)(state, action)
        return TableOutcome(
            outcome.state,
            {player: outcome.observation},
            {player: outcome.reward},
            outcome.terminated,
            (player,) if checked_flag("success", outcome.success) else (),
            outcome.truncated,
        )

    @abstractmethod
    def observe(self, state: State) -> str:
        """What the player is told before acting."""

    @abstractmethod
    def legal_actions(self, state: State) -> tuple[str, ...]:
        """The actions that the rules allow; none where the game is over."""

    @abstractmethod
    def best_actions(self, state: State) -> tuple[str, ...]:
        """The legal actions that no other is better than; none where the game is over."""

    @abstractmethod
    def _apply(self, state: State, action: str) -> Outcome:
        """The outcome of a legal action."""

    def explain(self, state: State, action: str) -> str:
        """Why an action is not legal, for the player."""
        allowed = ", ".join(self.legal_actions(state))
        return f"{shortened(action)} is not possible now. Possible: {allowed}."

    def check(self, state: State, action: str) -> str:
        """An action in the spelling of the rules.

        Args:
            state: a state.
            action: as the player wrote it.

        Raises:
            IllegalAction: the rules do not allow it, or the game is over.
        """
        legal = self.legal_actions(state)
        if not legal:
            raise IllegalAction("the game is over")
        action = self.normalize(action)
        if action not in legal:
            raise IllegalAction(self.explain(state, action))
        return action

    def step(self, state: State, action: str) -> Outcome:
        """Act.

        Args:
            state: a state in which the game is not over.
            action: what the player does.

        Returns:
            What it leads to; ``state`` itself is unchanged.

        Raises:
            IllegalAction: the rules do not allow it; nothing has happened.
        """
        return self._apply(state, self.check(state, action))


@checked
def play(
    game: Game, player: Player, seed: int, *, max_turns: Annotated[int, Ge(1)] = 1000
) -> list[Turn]:
    """Play one game to its end.

    Args:
        game: the rules.
        player: chooses the actions.
        seed: seed of the game.
        max_turns: turns after which to stop.

    Returns:
        The turns; the last one's outcome says how it ended.

    Raises:
        IllegalAction: the player does something that the rules do not allow.

    Example:
        >>> from torchrl_llm.envs.games import TicTacToe
        >>> turns = play(TicTacToe(opponent="minimax"), expert(0), seed=3)
        >>> turns[-1].outcome.terminated, turns[-1].outcome.reward
        (True, 0.0)
    """
    state = game.reset(seed)
    observation = game.observe(state)
    turns: list[Turn] = []
    while len(turns) < max_turns:
        action = player(game, state)
        outcome = game.step(state, action)
        turns.append(Turn(observation, action, outcome))
        if outcome.terminated or outcome.truncated:
            break
        state, observation = outcome.state, outcome.observation
    return turns


def random_player(seed: int) -> Player:
    """A player that does anything legal.

    Args:
        seed: of its choices.
    """
    generator = random.Random(seed)
    return lambda game, state: generator.choice(game.legal_actions(state))


def expert(seed: int) -> Player:
    """A player that does the best there is, any one of several.

    Args:
        seed: of its choices between actions that are equally good.
    """
    generator = random.Random(seed)
    return lambda game, state: generator.choice(game.best_actions(state))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def shortened(text: str, limit: int = 40) -> str:
    """A text in quotes, for a message.

    Args:
        text: any text.
        limit: characters of it that are shown.
    """
    return repr(text if len(text) <= limit else text[:limit] + "...")

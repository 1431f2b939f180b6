"""The rules of a game as functions of an immutable state: no model, no tensors, no batch.

A :class:`Game` defines the first state of a seed, the legal actions of a state, and their outcomes.
The same seed and the same actions always lead to the same states, including the actions of
opponents, so a saved state (:meth:`Game.dump`) can be continued anywhere.

:func:`play` lets any function play. Next: :mod:`torchrl_llm.envs.games.game_env` turns a game into
an environment for language models, :mod:`torchrl_llm.envs.games.tic_tac_toe` is an example of a
game.
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
"""A scripted player: a function from game (or a seat at a table) and state to action."""


class IllegalAction(TorchRLLLMError, ValueError):
    """The rules do not allow an action in this state; the message is for the player."""


class Outcome(NamedTuple):
    """Outcome of an action.

    Attributes:
        state: the state after the action and the replies of others.
        observation: the text for the player.
        reward: reward of this action.
        terminated: the game has ended by its rules.
        truncated: the game was cut, by a limit of moves for instance.
        success: the player has reached the goal of the game.
    """

    state: Any
    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False


class TableOutcome(NamedTuple):
    """Outcome of the actions of a step, for several players or one.

    Attributes:
        state: the state after it.
        observations: the text for each player about the step, including players who did not act;
            empty if a player needs no text.
        rewards: reward of each player in this step.
        terminated: the game has ended by its rules.
        success: players who have reached the goal of the game.
        truncated: the game was cut, by a limit of moves for instance.
    """

    state: Any
    observations: Mapping[str, str]
    rewards: Mapping[str, float]
    terminated: bool = False
    success: tuple[str, ...] = ()
    truncated: bool = False


class Turn(NamedTuple):
    """One turn of a played game: observation, action and outcome."""

    observation: str
    action: str
    outcome: Outcome


class Rules(ABC, Generic[State]):
    """Base of the rules for one player and for several: names, and states as text.

    Attributes:
        name: name of the game.
        version: increased when states of older versions can no longer be continued.
        rules: the rules in a few sentences, for the player, without the form of an answer.
        action_name: one word for an action, such as ``"move"``.
        action_help: how the player writes an action.
        state_type: the frozen dataclass of the states, whose fields are strings, numbers, bools,
            and tuples of these.
        players: names of the players.
        invalid_reward: reward of a turn without a legal action. The sum of these rewards over all
            turns of a game must not be higher than the reward of the worst end, so that invalid
            answers never pay.
        forfeit_reward: reward of such a turn if it ends the game: the reward of the worst end.
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
        """The rules as text; a subclass may define them as a plain attribute."""

    @abstractmethod
    def reset(self, seed: int) -> State:
        """The first state in which a player acts, a function of the seed."""

    @abstractmethod
    def active(self, state: State) -> tuple[str, ...]:
        """The players who must act now, in the order of ``players``; none if the game is over."""

    @abstractmethod
    def seat(self, player: str) -> Any:
        """The game from the view of one player: its methods do not need the player's name.

        Args:
            player: name of the player.

        Raises:
            ConfigError: there is no such player.
        """

    @abstractmethod
    def play_step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """The outcome of one action per active player; the seats have checked the actions.

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
        # asdict would take as long as everything else: it searches for states within the state.
        for field in fields(state):  # type: ignore[arg-type]
            text[field.name] = getattr(state, field.name)
        return json.dumps(text)

    def load(self, text: str) -> State:
        """Read a state that :meth:`dump` wrote.

        Raises:
            DataError: the text is not a state, or a state of a different game or version.
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

    It works as a table with one seat, which is the game itself.
    """

    players = ("player",)
    invalid_reward: ClassVar[float] = -0.1
    forfeit_reward: ClassVar[float] = -0.1

    def active(self, state: State) -> tuple[str, ...]:
        """The player; the outcomes of a game for one player report its end."""
        return self.players

    def seat(self, player: str) -> Game[State]:
        """See ``Rules.seat``."""
        return self

    def play_step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """See ``Rules.play_step``."""
        [(player, action)] = actions.items()
        # An overridden ``step`` is called; the default one would check the action again.
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
        """Observation of the player before acting."""

    @abstractmethod
    def legal_actions(self, state: State) -> tuple[str, ...]:
        """The actions that the rules allow; none if the game is over."""

    @abstractmethod
    def best_actions(self, state: State) -> tuple[str, ...]:
        """The best legal actions, all equally good; none if the game is over."""

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
            action: the player's action.

        Returns:
            The outcome; ``state`` itself is unchanged.

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
        The turns; the outcome of the last one has the end of the game.

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
    """A player that chooses any legal action.

    Args:
        seed: seed of its choices.
    """
    generator = random.Random(seed)
    return lambda game, state: generator.choice(game.legal_actions(state))


def expert(seed: int) -> Player:
    """A player that chooses a best action, any one of several.

    Args:
        seed: seed of its choices between equally good actions.
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

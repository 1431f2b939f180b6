"""The rules of a game for several players as functions of an immutable state.

A :class:`TableGame` defines who must act in a state (one player, some, or all at once), what each
may do, and the outcome of their actions: the observation and the reward of each. :func:`play_table`
lets scripted players play it.

Next: :mod:`torchrl_llm.envs.games.tic_tac_toe_for_two` takes turns,
:mod:`torchrl_llm.envs.games.prisoners_dilemma` is simultaneous.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from torchrl_llm._checked import Ge, checked
from torchrl_llm.envs.games.game import IllegalAction, Player, Rules, State, TableOutcome, shortened
from torchrl_llm.errors import ConfigError


class TableGame(Rules[State]):
    """The rules of a game for several players."""

    invalid_reward: ClassVar[float] = -0.3
    forfeit_reward: ClassVar[float] = -1.0

    @abstractmethod
    def observe(self, state: State, player: str) -> str:
        """Observation of a player before acting."""

    @abstractmethod
    def legal_actions(self, state: State, player: str) -> tuple[str, ...]:
        """The actions that the rules allow a player; none if it is not the player's turn."""

    @abstractmethod
    def best_actions(self, state: State, player: str) -> tuple[str, ...]:
        """The best legal actions of a player, all equally good."""

    @abstractmethod
    def _apply(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """The outcome of a legal action of each active player."""

    def explain(self, state: State, player: str, action: str) -> str:
        """Why an action is not legal, for the player."""
        allowed = ", ".join(self.legal_actions(state, player))
        return f"{shortened(action)} is not possible now. Possible: {allowed}."

    def check(self, state: State, player: str, action: str) -> str:
        """An action in the spelling of the rules.

        Args:
            state: a state.
            player: who acts.
            action: as the player wrote it.

        Raises:
            ConfigError: there is no such player.
            IllegalAction: the rules do not allow it, it is a different player's turn, or the game
                is over.
        """
        if player not in self.players:
            raise ConfigError(f"{self.name!r} has the players {list(self.players)}, got {player!r}")
        active = self.active(state)
        if not active:
            raise IllegalAction("the game is over")
        if player not in active:
            raise IllegalAction(f"it is not the turn of {player}, but of {' and '.join(active)}")
        action = self.normalize(action)
        if action not in self.legal_actions(state, player):
            raise IllegalAction(self.explain(state, player, action))
        return action

    def step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """Act.

        Args:
            state: a state in which the game is not over.
            actions: one action for each active player, and for no other player.

        Returns:
            The outcome; ``state`` itself is unchanged.

        Raises:
            ConfigError: there is no such player.
            IllegalAction: as in :meth:`check`, or an active player does not act; nothing has
                happened.
        """
        checked = {player: self.check(state, player, each) for player, each in actions.items()}
        if missing := [player for player in self.active(state) if player not in checked]:
            raise IllegalAction(f"{' and '.join(missing)} must act too")
        return self._apply(state, checked)

    def seat(self, player: str) -> Seat:
        """See ``Rules.seat``."""
        if player not in self.players:
            raise ConfigError(f"{self.name!r} has the players {list(self.players)}, got {player!r}")
        return Seat(self, player)

    def play_step(self, state: State, actions: Mapping[str, str]) -> TableOutcome:
        """See ``Rules.play_step``."""
        return self.step(state, actions)


class Seat(NamedTuple):
    """A game from the view of one player.

    Attributes:
        game: the rules.
        player: the player in this seat.
    """

    game: TableGame
    player: str

    def observe(self, state: Any) -> str:
        """See :meth:`TableGame.observe`."""
        return self.game.observe(state, self.player)

    def check(self, state: Any, action: str) -> str:
        """See :meth:`TableGame.check`."""
        return self.game.check(state, self.player, action)

    def legal_actions(self, state: Any) -> tuple[str, ...]:
        """See :meth:`TableGame.legal_actions`."""
        return self.game.legal_actions(state, self.player)

    def best_actions(self, state: Any) -> tuple[str, ...]:
        """See :meth:`TableGame.best_actions`."""
        return self.game.best_actions(state, self.player)


class TableStep(NamedTuple):
    """A step of a played game: the actions and their outcome."""

    actions: Mapping[str, str]
    outcome: TableOutcome


@checked
def play_table(
    game: TableGame,
    seats: Mapping[str, Player],
    seed: int,
    *,
    max_steps: Annotated[int, Ge(1)] = 1000,
) -> list[TableStep]:
    """Play one game to its end.

    Args:
        game: the rules.
        seats: a player for each name.
        seed: seed of the game.
        max_steps: steps after which to stop.

    Returns:
        The steps; the outcome of the last one has the end of the game.

    Raises:
        ConfigError: a seat has no player, or no seat has that name.
        IllegalAction: a player does something that the rules do not allow.

    Example:
        >>> from torchrl_llm.envs.games import TicTacToeForTwo, expert
        >>> steps = play_table(TicTacToeForTwo(), {"X": expert(0), "O": expert(1)}, seed=3)
        >>> steps[-1].outcome.rewards
        {'X': 0.0, 'O': 0.0}
    """
    if set(seats) != set(game.players):
        raise ConfigError(
            f"{game.name!r} needs a player for each of {list(game.players)}, got {sorted(seats)}"
        )
    state, steps = game.reset(seed), []
    while len(steps) < max_steps and (active := game.active(state)):
        actions = {player: seats[player](game.seat(player), state) for player in active}
        outcome = game.step(state, actions)
        steps.append(TableStep(actions, outcome))
        state = outcome.state
    return steps

"""Tic-tac-toe for two players, who take turns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torchrl_llm._checked import In, checked
from torchrl_llm._registry import register
from torchrl_llm.envs.games.game import Player
from torchrl_llm.envs.games.game_env import GameEnv
from torchrl_llm.envs.games.nine_cells import (
    EMPTY,
    best_cells,
    drawn,
    free_cells,
    is_over,
    other_mark,
    put,
    winner,
)
from torchrl_llm.envs.games.table_game import TableGame, TableOutcome
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe


@dataclass(frozen=True, slots=True)
class BoardState:
    """A position.

    Args:
        board: nine characters, see :mod:`torchrl_llm.envs.games.nine_cells`.
    """

    board: str


class TicTacToeForTwo(TableGame[BoardState]):
    """Three in a row on nine cells, numbered 1 to 9 from the top left; ``X`` begins.

    In the step that ends the game each player gets a reward: 1 for a win, 0 for a draw, -1 for a
    loss. So the rewards of a game add up to 0.

    Args:
        random_plies: maximum number of random moves before a game begins. Their number and the
            moves follow from the seed, so that players who only play each other see different
            boards.

    Raises:
        ConfigError: a number that is negative or above 4, where a game could be won.

    Example:
        >>> game = TicTacToeForTwo()
        >>> outcome = game.step(game.reset(seed=0), {"X": "5"})
        >>> game.active(outcome.state), outcome.observations["O"].splitlines()[0]
        (('O',), 'X takes 5.')
    """

    name = "tic_tac_toe_for_two"
    players = ("X", "O")
    action_name = TicTacToe.action_name
    action_help = TicTacToe.action_help
    rules = TicTacToe.rules
    state_type: ClassVar[type] = BoardState

    @checked
    def __init__(self, *, random_plies: Annotated[int, In("[0, 4]")] = 0) -> None:
        # From the fifth move on, a game may be over.
        self.random_plies = random_plies

    def reset(self, seed: int) -> BoardState:
        """An empty board, or one with random moves on it."""
        generator, board = random.Random(seed), EMPTY
        for _ in range(generator.randint(0, self.random_plies)):
            board = put(board, generator.choice(free_cells(board)), _mover(board))
        return BoardState(board)

    def active(self, state: BoardState) -> tuple[str, ...]:
        """The player whose turn it is."""
        return () if is_over(state.board) else (_mover(state.board),)

    def observe(self, state: BoardState, player: str) -> str:
        """The board, with the numbers of the free cells."""
        turn = "Your move." if player in self.active(state) else f"{other_mark(player)} moves."
        return f"{drawn(state.board)}\nYou are {player}. {turn}"

    def legal_actions(self, state: BoardState, player: str) -> tuple[str, ...]:
        """The free cells."""
        if player not in self.active(state):
            return ()
        return tuple(str(cell + 1) for cell in free_cells(state.board))

    def best_actions(self, state: BoardState, player: str) -> tuple[str, ...]:
        """The cells of perfect play."""
        if player not in self.active(state):
            return ()
        return tuple(str(cell + 1) for cell in best_cells(state.board, player))

    def _apply(self, state: BoardState, actions: Mapping[str, str]) -> TableOutcome:
        [(player, action)] = actions.items()
        other = other_mark(player)
        after = BoardState(put(state.board, int(action) - 1, player))
        taken = {player: "", other: f"{player} takes {action}.\n"}
        if not is_over(after.board):
            told = {player: "", other: taken[other] + self.observe(after, other)}
            return TableOutcome(after, told, dict.fromkeys(self.players, 0.0))
        won = winner(after.board)
        ends = {player: "You win.", other: "You lose."} if won else {}
        told = {
            each: f"{taken[each]}{drawn(after.board)}\n{ends.get(each, 'A draw.')}"
            for each in self.players
        }
        rewards = {each: (1.0 if each == won else -1.0) if won else 0.0 for each in self.players}
        return TableOutcome(after, told, rewards, terminated=True, success=(won,) if won else ())


def _mover(board: str) -> str:
    return "X" if board.count("X") == board.count("O") else "O"


@register("tasks", "tic_tac_toe_for_two")
class TicTacToeForTwoEnv(GameEnv):
    """Tic-tac-toe as an environment of conversations, a row for each of two players.

    Args:
        seats: scripted players, ``{"O": "random"}`` for one.
        random_plies: see :class:`~torchrl_llm.envs.games.TicTacToeForTwo`.
        kwargs: arguments of :class:`GameEnv`.
    """

    MAX_STEPS = 8
    NEEDS_LARGER_MODEL = True
    PLAYERS = TicTacToeForTwo.players

    def __init__(
        self,
        *,
        seats: Mapping[str, Player | str] | None = None,
        random_plies: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(TicTacToeForTwo(random_plies=random_plies), seats=seats, **kwargs)

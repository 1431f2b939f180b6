"""Tic-tac-toe against an opponent that plays at random, or perfectly."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, get_args

from torchrl_llm._registry import register
from torchrl_llm.envs.games.game import Game, Outcome
from torchrl_llm.envs.games.game_env import GameEnv
from torchrl_llm.errors import ConfigError

Opponent = Literal["random", "minimax"]

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_EMPTY = "." * 9


@dataclass(frozen=True, slots=True)
class TicTacToeState:
    """A position.

    Args:
        board: nine characters row by row: ``X``, ``O``, or ``.`` for a free cell.
        player: the mark of the player, ``X`` or ``O``; ``X`` begins.
        seed: what the opponent's choices follow from, together with the board.
    """

    board: str
    player: str
    seed: int


@cache
def _winner(board: str) -> str | None:
    for a, b, c in _LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def _free(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


def _over(board: str) -> bool:
    return _winner(board) is not None or "." not in board


def _put(board: str, cell: int, mark: str) -> str:
    return board[:cell] + mark + board[cell + 1 :]


def _other(mark: str) -> str:
    return "O" if mark == "X" else "X"


@cache
def _value(board: str, mark: str) -> int:
    """What perfect play gives ``mark``, whose turn it is: 1 wins, 0 draws, -1 loses."""
    if _over(board):
        return 0 if _winner(board) is None else -1
    return max(-_value(_put(board, cell, mark), _other(mark)) for cell in _free(board))


def _best(board: str, mark: str) -> list[int]:
    values = {cell: -_value(_put(board, cell, mark), _other(mark)) for cell in _free(board)}
    return [cell for cell, value in values.items() if value == max(values.values())]


class TicTacToe(Game[TicTacToeState]):
    """Three in a row on nine cells, numbered 1 to 9 from the top left.

    A win is worth 1, a draw 0, a loss -1. Against a perfect opponent a draw is a success, for there
    is nothing better; against a random one only a win is.

    Args:
        opponent: ``"random"`` plays any free cell, ``"minimax"`` any of the best ones; which one
            follows from the seed and the board.
        player: the player's mark, ``"X"`` (begins) or ``"O"``; by default it follows from the seed.

    Raises:
        ConfigError: for another opponent or mark.

    Example:
        >>> game = TicTacToe(player="X")
        >>> outcome = game.step(game.reset(seed=0), "5")
        >>> outcome.state.board[4], len(game.legal_actions(outcome.state))
        ('X', 7)
    """

    name = "tic_tac_toe"
    action_name = "move"
    action_help = "the number of a free cell"
    # At most four legal moves do not end the game; as many of the eight turns are less than a loss.
    invalid_reward = -0.3
    forfeit_reward = -1.0
    state_type: ClassVar[type] = TicTacToeState
    rules = (
        "Play tic-tac-toe. The cells are numbered 1 to 9; X begins. Whoever has three in a row, "
        "column or diagonal wins."
    )

    def __init__(self, *, opponent: Opponent = "random", player: str | None = None) -> None:
        if opponent not in get_args(Opponent):
            raise ConfigError(f"opponent must be one of {get_args(Opponent)}, got {opponent!r}")
        if player not in (None, "X", "O"):
            raise ConfigError(f"player must be 'X', 'O' or None, got {player!r}")
        self.opponent = opponent
        self.player = player

    def reset(self, seed: int) -> TicTacToeState:
        """An empty board, or one with the opponent's first move."""
        player = self.player or random.Random(f"{seed} player").choice("XO")
        state = TicTacToeState(_EMPTY, player, seed)
        return state if player == "X" else TicTacToeState(self._reply(state)[0], player, seed)

    def observe(self, state: TicTacToeState) -> str:
        """The board, with the numbers of the free cells, and whose turn it is."""
        return f"{_drawn(state.board)}\nYou are {state.player}. Your move."

    def legal_actions(self, state: TicTacToeState) -> tuple[str, ...]:
        """The free cells."""
        return () if _over(state.board) else tuple(str(cell + 1) for cell in _free(state.board))

    def best_actions(self, state: TicTacToeState) -> tuple[str, ...]:
        """The cells of perfect play."""
        if _over(state.board):
            return ()
        return tuple(str(cell + 1) for cell in _best(state.board, state.player))

    def explain(self, state: TicTacToeState, action: str) -> str:
        """Whether a cell is taken, or there is none of that name."""
        free = ", ".join(self.legal_actions(state))
        if action in tuple("123456789"):
            return f"Cell {action} is taken. Free cells: {free}."
        return f"There is no such cell. Free cells: {free}."

    def _reply(self, state: TicTacToeState) -> tuple[str, int]:
        mark = _other(state.player)
        perfect = self.opponent == "minimax"
        cells = _best(state.board, mark) if perfect else _free(state.board)
        cell = random.Random(f"{state.seed} {state.board}").choice(cells)
        return _put(state.board, cell, mark), cell

    def _apply(self, state: TicTacToeState, action: str) -> Outcome:
        board = _put(state.board, int(action) - 1, state.player)
        told = ""
        if not _over(board):
            board, cell = self._reply(TicTacToeState(board, state.player, state.seed))
            told = f"{_other(state.player)} takes {cell + 1}.\n"
        after = TicTacToeState(board, state.player, state.seed)
        if not _over(board):
            return Outcome(after, told + self.observe(after))
        winner = _winner(board)
        won, drawn = winner == state.player, winner is None
        text = "You win." if won else "A draw." if drawn else "You lose."
        return Outcome(
            after,
            f"{told}{_drawn(board)}\n{text}",
            reward=1.0 if won else 0.0 if drawn else -1.0,
            terminated=True,
            success=won or (drawn and self.opponent == "minimax"),
        )


def _drawn(board: str) -> str:
    cells = [str(cell + 1) if mark == "." else mark for cell, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


@register("tasks", "tic_tac_toe")
class TicTacToeEnv(GameEnv):
    """Tic-tac-toe as an environment of conversations, one game per row.

    Args:
        opponent: see :class:`TicTacToe`.
        player: see :class:`TicTacToe`.
        kwargs: arguments of :class:`~torchrl_llm.envs.games.GameEnv`.

    Example:
        >>> env = TicTacToeEnv(num_envs=2, repeats=2, player="X", shuffle=False)
        >>> print(env.reset()["query"][0])
        1 2 3
        4 5 6
        7 8 9
        You are X. Your move.
    """

    MAX_STEPS = 8
    NEEDS_LARGER_MODEL = True

    def __init__(
        self, *, opponent: Opponent = "random", player: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(TicTacToe(opponent=opponent, player=player), **kwargs)

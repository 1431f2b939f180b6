"""Tic-tac-toe against an opponent that plays at random, or perfectly."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchrl_llm._checked import checked
from torchrl_llm._registry import register
from torchrl_llm.envs.games.game import Game, Outcome
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

Opponent = Literal["random", "minimax"]


@dataclass(frozen=True, slots=True)
class TicTacToeState:
    """A position.

    Args:
        board: nine characters row by row: ``X``, ``O``, or ``.`` for a free cell.
        player: the mark of the player, ``X`` or ``O``; ``X`` begins.
        seed: determines the opponent's choices, together with the board.
    """

    board: str
    player: str
    seed: int


class TicTacToe(Game[TicTacToeState]):
    """Three in a row on nine cells, numbered 1 to 9 from the top left.

    The reward is 1 for a win, 0 for a draw and -1 for a loss. Against a perfect opponent a draw is
    a success, because no better result is possible. Against a random opponent only a win is a
    success.

    Args:
        opponent: ``"random"`` plays any free cell, ``"minimax"`` any of the best cells. The choice
            follows from the seed and the board.
        player: the player's mark, ``"X"`` (begins) or ``"O"``; by default it follows from the seed.

    Raises:
        ConfigError: for an unknown opponent or mark.

    Example:
        >>> game = TicTacToe(player="X")
        >>> outcome = game.step(game.reset(seed=0), "5")
        >>> outcome.state.board[4], len(game.legal_actions(outcome.state))
        ('X', 7)
    """

    name = "tic_tac_toe"
    action_name = "move"
    action_help = "the number of a free cell"
    # At most four legal moves do not end the game; the other four of eight turns sum to less than a
    # loss.
    invalid_reward = -0.3
    forfeit_reward = -1.0
    state_type: ClassVar[type] = TicTacToeState
    rules = (
        "Play tic-tac-toe. The cells are numbered 1 to 9; X begins. Whoever has three in a row, "
        "column or diagonal wins."
    )

    @checked
    def __init__(
        self, *, opponent: Opponent = "random", player: Literal["X", "O"] | None = None
    ) -> None:
        self.opponent = opponent
        self.player = player

    def reset(self, seed: int) -> TicTacToeState:
        """An empty board, or one with the opponent's first move."""
        player = self.player or random.Random(f"{seed} player").choice("XO")
        state = TicTacToeState(EMPTY, player, seed)
        return state if player == "X" else TicTacToeState(self._reply(state)[0], player, seed)

    def observe(self, state: TicTacToeState) -> str:
        """The board, with the numbers of the free cells, and whose turn it is."""
        return f"{drawn(state.board)}\nYou are {state.player}. Your move."

    def legal_actions(self, state: TicTacToeState) -> tuple[str, ...]:
        """The free cells."""
        if is_over(state.board):
            return ()
        return tuple(str(cell + 1) for cell in free_cells(state.board))

    def best_actions(self, state: TicTacToeState) -> tuple[str, ...]:
        """The cells of perfect play."""
        if is_over(state.board):
            return ()
        return tuple(str(cell + 1) for cell in best_cells(state.board, state.player))

    def explain(self, state: TicTacToeState, action: str) -> str:
        """Whether a cell is taken or does not exist."""
        free = ", ".join(self.legal_actions(state))
        if action in tuple("123456789"):
            return f"Cell {action} is taken. Free cells: {free}."
        return f"There is no such cell. Free cells: {free}."

    def _reply(self, state: TicTacToeState) -> tuple[str, int]:
        mark = other_mark(state.player)
        perfect = self.opponent == "minimax"
        cells = best_cells(state.board, mark) if perfect else free_cells(state.board)
        cell = random.Random(f"{state.seed} {state.board}").choice(cells)
        return put(state.board, cell, mark), cell

    def _apply(self, state: TicTacToeState, action: str) -> Outcome:
        board = put(state.board, int(action) - 1, state.player)
        told = ""
        if not is_over(board):
            board, cell = self._reply(TicTacToeState(board, state.player, state.seed))
            told = f"{other_mark(state.player)} takes {cell + 1}.\n"
        after = TicTacToeState(board, state.player, state.seed)
        if not is_over(board):
            return Outcome(after, told + self.observe(after))
        line = winner(board)
        won, draw = line == state.player, line is None
        text = "You win." if won else "A draw." if draw else "You lose."
        return Outcome(
            after,
            f"{told}{drawn(board)}\n{text}",
            reward=1.0 if won else 0.0 if draw else -1.0,
            terminated=True,
            success=won or (draw and self.opponent == "minimax"),
        )


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

"""The board of tic-tac-toe: nine characters row by row, ``X``, ``O``, or ``.`` for a free cell."""

from __future__ import annotations

from functools import cache

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9


@cache
def winner(board: str) -> str | None:
    """The mark that has three in a row; ``None`` if neither has."""
    for a, b, c in _LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def free_cells(board: str) -> list[int]:
    """The free cells, counted from 0."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def is_over(board: str) -> bool:
    """Whether a player has won, or no cell is free."""
    return winner(board) is not None or "." not in board


def put(board: str, cell: int, mark: str) -> str:
    """The board with a mark in a cell."""
    return board[:cell] + mark + board[cell + 1 :]


def other_mark(mark: str) -> str:
    """``O`` for ``X``, ``X`` for ``O``."""
    return "O" if mark == "X" else "X"


@cache
def _value(board: str, mark: str) -> int:
    """Value of perfect play for ``mark``, whose turn it is: 1 wins, 0 draws, -1 loses."""
    if is_over(board):
        return 0 if winner(board) is None else -1
    return max(-_value(put(board, cell, mark), other_mark(mark)) for cell in free_cells(board))


def best_cells(board: str, mark: str) -> list[int]:
    """The cells of perfect play for a mark, whose turn it is."""
    values = {cell: -_value(put(board, cell, mark), other_mark(mark)) for cell in free_cells(board)}
    return [cell for cell, value in values.items() if value == max(values.values())]


def drawn(board: str) -> str:
    """The board in three lines, with the numbers of the free cells, counted from 1."""
    cells = [str(cell + 1) if mark == "." else mark for cell, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

"""A small maze: take the key, carry it to the door, open it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from torchrl_llm._checked import Ge, In, checked
from torchrl_llm._registry import register
from torchrl_llm.envs.games.game import Game, Outcome
from torchrl_llm.envs.games.game_env import GameEnv

Cell = tuple[int, int]

_MOVES: dict[str, Cell] = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
_WALLS = 0.25


@dataclass(frozen=True, slots=True)
class KeyDoorState:
    """Where everything is; cells are (row, column), counted from the top left.

    Args:
        maze: one string per row, ``#`` for a wall and ``.`` for floor.
        player: where the player stands.
        key: where the key is, or was before the player took it.
        door: where the door is.
        has_key: whether the player has the key.
        moves_left: actions until the game is cut.
        is_open: whether the door is open, which ends the game.
    """

    maze: tuple[str, ...]
    player: Cell
    key: Cell
    door: Cell
    has_key: bool
    moves_left: int
    is_open: bool = False


class KeyDoor(Game[KeyDoorState]):
    """Walk through a maze to the key, take it, walk to the door and open it.

    The maze follows from the seed and can always be solved. The reward is 1 for opening the door,
    and otherwise 0. The game is cut after ``slack`` times the actions of a shortest solution.

    Args:
        size: rows and columns of the maze.
        slack: factor on the length of a shortest solution, at least 1.

    Raises:
        ConfigError: for a maze smaller than 2 or larger than 26 cells, or ``slack`` below 1.

    Example:
        >>> game = KeyDoor(size=3)
        >>> print(game.observe(game.reset(seed=1)))
        .K.
        .#D
        @..
        You do not have the key. 21 moves left.
        >>> game.best_actions(game.reset(seed=1))
        ('north',)
    """

    name = "key_door"
    action_name = "action"
    action_help = "one of north, south, east, west, take, open"
    state_type: ClassVar[type] = KeyDoorState
    rules = (
        "You are @ in a maze. # is a wall, K the key, D the door. Walk to the key and take it, "
        "walk to the door and open it. North is up."
    )

    @checked
    def __init__(
        self, *, size: Annotated[int, In("[2, 26]")] = 4, slack: Annotated[float, Ge(1)] = 3.0
    ) -> None:
        self.size = size
        self.slack = slack

    def reset(self, seed: int) -> KeyDoorState:
        """A maze that can be solved."""
        generator = random.Random(f"{seed} maze")
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            player, key, door = generator.sample(cells, 3)
            walls = {cell for cell in cells if generator.random() < _WALLS} - {player, key, door}
            maze = tuple(
                "".join("#" if (row, column) in walls else "." for column in range(self.size))
                for row in range(self.size)
            )
            state = KeyDoorState(maze, player, key, door, False, 0)
            shortest = _distance(state)
            if shortest is not None:
                return replace(state, moves_left=int(self.slack * shortest))

    def observe(self, state: KeyDoorState) -> str:
        """The maze, the player's things and cell, and the number of remaining moves."""
        rows = [list(row) for row in state.maze]
        rows[state.door[0]][state.door[1]] = "D"
        if not state.has_key:
            rows[state.key[0]][state.key[1]] = "K"
        rows[state.player[0]][state.player[1]] = "@"
        told = ["You have the key." if state.has_key else "You do not have the key."]
        if state.player == state.key and not state.has_key:
            told.append("You stand on it.")
        if state.player == state.door:
            told.append("You stand at the door.")
        told.append(f"{state.moves_left} moves left.")
        return "\n".join(["".join(row) for row in rows] + [" ".join(told)])

    def legal_actions(self, state: KeyDoorState) -> tuple[str, ...]:
        """Directions without a wall; ``take`` on the key; ``open`` at the door with the key."""
        if state.is_open or state.moves_left < 1:
            return ()
        actions = [name for name, _ in _ways(state.maze, state.player)]
        if state.player == state.key and not state.has_key:
            actions.append("take")
        if state.player == state.door and state.has_key:
            actions.append("open")
        return tuple(actions)

    def best_actions(self, state: KeyDoorState) -> tuple[str, ...]:
        """The actions that begin a shortest solution."""
        distances = {
            action: 0 if after.is_open else _distance(after)
            for action in self.legal_actions(state)
            for after in [_after(state, action)]
        }
        known = {action: d for action, d in distances.items() if d is not None}
        return tuple(action for action, d in known.items() if d == min(known.values()))

    def _apply(self, state: KeyDoorState, action: str) -> Outcome:
        after = replace(_after(state, action), moves_left=state.moves_left - 1)
        if after.is_open:
            text = "The door is open."
            return Outcome(after, text, reward=1.0, terminated=True, success=True)
        told = "You take the key.\n" if action == "take" else ""
        if not after.moves_left:
            text = f"{told}{self.observe(after)} The game is over."
            return Outcome(after, text, truncated=True)
        return Outcome(after, told + self.observe(after))


def _ways(maze: tuple[str, ...], cell: Cell) -> Iterator[tuple[str, Cell]]:
    for name, (down, right) in _MOVES.items():
        row, column = cell[0] + down, cell[1] + right
        if 0 <= row < len(maze) and 0 <= column < len(maze[row]) and maze[row][column] != "#":
            yield name, (row, column)


def _after(state: KeyDoorState, action: str) -> KeyDoorState:
    if action == "take":
        return replace(state, has_key=True)
    if action == "open":
        return replace(state, is_open=True)
    return replace(state, player=dict(_ways(state.maze, state.player))[action])


@lru_cache(maxsize=4096)
def _distances(maze: tuple[str, ...], target: Cell) -> dict[Cell, int]:
    """Steps to the target from every cell from which it can be reached."""
    found = {target: 0}
    queue = deque([target])
    while queue:
        cell = queue.popleft()
        for _, neighbour in _ways(maze, cell):
            if neighbour not in found:
                found[neighbour] = found[cell] + 1
                queue.append(neighbour)
    return found


def _distance(state: KeyDoorState) -> int | None:
    """Actions of a shortest solution; ``None`` if there is none."""
    to_door = _distances(state.maze, state.door)
    if state.has_key:
        steps = to_door.get(state.player)
        return None if steps is None else steps + 1
    to_key = _distances(state.maze, state.key).get(state.player)
    carry = to_door.get(state.key)
    return None if to_key is None or carry is None else to_key + 1 + carry + 1


@register("tasks", "key_door")
class KeyDoorEnv(GameEnv):
    """The maze of key and door as an environment of conversations, one game per row.

    Args:
        size: see :class:`KeyDoor`.
        slack: see :class:`KeyDoor`.
        kwargs: arguments of :class:`~torchrl_llm.envs.games.GameEnv`.

    Example:
        >>> env = KeyDoorEnv(size=3, num_envs=1, shuffle=False)
        >>> print(env.reset()["query"][0].rpartition(". ")[2])
        21 moves left.
    """

    MAX_STEPS = 48
    NEEDS_LARGER_MODEL = True

    def __init__(self, *, size: int = 4, slack: float = 3.0, **kwargs: Any) -> None:
        super().__init__(KeyDoor(size=size, slack=slack), **kwargs)

"""Matching pennies for any text: a game for the smallest model, in tests of self-play."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_llm.envs.games import GameEnv, TableGame, TableOutcome


@dataclass(frozen=True, slots=True)
class PenniesState:
    """Whether the pennies were shown."""

    shown: bool = False


class Pennies(TableGame[PenniesState]):
    """Each shows a side of a penny; A wins if the two are alike, else B."""

    name = "pennies"
    players = ("A", "B")
    action_name = "side"
    action_help = "any word"
    rules = "Two sides alike are A's."
    state_type: ClassVar[type] = PenniesState

    def reset(self, seed: int) -> PenniesState:
        return PenniesState()

    def active(self, state: PenniesState) -> tuple[str, ...]:
        return () if state.shown else self.players

    def observe(self, state: PenniesState, player: str) -> str:
        return "Show a side."

    def normalize(self, action: str) -> str:
        return str(zlib.crc32(action.encode()) % 2)

    def legal_actions(self, state: PenniesState, player: str) -> tuple[str, ...]:
        return ("0", "1") if player in self.active(state) else ()

    best_actions = legal_actions

    def _apply(self, state: PenniesState, actions: Mapping[str, str]) -> TableOutcome:
        sign = 1.0 if actions["A"] == actions["B"] else -1.0
        told = dict.fromkeys(self.players, "They were shown.")
        won = ("A",) if sign > 0 else ("B",)
        return TableOutcome(PenniesState(True), told, {"A": sign, "B": -sign}, True, won)


class PenniesEnv(GameEnv):
    """The game as a task of a recipe."""

    MAX_STEPS = 2
    PLAYERS = Pennies.players

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(Pennies(), **kwargs)

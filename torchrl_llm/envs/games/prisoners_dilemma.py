"""The iterated prisoner's dilemma: two players who decide at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torchrl_llm._checked import Ge, checked
from torchrl_llm._registry import register
from torchrl_llm.envs.games.game import Player
from torchrl_llm.envs.games.game_env import GameEnv
from torchrl_llm.envs.games.table_game import TableGame, TableOutcome

# Axelrod, The Evolution of Cooperation (1984): temptation 5, reward 3, punishment 1, sucker 0.
_PAYOFF = {"CC": (3.0, 3.0), "CD": (0.0, 5.0), "DC": (5.0, 0.0), "DD": (1.0, 1.0)}
_LETTER = {"cooperate": "C", "defect": "D"}


@dataclass(frozen=True, slots=True)
class DilemmaState:
    """The rounds so far.

    Args:
        rounds: two letters per round, ``C`` or ``D``, in the order of the players.
    """

    rounds: tuple[str, ...] = ()


class PrisonersDilemma(TableGame[DilemmaState]):
    """Both players choose at once to cooperate or defect, for a known number of rounds.

    The payoffs of a round are Axelrod's (1984): 3 each if both cooperate, 1 each if both defect,
    otherwise 5 for the player who defects and 0 for the one who cooperates. The best action is to
    defect: in a single round this is best against each action of the other player.

    Args:
        num_rounds: rounds of a game, at least 1.

    Raises:
        ConfigError: there is no round.

    Example:
        >>> game = PrisonersDilemma(num_rounds=2)
        >>> outcome = game.step(game.reset(seed=0), {"A": "cooperate", "B": "defect"})
        >>> outcome.rewards, game.active(outcome.state)
        ({'A': 0.0, 'B': 5.0}, ('A', 'B'))
    """

    name = "prisoners_dilemma"
    players = ("A", "B")
    action_name = "decision"
    action_help = "cooperate or defect"
    state_type: ClassVar[type] = DilemmaState

    @checked
    def __init__(self, *, num_rounds: Annotated[int, Ge(1)] = 5) -> None:
        self.num_rounds = num_rounds

    @property
    def rules(self) -> str:
        """The payoffs and the number of rounds."""
        rounds = "1 round" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return (
            f"You and another player decide at the same time, in {rounds}, to cooperate or to "
            "defect. If both cooperate, each gets 3; if both defect, each gets 1; otherwise the "
            "one who defects gets 5 and the other 0."
        )

    def reset(self, seed: int) -> DilemmaState:
        """The state before the first round, the same for every seed."""
        return DilemmaState()

    def active(self, state: DilemmaState) -> tuple[str, ...]:
        """Both players, until the last round is over."""
        return self.players if len(state.rounds) < self.num_rounds else ()

    def observe(self, state: DilemmaState, player: str) -> str:
        """Which round it is."""
        return f"Round {len(state.rounds) + 1} of {self.num_rounds}. Decide."

    def legal_actions(self, state: DilemmaState, player: str) -> tuple[str, ...]:
        """Both, until the game is over."""
        return tuple(_LETTER) if self.active(state) else ()

    def best_actions(self, state: DilemmaState, player: str) -> tuple[str, ...]:
        """To defect."""
        return ("defect",) if self.active(state) else ()

    def _apply(self, state: DilemmaState, actions: Mapping[str, str]) -> TableOutcome:
        played = "".join(_LETTER[actions[player]] for player in self.players)
        after = DilemmaState((*state.rounds, played))
        rewards = dict(zip(self.players, _PAYOFF[played], strict=True))
        over = not self.active(after)
        words = {letter: f"{word}s" for word, letter in _LETTER.items()}
        told = {
            player: f"The other {words[other]}. You get {rewards[player]:.0f}."
            + ("" if over else f"\n{self.observe(after, player)}")
            for player, other in zip(self.players, reversed(played), strict=True)
        }
        return TableOutcome(after, told, rewards, terminated=over)


@register("tasks", "prisoners_dilemma")
class PrisonersDilemmaEnv(GameEnv):
    """The iterated prisoner's dilemma as an environment of conversations, a row for each player.

    Args:
        num_rounds: see :class:`~torchrl_llm.envs.games.PrisonersDilemma`.
        seats: scripted players, ``{"B": "random"}`` for one.
        kwargs: arguments of :class:`GameEnv`.
    """

    MAX_STEPS = 16
    NEEDS_LARGER_MODEL = True
    PLAYERS = PrisonersDilemma.players

    def __init__(
        self, *, num_rounds: int = 5, seats: Mapping[str, Player | str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(PrisonersDilemma(num_rounds=num_rounds), seats=seats, **kwargs)

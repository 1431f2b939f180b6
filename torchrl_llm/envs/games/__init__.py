"""Games: rules as pure functions, and environments in which language models play them."""

from torchrl_llm.envs.games.game import (
    Game,
    IllegalAction,
    Outcome,
    Player,
    Turn,
    expert,
    play,
    random_player,
)
from torchrl_llm.envs.games.game_env import GameEnv, GameSteps
from torchrl_llm.envs.games.key_door import KeyDoor, KeyDoorEnv
from torchrl_llm.envs.games.prisoners_dilemma import PrisonersDilemma
from torchrl_llm.envs.games.table_env import (
    PrisonersDilemmaEnv,
    TableEnv,
    TableSteps,
    TicTacToeForTwoEnv,
)
from torchrl_llm.envs.games.table_game import TableGame, TableOutcome, play_table
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe, TicTacToeEnv
from torchrl_llm.envs.games.tic_tac_toe_for_two import TicTacToeForTwo

__all__ = [
    "Game",
    "GameEnv",
    "GameSteps",
    "IllegalAction",
    "KeyDoor",
    "KeyDoorEnv",
    "Outcome",
    "Player",
    "PrisonersDilemma",
    "PrisonersDilemmaEnv",
    "TableEnv",
    "TableGame",
    "TableOutcome",
    "TableSteps",
    "TicTacToe",
    "TicTacToeEnv",
    "TicTacToeForTwo",
    "TicTacToeForTwoEnv",
    "Turn",
    "expert",
    "play",
    "play_table",
    "random_player",
]

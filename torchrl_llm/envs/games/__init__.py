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
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe, TicTacToeEnv

__all__ = [
    "Game",
    "GameEnv",
    "GameSteps",
    "IllegalAction",
    "KeyDoor",
    "KeyDoorEnv",
    "Outcome",
    "Player",
    "TicTacToe",
    "TicTacToeEnv",
    "Turn",
    "expert",
    "play",
    "random_player",
]

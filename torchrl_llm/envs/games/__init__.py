"""Games: rules as pure functions, and environments in which language models play them."""

from torchrl_llm.envs.games.game import (
    Agent,
    Game,
    IllegalAction,
    Outcome,
    Turn,
    expert,
    play,
    random_agent,
)
from torchrl_llm.envs.games.game_env import GameEnv, GameSteps
from torchrl_llm.envs.games.key_door import KeyDoor, KeyDoorEnv
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe, TicTacToeEnv

__all__ = [
    "Agent",
    "Game",
    "GameEnv",
    "GameSteps",
    "IllegalAction",
    "KeyDoor",
    "KeyDoorEnv",
    "Outcome",
    "TicTacToe",
    "TicTacToeEnv",
    "Turn",
    "expert",
    "play",
    "random_agent",
]

from torchrl_llm.envs.games.game import (
    Game as Game,
    IllegalAction as IllegalAction,
    Outcome as Outcome,
    Player as Player,
    Turn as Turn,
    expert as expert,
    play as play,
    random_player as random_player,
)
from torchrl_llm.envs.games.game_env import GameEnv as GameEnv, GameSteps as GameSteps
from torchrl_llm.envs.games.key_door import KeyDoor as KeyDoor, KeyDoorEnv as KeyDoorEnv
from torchrl_llm.envs.games.prisoners_dilemma import PrisonersDilemma as PrisonersDilemma
from torchrl_llm.envs.games.table_env import (
    PrisonersDilemmaEnv as PrisonersDilemmaEnv,
    TableEnv as TableEnv,
    TableSteps as TableSteps,
    TicTacToeForTwoEnv as TicTacToeForTwoEnv,
)
from torchrl_llm.envs.games.table_game import (
    TableGame as TableGame,
    TableOutcome as TableOutcome,
    play_table as play_table,
)
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe as TicTacToe, TicTacToeEnv as TicTacToeEnv
from torchrl_llm.envs.games.tic_tac_toe_for_two import TicTacToeForTwo as TicTacToeForTwo

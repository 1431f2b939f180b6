from torchrl_llm.envs.games.game import (
    Game as Game,
    IllegalAction as IllegalAction,
    Outcome as Outcome,
    Player as Player,
    TableOutcome as TableOutcome,
    Turn as Turn,
    expert as expert,
    play as play,
    random_player as random_player,
)
from torchrl_llm.envs.games.game_env import (
    GameEnv as GameEnv,
    TableSteps as TableSteps,
)
from torchrl_llm.envs.games.key_door import KeyDoor as KeyDoor, KeyDoorEnv as KeyDoorEnv
from torchrl_llm.envs.games.prisoners_dilemma import (
    PrisonersDilemma as PrisonersDilemma,
    PrisonersDilemmaEnv as PrisonersDilemmaEnv,
)
from torchrl_llm.envs.games.table_game import (
    TableGame as TableGame,
    play_table as play_table,
)
from torchrl_llm.envs.games.tic_tac_toe import TicTacToe as TicTacToe, TicTacToeEnv as TicTacToeEnv
from torchrl_llm.envs.games.tic_tac_toe_for_two import (
    TicTacToeForTwo as TicTacToeForTwo,
    TicTacToeForTwoEnv as TicTacToeForTwoEnv,
)

"""Environments: chats, tasks, games, remote worlds and transforms."""

from torchrl_llm._imports import lazy
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.envs.datasets.hub_tasks import GSM8KEnv, HumanEvalEnv, IFEvalEnv, MATHEnv
from torchrl_llm.envs.datasets.number_tasks import ArithmeticEnv, CalculatorEnv, CountdownEnv
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv, TaskEnv
from torchrl_llm.envs.datasets.word_tasks import LetterCountingEnv, TextReversalEnv
from torchrl_llm.envs.games import GameEnv, KeyDoorEnv, TicTacToeEnv
from torchrl_llm.envs.libs import MLGymWrapper, OpenEnvEnv, make_mlgym
from torchrl_llm.envs.transforms import (
    AddThinkingPrompt,
    DataLoadingPrimer,
    KLComputation,
    KLRewardTransform,
    RayDataLoadingPrimer,
    RetrieveKL,
    RetrieveLogProb,
    TemplateTransform,
    Tokenizer,
    as_nested_tensor,
    as_padded_tensor,
)

__all__ = [
    "AddThinkingPrompt",
    "ArithmeticEnv",
    "ArithmeticRewardParser",
    "CalculatorEnv",
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DataLoadingPrimer",
    "DatasetChatEnv",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "GameEnv",
    "HumanEvalEnv",
    "HumanEvalRewardParser",
    "IFEvalData",
    "IFEvalEnv",
    "IFEvalScoreData",
    "IfEvalScorer",
    "KLComputation",
    "KLRewardTransform",
    "KeyDoorEnv",
    "LLMEnv",
    "LLMHashingEnv",
    "LetterCountingEnv",
    "LetterCountingRewardParser",
    "MATHEnv",
    "MATHRewardParser",
    "MLGymWrapper",
    "OpenEnvEnv",
    "RayDataLoadingPrimer",
    "RetrieveKL",
    "RetrieveLogProb",
    "RewardParser",
    "RewardScore",
    "TaskEnv",
    "TemplateTransform",
    "TextReversalEnv",
    "TextReversalRewardParser",
    "TicTacToeEnv",
    "Tokenizer",
    "as_nested_tensor",
    "as_padded_tensor",
    "make_gsm8k_env",
    "make_mlgym",
]

_LAZY = {
    "torchrl_llm.rewards": (
        "ArithmeticRewardParser CountdownRewardParser GSM8KRewardParser HumanEvalRewardParser "
        "IFEvalData IFEvalScoreData IfEvalScorer LetterCountingRewardParser MATHRewardParser "
        "RewardParser RewardScore TextReversalRewardParser"
    ),
    "torchrl_llm.compat.gsm8k_text": "GSM8KPrepareQuestion make_gsm8k_env",
    "torchrl_llm.compat.hashing_env": "LLMHashingEnv",
    "torchrl_llm.compat.llm_env": "LLMEnv",
}
__getattr__ = lazy(__name__, _LAZY)

"""Environments: chats, data sets, rewards and transforms."""

from torchrl_llm._imports import lazy
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.envs.datasets.arithmetic import ArithmeticEnv
from torchrl_llm.envs.datasets.calculator import CalculatorEnv
from torchrl_llm.envs.datasets.countdown import CountdownEnv
from torchrl_llm.envs.datasets.gsm8k import GSM8KEnv
from torchrl_llm.envs.datasets.humaneval import HumanEvalEnv
from torchrl_llm.envs.datasets.ifeval import IFEvalEnv
from torchrl_llm.envs.datasets.letter_counting import LetterCountingEnv
from torchrl_llm.envs.datasets.math import MATHEnv
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv, TaskEnv
from torchrl_llm.envs.datasets.text_reversal import TextReversalEnv
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
from torchrl_llm.rewards.arithmetic import ArithmeticRewardParser
from torchrl_llm.rewards.code import HumanEvalRewardParser
from torchrl_llm.rewards.countdown import CountdownRewardParser
from torchrl_llm.rewards.gsm8k import GSM8KRewardParser
from torchrl_llm.rewards.ifeval import IFEvalData, IFEvalScoreData, IfEvalScorer
from torchrl_llm.rewards.letter_counting import LetterCountingRewardParser
from torchrl_llm.rewards.math import MATHRewardParser
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.text_reversal import TextReversalRewardParser

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
    "torchrl_llm.compat.gsm8k_text": "GSM8KPrepareQuestion make_gsm8k_env",
    "torchrl_llm.compat.hashing_env": "LLMHashingEnv",
    "torchrl_llm.compat.llm_env": "LLMEnv",
}
__getattr__ = lazy(__name__, _LAZY)

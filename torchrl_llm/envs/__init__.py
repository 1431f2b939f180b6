"""Environments: chats, tasks, games, remote worlds and transforms."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.tools": "BrowserTransform MCPToolTransform PythonInterpreter",
    "torchrl_llm.compat.gsm8k_text": "GSM8KPrepareQuestion make_gsm8k_env",
    "torchrl_llm.compat.hashing_env": "LLMHashingEnv",
    "torchrl_llm.compat.llm_env": "LLMEnv",
    "torchrl_llm.envs.chat_env": "ChatEnv",
    "torchrl_llm.envs.datasets.hub_tasks": "GSM8KEnv HumanEvalEnv IFEvalEnv MATHEnv",
    "torchrl_llm.envs.datasets.number_tasks": "ArithmeticEnv CalculatorEnv CountdownEnv",
    "torchrl_llm.envs.datasets.task_env": "DatasetChatEnv TaskEnv",
    "torchrl_llm.envs.datasets.word_tasks": "LetterCountingEnv TextReversalEnv",
    "torchrl_llm.envs.games": "GameEnv KeyDoorEnv TicTacToeEnv",
    "torchrl_llm.envs.libs": "make_mlgym MLGymWrapper OpenEnvEnv",
    "torchrl_llm.envs.transforms": (
        "AddThinkingPrompt as_nested_tensor as_padded_tensor DataLoadingPrimer KLComputation "
        "KLRewardTransform RayDataLoadingPrimer RetrieveKL RetrieveLogProb TemplateTransform "
        "Tokenizer"
    ),
    "torchrl_llm.rewards": (
        "ArithmeticRewardParser CountdownRewardParser GSM8KRewardParser HumanEvalRewardParser "
        "IFEvalData IFEvalScoreData IfEvalScorer LetterCountingRewardParser MATHRewardParser "
        "RewardParser RewardScore TextReversalRewardParser"
    ),
}
__getattr__ = lazy(__name__, _LAZY)

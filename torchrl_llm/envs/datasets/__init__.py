"""Tasks over datasets, and the loading that they share."""

from torchrl_llm.data.row_files import GeneratedRows, RowLoader, load_rows, read_jsonl
from torchrl_llm.envs.datasets.hub_tasks import GSM8KEnv, HumanEvalEnv, IFEvalEnv, MATHEnv
from torchrl_llm.envs.datasets.number_tasks import ArithmeticEnv, CalculatorEnv, CountdownEnv
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv, TaskEnv
from torchrl_llm.envs.datasets.word_tasks import LetterCountingEnv, TextReversalEnv

__all__ = [
    "ArithmeticEnv",
    "CalculatorEnv",
    "CountdownEnv",
    "DatasetChatEnv",
    "GSM8KEnv",
    "GeneratedRows",
    "HumanEvalEnv",
    "IFEvalEnv",
    "LetterCountingEnv",
    "MATHEnv",
    "RowLoader",
    "TaskEnv",
    "TextReversalEnv",
    "load_rows",
    "read_jsonl",
]

"""Tasks over data sets, one module each, and the loading that they share."""

from torchrl_llm.data.row_files import GeneratedRows, RowLoader, load_rows, read_jsonl
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

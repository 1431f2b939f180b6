from torchrl_llm.data.row_files import (
    GeneratedRows as GeneratedRows,
    RowLoader as RowLoader,
    load_rows as load_rows,
    read_jsonl as read_jsonl,
)
from torchrl_llm.envs.datasets.hub_tasks import (
    GSM8KEnv as GSM8KEnv,
    HumanEvalEnv as HumanEvalEnv,
    IFEvalEnv as IFEvalEnv,
    MATHEnv as MATHEnv,
)
from torchrl_llm.envs.datasets.number_tasks import (
    ArithmeticEnv as ArithmeticEnv,
    CalculatorEnv as CalculatorEnv,
    CountdownEnv as CountdownEnv,
)
from torchrl_llm.envs.datasets.repairs import RepairsEnv as RepairsEnv
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv as DatasetChatEnv, TaskEnv as TaskEnv
from torchrl_llm.envs.datasets.word_tasks import (
    LetterCountingEnv as LetterCountingEnv,
    TextReversalEnv as TextReversalEnv,
)

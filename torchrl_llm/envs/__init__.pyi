from torchrl_llm.compat.gsm8k_text import (
    GSM8KPrepareQuestion as GSM8KPrepareQuestion,
    make_gsm8k_env as make_gsm8k_env,
)
from torchrl_llm.compat.hashing_env import LLMHashingEnv as LLMHashingEnv
from torchrl_llm.compat.llm_env import LLMEnv as LLMEnv
from torchrl_llm.envs.actions import ActionError as ActionError
from torchrl_llm.envs.chat_env import ChatEnv as ChatEnv
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
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv as DatasetChatEnv, TaskEnv as TaskEnv
from torchrl_llm.envs.datasets.word_tasks import (
    LetterCountingEnv as LetterCountingEnv,
    TextReversalEnv as TextReversalEnv,
)
from torchrl_llm.envs.games import (
    GameEnv as GameEnv,
    KeyDoorEnv as KeyDoorEnv,
    TicTacToeEnv as TicTacToeEnv,
)
from torchrl_llm.envs.libs import (
    MLGymWrapper as MLGymWrapper,
    Observed as Observed,
    OpenEnvEnv as OpenEnvEnv,
    Session as Session,
    SessionEnv as SessionEnv,
    make_mlgym as make_mlgym,
)
from torchrl_llm.envs.transforms import (
    AddThinkingPrompt as AddThinkingPrompt,
    DataLoadingPrimer as DataLoadingPrimer,
    KLComputation as KLComputation,
    KLRewardTransform as KLRewardTransform,
    RayDataLoadingPrimer as RayDataLoadingPrimer,
    RetrieveKL as RetrieveKL,
    RetrieveLogProb as RetrieveLogProb,
    TemplateTransform as TemplateTransform,
    Tokenizer as Tokenizer,
    as_nested_tensor as as_nested_tensor,
    as_padded_tensor as as_padded_tensor,
)
from torchrl_llm.rewards import (
    ArithmeticRewardParser as ArithmeticRewardParser,
    CountdownRewardParser as CountdownRewardParser,
    GSM8KRewardParser as GSM8KRewardParser,
    HumanEvalRewardParser as HumanEvalRewardParser,
    IFEvalData as IFEvalData,
    IFEvalScoreData as IFEvalScoreData,
    IfEvalScorer as IfEvalScorer,
    LetterCountingRewardParser as LetterCountingRewardParser,
    MATHRewardParser as MATHRewardParser,
    RewardParser as RewardParser,
    RewardScore as RewardScore,
    TextReversalRewardParser as TextReversalRewardParser,
)
from torchrl_llm.tools import (
    BrowserTransform as BrowserTransform,
    MCPToolTransform as MCPToolTransform,
    PythonInterpreter as PythonInterpreter,
)

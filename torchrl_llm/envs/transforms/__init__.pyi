from torchrl_llm.compat.template_transform import TemplateTransform as TemplateTransform
from torchrl_llm.compat.text_tokenizer import Tokenizer as Tokenizer
from torchrl_llm.envs.transforms.answer_gates import (
    AnswerGate as AnswerGate,
    CutAnswers as CutAnswers,
    ParseAnswers as ParseAnswers,
)
from torchrl_llm.envs.transforms.context_strategy import (
    ContextStrategy as ContextStrategy,
    FullDialog as FullDialog,
    SlidingWindow as SlidingWindow,
    TruncatedThinking as TruncatedThinking,
)
from torchrl_llm.envs.transforms.dataloading import (
    DataLoadingPrimer as DataLoadingPrimer,
    as_nested_tensor as as_nested_tensor,
    as_padded_tensor as as_padded_tensor,
)
from torchrl_llm.envs.transforms.episode_limits import (
    ContextLimit as ContextLimit,
    OverlongPenalty as OverlongPenalty,
    StepCounter as StepCounter,
)
from torchrl_llm.envs.transforms.kl import (
    KLComputation as KLComputation,
    KLRewardTransform as KLRewardTransform,
    RayKLRewardTransform as RayKLRewardTransform,
    RayRetrieveKL as RayRetrieveKL,
    RetrieveKL as RetrieveKL,
)
from torchrl_llm.envs.transforms.policy_version import PolicyVersion as PolicyVersion
from torchrl_llm.envs.transforms.ray_dataloading import RayDataLoadingPrimer as RayDataLoadingPrimer
from torchrl_llm.envs.transforms.retrieve_scores import (
    RetrieveLogProb as RetrieveLogProb,
    RetrieveTeacherLogProb as RetrieveTeacherLogProb,
    RetrieveValues as RetrieveValues,
)
from torchrl_llm.envs.transforms.thinking import AddThinkingPrompt as AddThinkingPrompt
from torchrl_llm.envs.transforms.tokenizer import IncrementalTokenizer as IncrementalTokenizer
from torchrl_llm.tools import (
    BrowserTransform as BrowserTransform,
    ExecuteToolsInOrder as ExecuteToolsInOrder,
    JSONCallParser as JSONCallParser,
    MCPToolTransform as MCPToolTransform,
    PythonExecutorService as PythonExecutorService,
    PythonInterpreter as PythonInterpreter,
    SimpleToolTransform as SimpleToolTransform,
    ToolCall as ToolCall,
    ToolRegistry as ToolRegistry,
    ToolService as ToolService,
    ToolTransform as ToolTransform,
    XMLBlockParser as XMLBlockParser,
)

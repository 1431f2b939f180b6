"""Transforms of chat environments: data, versions, turns, tokens, reference log-probs."""

from torchrl_llm._imports import lazy
from torchrl_llm.envs.transforms.context_strategy import (
    ContextStrategy,
    FullDialog,
    SlidingWindow,
    TruncatedThinking,
)
from torchrl_llm.envs.transforms.dataloading import (
    DataLoadingPrimer,
    as_nested_tensor,
    as_padded_tensor,
)
from torchrl_llm.envs.transforms.episode_limits import OverlongPenalty, StepCounter
from torchrl_llm.envs.transforms.kl import KLComputation, KLRewardTransform, RetrieveKL
from torchrl_llm.envs.transforms.policy_version import PolicyVersion
from torchrl_llm.envs.transforms.ray_dataloading import RayDataLoadingPrimer
from torchrl_llm.envs.transforms.retrieve_scores import (
    RetrieveLogProb,
    RetrieveTeacherLogProb,
    RetrieveValues,
)
from torchrl_llm.envs.transforms.thinking import AddThinkingPrompt
from torchrl_llm.envs.transforms.tokenizer import IncrementalTokenizer

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "ContextStrategy",
    "DataLoadingPrimer",
    "ExecuteToolsInOrder",
    "FullDialog",
    "IncrementalTokenizer",
    "JSONCallParser",
    "KLComputation",
    "KLRewardTransform",
    "MCPToolTransform",
    "OverlongPenalty",
    "PolicyVersion",
    "PythonExecutorService",
    "PythonInterpreter",
    "RayDataLoadingPrimer",
    "RetrieveKL",
    "RetrieveLogProb",
    "RetrieveTeacherLogProb",
    "RetrieveValues",
    "SimpleToolTransform",
    "SlidingWindow",
    "StepCounter",
    "TemplateTransform",
    "Tokenizer",
    "ToolCall",
    "ToolRegistry",
    "ToolService",
    "ToolTransform",
    "TruncatedThinking",
    "XMLBlockParser",
    "as_nested_tensor",
    "as_padded_tensor",
]

_LAZY = {
    "torchrl_llm.tools": (
        "BrowserTransform ExecuteToolsInOrder JSONCallParser MCPToolTransform "
        "PythonExecutorService PythonInterpreter SimpleToolTransform ToolCall ToolRegistry "
        "ToolService ToolTransform XMLBlockParser"
    ),
    "torchrl_llm.compat.template_transform": "TemplateTransform",
    "torchrl_llm.compat.text_tokenizer": "Tokenizer",
}
__getattr__ = lazy(__name__, _LAZY)

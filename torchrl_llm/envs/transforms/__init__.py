"""Transforms of chat environments: data, versions, turns, tokens, reference log-probs."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.compat.template_transform": "TemplateTransform",
    "torchrl_llm.compat.text_tokenizer": "Tokenizer",
    "torchrl_llm.envs.transforms.answer_gates": "AnswerGate CutAnswers ParseAnswers",
    "torchrl_llm.envs.transforms.context_strategy": (
        "ContextStrategy FullDialog SlidingWindow TruncatedThinking"
    ),
    "torchrl_llm.envs.transforms.dataloading": (
        "as_nested_tensor as_padded_tensor DataLoadingPrimer"
    ),
    "torchrl_llm.envs.transforms.episode_limits": "ContextLimit OverlongPenalty StepCounter",
    "torchrl_llm.envs.transforms.kl": (
        "KLComputation KLRewardTransform RayKLRewardTransform RayRetrieveKL RetrieveKL"
    ),
    "torchrl_llm.envs.transforms.policy_version": "PolicyVersion",
    "torchrl_llm.envs.transforms.ray_dataloading": "RayDataLoadingPrimer",
    "torchrl_llm.envs.transforms.retrieve_scores": (
        "RetrieveLogProb RetrieveTeacherLogProb RetrieveValues"
    ),
    "torchrl_llm.envs.transforms.thinking": "AddThinkingPrompt",
    "torchrl_llm.envs.transforms.tokenizer": "IncrementalTokenizer",
    "torchrl_llm.tools": (
        "BrowserTransform ExecuteToolsInOrder JSONCallParser MCPToolTransform "
        "PythonExecutorService PythonInterpreter SimpleToolTransform ToolCall ToolRegistry "
        "ToolService ToolTransform XMLBlockParser"
    ),
}
__getattr__ = lazy(__name__, _LAZY)

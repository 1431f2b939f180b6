"""Policies over language models, and the backends that run these."""

from __future__ import annotations

from torchrl_llm._imports import lazy
from torchrl_llm.data.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl_llm.modules.backends import (
    Answer,
    Backend,
    Completion,
    FakeBackend,
    OpenAIBackend,
    SamplingParams,
    TransformersBackend,
    VLLMServer,
    sampling_mode,
)
from torchrl_llm.modules.backends.head import ValueHead
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.modules.backends.vllm.async_engine import (
    AsyncVLLM,
    make_async_vllm_engine,
    make_vllm_worker,
)
from torchrl_llm.modules.model_loading import context_length, load_model, load_tokenizer
from torchrl_llm.modules.policies import (
    FakeWrapper,
    LLMWrapperBase,
    LogProbDistribution,
    RemoteTransformersWrapper,
    TransformersWrapper,
    vLLMWrapper,
)
from torchrl_llm.modules.reference import AdapterDisabled
from torchrl_llm.modules.remote import EnginePool, LoadBalancer
from torchrl_llm.modules.reward_model import HFRewardModelWrapper
from torchrl_llm.weights.process_group import (
    stateless_init_process_group,
    stateless_init_process_group_async,
)

__all__ = [
    "AdapterDisabled",
    "Answer",
    "AsyncVLLM",
    "Backend",
    "ChatHistory",
    "Completion",
    "EnginePool",
    "FakeBackend",
    "FakeWrapper",
    "HFRewardModelWrapper",
    "LLMWrapperBase",
    "LoadBalancer",
    "LogProbDistribution",
    "LogProbs",
    "Masks",
    "OpenAIBackend",
    "RemoteTransformersWrapper",
    "SamplingParams",
    "Text",
    "Tokens",
    "TorchRLBufferDataset",
    "TransformersBackend",
    "TransformersWrapper",
    "VLLMBackend",
    "VLLMServer",
    "ValueHead",
    "context_length",
    "load_model",
    "load_tokenizer",
    "make_async_vllm_engine",
    "make_vllm_worker",
    "sampling_mode",
    "stateless_init_process_group",
    "stateless_init_process_group_async",
    "vLLMWorker",
    "vLLMWrapper",
]

_LAZY = {
    "torchrl_llm.compat.buffer_dataset": "TorchRLBufferDataset",
    "torchrl_llm.weights.vllm_extension": "vLLMWorker",
}
__getattr__ = lazy(__name__, _LAZY)

"""Policies over language models, and the backends that run these."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.compat.buffer_dataset": "TorchRLBufferDataset",
    "torchrl_llm.compat.vllm_group": (
        "stateless_init_process_group stateless_init_process_group_async vLLMWorker"
    ),
    "torchrl_llm.data.containers": "ChatHistory LogProbs Masks Text Tokens",
    "torchrl_llm.modules.backends": (
        "Answer Backend Completion FakeBackend OpenAIBackend sampling_mode SamplingParams "
        "TransformersBackend VLLMServer"
    ),
    "torchrl_llm.modules.backends.head": "ValueHead",
    "torchrl_llm.modules.backends.vllm": "VLLMBackend",
    "torchrl_llm.modules.backends.vllm.async_engine": (
        "AsyncVLLM make_async_vllm_engine make_vllm_worker"
    ),
    "torchrl_llm.modules.model_loading": (
        "context_length empty_model end_token_ids load_model load_tokenizer"
    ),
    "torchrl_llm.modules.policies": (
        "ChatServerPolicy FakeWrapper LLMWrapperBase LogProbDistribution PolicyRouter "
        "RemoteTransformersWrapper TransformersWrapper vLLMWrapper"
    ),
    "torchrl_llm.modules.reference": "AdapterDisabled",
    "torchrl_llm.modules.remote": "EnginePool LoadBalancer",
    "torchrl_llm.modules.reward_model": "HFRewardModelWrapper",
}
__getattr__ = lazy(__name__, _LAZY)

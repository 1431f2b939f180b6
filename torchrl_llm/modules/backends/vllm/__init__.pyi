from torchrl_llm.modules.backends.vllm.backend import VLLMBackend as VLLMBackend
from torchrl_llm.modules.backends.vllm.build import (
    build_engine as build_engine,
    engine_arguments as engine_arguments,
)
from torchrl_llm.weights.shared_engine import SharedStorage as SharedStorage
from torchrl_llm.weights.vllm_loading import (
    active_adapter as active_adapter,
    load_into_vllm_model as load_into_vllm_model,
    load_weights as load_weights,
)

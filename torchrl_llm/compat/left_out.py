"""Names of TorchRL that have no counterpart here: they can be imported and say why at use.

A program that imports SGLang's classes and runs vLLM works unchanged.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torchrl_llm.errors import ConfigError

_SGLANG = (
    "SGLang is not offered: use vLLMWrapper with vLLM, or with the URL of any server that speaks "
    "OpenAI's protocol, an SGLang server among them (OpenAIBackend)"
)
_LOCAL = (
    "give vLLMWrapper the model's name or the vllm.LLM itself; weights come by torchrl_llm.weights"
)
_REMOTE = "make_vllm_worker() and AsyncVLLM make engines in Ray actors; give them to vLLMWrapper"
_FP32 = (
    "float32 logits are chosen for an engine (enable_fp32_output=True of AsyncVLLM.from_pretrained "
    "and make_vllm_worker), not for a process"
)
_SECONDS = "limits are arguments: start_timeout_s and timeout_s of AsyncVLLM"
_MLGYM = (
    "MLGymWrapper writes the conversation itself, and make_mlgym() makes it with its tasks; there "
    "are no transforms for its parts"
)
_UPDATER = "vLLMUpdater is an ordinary class here and has no metaclass; subclass it"
_TRANSPORT = (
    "weights travel by WeightSource and WeightReceiver of torchrl_llm.weights, which the schemes "
    "(VLLMWeightSyncScheme, VLLMDoubleBufferSyncScheme) make for you"
)
_REASONS = {
    "AsyncSGLang": _SGLANG,
    "EvaluationOutputParser": _MLGYM,
    "FP32_MODEL_OVERRIDES": _FP32,
    "FP32_OVERRIDES_ENV_VAR": _FP32,
    "IsolateCodeBlock": _MLGYM,
    "LocalLLMWrapper": _LOCAL,
    "MLGymBaseTransform": _MLGYM,
    "MLGymRewardAssignment": _MLGYM,
    "MessageToHistory": _MLGYM,
    "RLSGLangEngine": _SGLANG,
    "RayLLMWorker": _REMOTE,
    "ReadState": _MLGYM,
    "ResetModule": _MLGYM,
    "SGLangCollectiveTransport": _SGLANG,
    "SGLangWeightSender": _SGLANG,
    "SGLangWeightSyncScheme": _SGLANG,
    "SGLangWrapper": _SGLANG,
    "StateToMessage": _MLGYM,
    "TIMEOUT_SECONDS": _SECONDS,
    "TaskSampler": _MLGYM,
    "VLLMCollectiveTransport": _TRANSPORT,
    "VLLMDoubleBufferTransport": _TRANSPORT,
    "check_server_health": _SGLANG,
    "convert_sampling_params": _SGLANG,
    "dtype_to_str": _SGLANG,
    "enable_fp32_overrides": _FP32,
    "flush_cache": _SGLANG,
    "fp32_overrides_enabled": _FP32,
    "get_args": _MLGYM,
    "get_local_ip_address": _SGLANG,
    "get_model_info": _SGLANG,
    "get_server_info": _SGLANG,
    "get_sglang_model_metadata": _SGLANG,
    "register_fp32_overrides": _FP32,
    "str_to_dtype": _SGLANG,
    "vLLMUpdaterMeta": _UPDATER,
    "wait_for_server": _SGLANG,
}


class LeftOut(type):
    """Kind of a name that TorchRL has and this package has not.

    It may be imported and named in ``isinstance``; a call and an attribute raise.

    Example:
        >>> from torchrl_llm.modules import SGLangWrapper
        >>> isinstance(3, SGLangWrapper)
        False
        >>> SGLangWrapper("a model")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        torchrl_llm.errors.ConfigError: SGLangWrapper is left out: SGLang is not offered: ...
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Say why there is nothing to make.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{cls.__name__} is left out: {_REASONS[cls.__name__]}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(f"{cls.__name__} is left out: {_REASONS[cls.__name__]}")


globals().update({name: LeftOut(name, (), {"__module__": __name__}) for name in _REASONS})
__all__ = ["LeftOut", *_REASONS]

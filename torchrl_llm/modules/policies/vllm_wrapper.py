"""The name of the vLLM policy; the engine behind it is not part of this version."""

from __future__ import annotations

from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError

__all__ = ["vLLMWrapper"]


class vLLMWrapper:
    """A policy over a vLLM engine.

    Args:
        model: a model's name or an engine.
        **options: those of :class:`~torchrl_llm.modules.policies.base.LLMWrapperBase`.

    Raises:
        MissingExtraError: when vLLM is not installed; the message says how to install it.
        ConfigError: when it is, for this version has no vLLM backend yet.

    Example:
        >>> vLLMWrapper("a/model")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        MissingExtraError: vLLMWrapper needs the package 'vllm', which is not installed: ...
    """

    def __init__(self, model: Any, **options: Any) -> None:
        require("vllm", extra="vllm", feature="vLLMWrapper")
        raise ConfigError(
            "vLLMWrapper has no engine in this version of torchrl_llm; use TransformersWrapper, "
            "which takes the same arguments"
        )

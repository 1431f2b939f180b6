"""A vLLM engine as a policy, wherever the engine is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.model_loading import load_tokenizer
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase


class vLLMWrapper(LLMWrapperBase):
    """Samples and scores with vLLM: the modes, columns and arguments of every other policy.

    It has no parameters and no gradients: it samples, and scores what a reference has to say. New
    weights come through a weight updater (:mod:`torchrl_llm.weights`), or
    ``backend.update_weights``.

    Args:
        model: a model's name or folder, for an engine in this process; a ``vllm.LLM``; the URL of
            an OpenAI-compatible server (``"http://host:8000"``); or any
            :class:`~torchrl_llm.modules.backends.Backend`, such as engines on Ray
            (:class:`~torchrl_llm.modules.AsyncVLLM`).
        tokenizer: a fast tokenizer, its name or path; by default that of the backend.
        engine_options: what the backend that is built here takes beside the model: see
            :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend` for a name or an engine, and
            :class:`~torchrl_llm.modules.backends.openai.OpenAIBackend` for a URL.
        **options: those of :class:`~torchrl_llm.modules.policies.llm_wrapper.LLMWrapperBase`.

    Raises:
        MissingExtraError: vLLM is needed and not installed.
        ConfigError: for arguments that are unknown, contradict each other or would have no effect.
        ResourceError: model or cache do not fit.

    Example:
        >>> policy = vLLMWrapper("Qwen/Qwen2.5-0.5B-Instruct",  # doctest: +SKIP
        ...     engine_options={"max_model_len": 1024}, generate_kwargs={"max_new_tokens": 64})

        Policies know nothing of where the engine is:

        >>> from torchrl_llm.modules import FakeBackend
        >>> backend = FakeBackend([7, 8], vocab_size=16, eos_token_ids=(2,))
        >>> vLLMWrapper(backend, input_mode="tokens").backend is backend
        True
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        if not isinstance(model, Backend):
            model = _backend(model, tokenizer, dict(engine_options or {}))
        elif engine_options:
            raise ConfigError(
                f"engine_options={sorted(engine_options)} have no effect on a backend that exists"
            )
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        super().__init__(model, tokenizer=tokenizer, **options)
        self._options = options

    def _construction(self) -> dict[str, Any]:
        return {"model": self.backend, "tokenizer": self.tokenizer, **self._options}


def _backend(model: Any, tokenizer: Any, options: dict[str, Any]) -> Backend:
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        from torchrl_llm.modules.backends.openai import OpenAIBackend

        return OpenAIBackend(model, tokenizer=tokenizer, **options)
    require("vllm", extra="vllm", feature="vLLMWrapper")
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    from torchrl_llm.modules.backends.vllm import VLLMBackend

    return VLLMBackend(model, tokenizer=tokenizer, **options)

"""A ``transformers`` policy whose model lives in a Ray actor."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Self

import torch

from torchrl_llm._ray import ActorOptions, require_ray
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.transformers import TransformersBackend
from torchrl_llm.modules.model_loading import load_model, load_tokenizer
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.remote.pool import EnginePool


class RemoteTransformersWrapper(LLMWrapperBase):
    """:class:`~torchrl_llm.modules.TransformersWrapper` over a model in an actor of its own.

    Templates and tokenizer stay here; token ids go to the actor and come back with log-probs, so
    that it does all that other policies do. It has no parameters here and no gradients: it samples,
    and scores what a reference or a teacher has to say.

    Use it in a ``with`` block, or call :meth:`shutdown`. Copies that were pickled use the same
    actor, which is built again when it dies, with the weights that it was sent last.

    Args:
        model: name or folder of a model, or the pool of another such policy.
        tokenizer: a fast tokenizer, its name or folder; by default that of the model.
        max_concurrency: calls that the actor takes at once; the model runs one after the other.
        validate_model: make sure that the model can be found before an actor is started.
        actor_name: policies of the same Ray cluster with the same name share one actor, which ends
            with the policy that started it.
        num_gpus: GPUs of the actor; by default one where the cluster has any.
        num_cpus: CPUs of the actor.
        num_replicas: actors with a model each, which share the work.
        device: where the model goes; by default its GPU where it has one.
        dtype: of the weights.
        timeout_s: most seconds that a call may take.
        start_timeout_s: most seconds that the start may take.
        **options: those of :class:`~torchrl_llm.modules.policies.llm_wrapper.LLMWrapperBase`.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: a model that is not given by name or cannot be found, or wrong options.
        ResourceError: Ray is not running, or has less than what is needed.
        WorkerError: the actor did not start in time.

    Example:
        >>> with RemoteTransformersWrapper("gpt2", max_concurrency=16, input_mode="text",
        ...         generate_kwargs={"max_new_tokens": 30}) as policy:  # doctest: +SKIP
        ...     out = policy(TensorDict(text=Text(prompt="Hello world"), batch_size=[1]))
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EnginePool,
        *,
        tokenizer: Any = None,
        max_concurrency: int = 16,
        validate_model: bool = True,
        actor_name: str | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1.0,
        num_replicas: int = 1,
        device: torch.device | str | None = None,
        dtype: str | torch.dtype = torch.float32,
        timeout_s: float = 600.0,
        start_timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        if isinstance(tokenizer, (str, os.PathLike)):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(model, EnginePool):
            pool = model
        elif isinstance(model, (str, os.PathLike)):
            if validate_model:
                _check_model(model)
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            if num_gpus is None:
                ray = require_ray("RemoteTransformersWrapper")
                num_gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
            if device is None and num_gpus:
                device = "cuda"
            pool = EnginePool(
                partial(_load, os.fspath(model), dtype=dtype, device=device, tokenizer=tokenizer),
                num_replicas,
                options=ActorOptions(
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    max_concurrency=max_concurrency,
                    start_timeout_s=start_timeout_s,
                ),
                tokenizer=tokenizer,
                name=actor_name,
                timeout_s=timeout_s,
                what=f"RemoteTransformersWrapper({os.fspath(model)!r})",
            )
        else:
            raise ConfigError(
                "RemoteTransformersWrapper takes the name or folder of a model, which its actor "
                f"loads, got {type(model).__name__}; use TransformersWrapper for a model in hand"
            )
        started = pool.start()
        try:
            super().__init__(started, tokenizer=tokenizer or pool.tokenizer, **options)
        except BaseException:
            if pool is not model:
                pool.shutdown()
            raise
        self._options = options

    def shutdown(self) -> None:
        """End the actor. Policies made by :meth:`get_new_version` share it."""
        self.backend.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cleanup_batching()
        self.shutdown()

    def _construction(self) -> dict[str, Any]:
        return {"model": self.backend, "tokenizer": self.tokenizer, **self._options}


def _check_model(name_or_path: str | os.PathLike[str]) -> None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"there is no model {os.fspath(name_or_path)!r}: {str(error).splitlines()[0]}"
        ) from error


def _load(
    name_or_path: str,
    *,
    dtype: str | torch.dtype,
    device: torch.device | str | None,
    tokenizer: Any,
) -> TransformersBackend:
    model = load_model(name_or_path, dtype=dtype, device=device)
    return TransformersBackend(model, tokenizer=tokenizer)

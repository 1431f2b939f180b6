"""Policies for users: each is an :class:`LLMWrapperBase` that builds its own backend."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self
from warnings import warn

import torch
from torch import nn

from torchrl_llm._imports import require
from torchrl_llm._ray import ActorOptions, require_ray
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.backends.fake import FakeBackend, Rule, Script
from torchrl_llm.modules.backends.openai import OpenAIBackend
from torchrl_llm.modules.backends.transformers import TransformersBackend
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.modules.model_loading import context_length, load_model, load_tokenizer
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.remote.pool import EnginePool


class TransformersWrapper(LLMWrapperBase):
    """Samples and scores with a ``transformers`` model.

    Args:
        model: a causal language model, its name or path, or an existing backend.
        tokenizer: a fast tokenizer, its name or path; by default the model's, if the model is given
            by name.
        pad_model_input: score rows padded to one length (``True``), or packed one after the other
            (``False``); by default the cheapest layout for the rows. ``backend.layout`` offers more
            layouts, see :class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`.
        device: move the model to this device.
        full_logits: score with the model's own logits, ``[B, T, V]`` at once, for heads that the
            chunked head does not support.
        **options: see :class:`~torchrl_llm.modules.policies.PolicyOptions`.

    Attributes:
        value_head: the backend's value head, or ``None``; see
            :class:`~torchrl_llm.modules.ValueHead`.

    Raises:
        ConfigError: for arguments that contradict each other or would have no effect.
        TypeError: for an unknown argument, with the nearest name.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, eos_token_id=2)
        >>> policy = TransformersWrapper(Qwen2ForCausalLM(config), input_mode="tokens",
        ...     generate_kwargs={"max_new_tokens": 4, "ignore_eos": True})
        >>> rows = ragged_rows({"prompt": [torch.tensor([5, 6]), torch.tensor([7])]})
        >>> out = policy(TensorDict(tokens=rows, batch_size=[2]))
        >>> [len(row) for row in out["tokens"].get("full", as_list=True)]
        [6, 5]
    """

    def __init__(
        self,
        model: nn.Module | str | TransformersBackend,
        *,
        tokenizer: Any = None,
        pad_model_input: bool | None = None,
        device: torch.device | str | None = None,
        full_logits: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(model, str):
            tokenizer = model if tokenizer is None else tokenizer
            model = load_model(model)
        tokenizer = _loaded(tokenizer)
        layout = {None: None, True: "padded", False: "packed"}[pad_model_input]
        if not isinstance(model, TransformersBackend):
            if device is not None:
                model = model.to(device)
            model = TransformersBackend(
                model, tokenizer=tokenizer, layout=layout, full_logits=full_logits
            )
        elif full_logits and not _makes_logits(model):
            raise ConfigError("full_logits=True contradicts the backend: give the model itself")
        elif layout not in (None, model.layout):
            raise ConfigError(
                f"pad_model_input={pad_model_input} contradicts the backend's layout "
                f"{model.layout!r}; set backend.layout, or give the model itself"
            )
        elif device is not None:
            model.model.to(device)
        super().__init__(model, tokenizer=tokenizer, **options)
        # Registered here, so that parameters() and state_dict() contain it; None without one.
        self.value_head = model.value_head

    @property
    def layouts(self) -> tuple[str, ...]:
        """Possible values of ``layout``, see :class:`~torchrl_llm.data.scoring.TokenScorer`."""
        return self.backend.layouts

    @property
    def layout(self) -> str | None:
        """Row layout of the backend for scoring; can be set."""
        return self.backend.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self.backend.layout = layout

    @property
    def pad_model_input(self) -> bool:
        """Whether rows may be padded for scoring; ``False`` if they are always packed."""
        return self.layout != "packed"

    def get_new_version(self, **changes: Any) -> Self:
        """See :meth:`LLMWrapperBase.get_new_version`."""
        if "pad_model_input" in changes or "full_logits" in changes:
            logits = _makes_logits(self.backend)
            changes = {"model": self.backend.model, "full_logits": logits, **changes}
        return super().get_new_version(**changes)


def _makes_logits(backend: TransformersBackend) -> bool:
    """Whether the model computes the logits itself, without the chunked head."""
    return getattr(backend.scorer, "head", False) is None


class vLLMWrapper(LLMWrapperBase):
    """Samples and scores with vLLM, with the same modes, columns and arguments as other policies.

    The policy has no parameters and no gradients, so it can sample, or score as a reference. New
    weights arrive through a weight updater (:mod:`torchrl_llm.weights`), or
    ``backend.update_weights``.

    Args:
        model: a model's name or folder, for an engine in this process; a ``vllm.LLM``; the URL of
            an OpenAI-compatible server (``"http://host:8000"``); or any
            :class:`~torchrl_llm.modules.backends.Backend`, such as engines on Ray
            (:class:`~torchrl_llm.modules.AsyncVLLM`).
        tokenizer: a fast tokenizer, its name or path; by default that of the backend.
        pad_model_input: has no effect and gives a warning, because vLLM takes rows without padding.
        device: raises an error if given, because the engine chooses its devices.
        engine_options: further arguments of the backend that this class builds: see
            :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend` for a name or an engine, and
            :class:`~torchrl_llm.modules.backends.openai.OpenAIBackend` for a URL.
        **options: see :class:`~torchrl_llm.modules.policies.PolicyOptions`.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: for arguments that contradict each other or would have no effect.
        TypeError: for an unknown argument, with the nearest name.
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
        pad_model_input: bool | None = None,
        device: torch.device | str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if pad_model_input is not None:
            warn("pad_model_input has no effect: vLLM takes rows as they are", stacklevel=3)
        if device is not None:
            raise ConfigError(
                f"device={device!r} cannot be chosen by a policy: the engine runs where it was "
                "built; use engine_options, make_vllm_worker(devices=...) or CUDA_VISIBLE_DEVICES"
            )
        tokenizer = _loaded(tokenizer)
        if not isinstance(model, Backend):
            model = _engine_or_server(model, tokenizer, dict(engine_options or {}))
        elif engine_options:
            raise ConfigError(
                f"engine_options={sorted(engine_options)} have no effect on an existing backend"
            )
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        super().__init__(model, tokenizer=tokenizer, **options)


def _engine_or_server(model: Any, tokenizer: Any, options: dict[str, Any]) -> Backend:
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        return OpenAIBackend(model, tokenizer=tokenizer, **options)
    require("vllm", extra="vllm", feature="vLLMWrapper")
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    return VLLMBackend(model, tokenizer=tokenizer, **options)


class RemoteTransformersWrapper(LLMWrapperBase):
    """:class:`TransformersWrapper` over a model in a Ray actor.

    Templates and tokenizer stay in this process. Token ids are sent to the actor, which returns ids
    and log-probs, so this policy supports everything that other policies do. It has no parameters
    in this process and no gradients, so it can sample, or score as a reference or a teacher.

    Use the policy in a ``with`` block, or call :meth:`shutdown`. Pickled copies use the same actor.
    An actor that dies is restarted with the last weights that were sent to it.

    Args:
        model: name or folder of a model, or the pool of an existing ``RemoteTransformersWrapper``.
        max_concurrency: most concurrent calls to the actor; the model runs the calls one after the
            other.
        validate_model: check that the model exists before starting an actor.
        actor_name: policies of the same Ray cluster with the same name share one actor, which ends
            with the policy that started it.
        num_gpus: GPUs of the actor; by default one if the cluster has any.
        num_cpus: CPUs of the actor.
        tokenizer: a fast tokenizer, its name or folder; by default the model's.
        num_replicas: number of actors that share the work, each with its own model.
        device: device of the model; by default the actor's GPU, if it has one.
        dtype: dtype of the weights.
        timeout_s: most seconds that a call may take.
        start_timeout_s: most seconds that the start may take.
        full_logits: as in :class:`TransformersWrapper`.
        **options: see :class:`~torchrl_llm.modules.policies.PolicyOptions`.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the model is not given by name or cannot be found, or the options are wrong.
        ResourceError: Ray is not running, or has too few resources.
        WorkerError: the actor did not start in time.

    Example:
        >>> with RemoteTransformersWrapper("gpt2", max_concurrency=16, input_mode="text",
        ...         generate_kwargs={"max_new_tokens": 30}) as policy:  # doctest: +SKIP
        ...     out = policy(TensorDict(text=Text(prompt="Hello world"), batch_size=[1]))
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EnginePool,
        max_concurrency: int = 16,
        validate_model: bool = True,
        actor_name: str | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1,
        *,
        tokenizer: Any = None,
        num_replicas: int = 1,
        device: torch.device | str | None = None,
        dtype: str | torch.dtype = torch.float32,
        timeout_s: float = 600.0,
        start_timeout_s: float = 300.0,
        full_logits: bool = False,
        **options: Any,
    ) -> None:
        tokenizer = _loaded(tokenizer)
        if isinstance(model, EnginePool):
            pool = model
        elif isinstance(model, (str, os.PathLike)):
            model = os.fspath(model)
            if validate_model:
                context_length(model)
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            if num_gpus is None:
                ray = require_ray("RemoteTransformersWrapper")
                num_gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
            if device is None and num_gpus:
                device = "cuda"
            own = {"tokenizer": tokenizer, "full_logits": full_logits}
            pool = EnginePool(
                partial(_load, model, own, dtype=dtype, device=device),
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
                what=f"RemoteTransformersWrapper({model!r})",
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

    def shutdown(self) -> None:
        """Stop the actor, also for the policies that :meth:`get_new_version` returned."""
        self.backend.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cleanup_batching()
        self.shutdown()


def _load(name_or_path: str, own: Mapping[str, Any], **settings: Any) -> TransformersBackend:
    return TransformersBackend(load_model(name_or_path, **settings), **own)


def _loaded(tokenizer: Any) -> Any:
    by_name = isinstance(tokenizer, (str, os.PathLike))
    return load_tokenizer(tokenizer) if by_name else tokenizer


class FakeWrapper(LLMWrapperBase):
    """Answers by script or rule, or by sampling from a tiny bigram model; needs no model.

    This policy is for tests, examples and dry runs.

    Args:
        answers: see :class:`~torchrl_llm.modules.backends.fake.FakeBackend`, or an existing
            backend.
        tokenizer: a fast tokenizer; optional in tokens mode.
        vocab_size: number of ids; by default the tokenizer's.
        eos_token_ids: ids that end a response; by default the tokenizer's.
        max_length: most tokens of prompt and response.
        **options: see :class:`~torchrl_llm.modules.policies.PolicyOptions`.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> policy = FakeWrapper([7, 8], input_mode="tokens", vocab_size=16, eos_token_ids=(2,))
        >>> td = TensorDict(tokens=ragged_rows({"prompt": [torch.tensor([5])]}), batch_size=[1])
        >>> policy(td)["tokens"].get("full", as_list=True)
        [tensor([5, 7, 8, 2])]
    """

    def __init__(
        self,
        answers: Script | Rule | FakeBackend | None = None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = 4096,
        **options: Any,
    ) -> None:
        backend = answers
        if not isinstance(backend, FakeBackend):
            backend = FakeBackend(
                answers,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                max_length=max_length,
            )
        super().__init__(backend, tokenizer=tokenizer, **options)

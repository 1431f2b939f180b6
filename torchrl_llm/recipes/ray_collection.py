"""Collectors of an asynchronous recipe: Ray actors behind one channel.

The actors build models and environments themselves, from the configuration that they receive
(:func:`of_collectors`).
"""

from __future__ import annotations

import copy
import gc
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl._utils import logger
from torchrl.envs import EnvBase

from torchrl_llm._ray import check_resources, require_ray
from torchrl_llm._registry import find
from torchrl_llm.collectors import ChannelCollector, RayLLMCollector
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport import RayChannel, RowChannel
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.transforms import DataLoadingPrimer, RayDataLoadingPrimer
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.modules import LLMWrapperBase, base_of, load_tokenizer, vLLMWrapper
from torchrl_llm.modules.remote import ObjectStoreSource
from torchrl_llm.recipes import builders, groups
from torchrl_llm.recipes.grpo_config import AsyncGRPOConfig, GRPOGroups
from torchrl_llm.recipes.sampling_engine import engine_arguments
from torchrl_llm.weights import CanaryTarget, FileWriter, VLLMTransfer, engine_weights
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

Config = TypeVar("Config", bound=GRPOGroups)


def of_collectors(config: Config, *, device: Literal["auto", "cpu"]) -> Config:
    """A recipe's configuration, changed for a collector, whose batch is a claim.

    Adapters, gradient checkpointing and the trainer's GPU are removed: collectors get merged
    weights, and have no gradients.

    Args:
        config: configuration of the recipe, with ``rows_per_claim``.
        device: device of the collectors; ``auto`` for their visible GPU, if any.
    """
    made, prompts = copy.copy(config), config.rows_per_claim // config.env.repeats
    alone = {"parallel": "none", "timeout_s": groups.ForwardConfig.timeout_s}
    made.train = replace(config.train, prompts_per_batch=prompts, device=device, **alone)
    held = {"lora": groups.LoraConfig(), "gradient_checkpointing": False}
    made.train_model = replace(config.train_model, **held)
    return made


def make_collecting_policy(config: GRPOGroups) -> LLMWrapperBase:
    """The policy of a collector, in its own process; it starts with the model's weights.

    Garbage collection then skips existing objects, as in the trainer: otherwise it would visit half
    a million objects of the imports every few batches.

    Each collector takes a random seed, so that two collectors sample differently, and a restarted
    collector differently than before.

    Args:
        config: configuration of the collectors.
    """
    builders.set_threads(config)
    builders.seed_everything(secrets.randbits(32))
    policy = _policy(config)
    gc.freeze()
    return policy


def _policy(config: GRPOGroups) -> LLMWrapperBase:
    if config.inference_model.backend == "transformers":
        return builders.make_policy(config)
    tokenizer = builders.make_tokenizer(config.model.name, config.inference_model.max_tokens)
    options: dict[str, Any] = {}
    if config.inference_model.backend == "vllm":
        options = engine_arguments(config, "load")
        options["in_flight"] = "keep" if config.weight_sync.in_flight == "keep" else "wait"
    make = find("backends", config.inference_model.backend)
    backend = make(base_of(config.model.name), tokenizer=tokenizer, **options)
    return vLLMWrapper(backend, tokenizer=tokenizer, **builders.wrapper_options(config))


def sent_dtype(config: GRPOGroups) -> torch.dtype | None:
    """The type of the weights sent to collectors; ``None`` for the type of the trained weights.

    Args:
        config: configuration of the collectors.
    """
    if config.inference_model.backend != "vllm":
        return None
    return getattr(torch, engine_arguments(config, "load")["dtype"])


def make_collecting_env(config: GRPOGroups, prompts: str | None = None) -> TaskEnv:
    """The environments of a collector, in its own process.

    Args:
        config: configuration of the collectors.
        prompts: name of the actor from which all collectors draw prompts, if they share one order;
            ``None`` if each has its own order.
    """
    tokenizer = load_tokenizer(config.model.name)
    if prompts is None:
        return builders.make_train_env(config, tokenizer, seed=secrets.randbits(31))
    shared = {"ray_backend": True, "dataloader_actor_name": prompts}
    return builders.make_train_env(
        config, tokenizer, seed=config.seed, **shared, **config.curriculum.arguments
    )


def rollout_options(config: AsyncGRPOConfig) -> dict[str, Any]:
    """Arguments of a collector whose batches are the trajectories that it claims.

    For single-turn episodes a batch is a number of turns; for longer episodes it is all episodes
    that its environments begin together.

    Args:
        config: configuration of the recipe.
    """
    if builders.max_turns(config) == 1:
        return {"dialog_turns_per_batch": config.rows_per_claim}
    return {"reset_at_each_iter": True}


# Deliveries per collector that may wait before it waits itself.
_WAITING = 4


class RayCollection(ChannelCollector):
    """Collectors of Ray, and the learner's end of the channel that they fill.

    It continues while any of them is alive, and raises the error of the last one.

    Args:
        members: collectors that were built with ``queue=channel`` and not started.
        channel: their channel.
        batch_rows: see :class:`~torchrl_llm.collectors.ChannelCollector`.
        pacer: see :class:`~torchrl_llm.collectors.ChannelCollector`.
        timeout_s: see :class:`~torchrl_llm.collectors.ChannelCollector`.
        dtype: type of the sent weights, see :func:`~torchrl_llm.weights.engine_weights`.
        primer: draws the prompts of all collectors; ``None`` if each draws its own.
        carrier: sends the weights by files or GPUs; ``None`` for Ray's object store.
    """

    def __init__(
        self,
        members: Sequence[RayLLMCollector],
        channel: RowChannel,
        *,
        batch_rows: int,
        pacer: Pacer,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        primer: DataLoadingPrimer | None = None,
        carrier: FileWriter | VLLMTransfer | None = None,
    ) -> None:
        self.members, self._dtype, self.primer = list(members), dtype, primer
        self._carrier = carrier
        super().__init__(
            channel,
            batch_rows=batch_rows,
            pacer=pacer,
            publish=self._send,
            timeout_s=timeout_s,
            # The collectors are watched individually; this limit is for removed collectors.
            worker_timeout_s=2 * timeout_s,
        )

    def start(self, weights: nn.Module | TensorDictBase | Mapping[str, Any]) -> None:
        """Send the current weights to all collectors, and start them.

        Args:
            weights: the trained module, its state dict, or a tensordict of its weights.
        """
        self.publish(weights)
        for member in self.members:
            member.start()

    def _send(
        self, weights: Any, version: int, *, canary: CanaryTarget | None = None
    ) -> str | None:
        self._check_members()
        named = engine_weights(weights, dtype=self._dtype)
        if isinstance(self._carrier, VLLMTransfer) and self._all_there():
            try:
                return self._transfer(named, version, canary)
            except (WeightUpdateError, WorkerError) as error:
                logger.warning(f"version {version} goes through Ray's object store: {error}")
        if isinstance(self._carrier, FileWriter):
            source = self._carrier.write(named, version=version, canary=canary)
        else:
            source = ObjectStoreSource.put(named)
            source.canary = canary
        self._tell(source, version)
        return source.digest

    def _transfer(
        self, named: Mapping[str, Tensor], version: int, canary: CanaryTarget | None
    ) -> str:
        tell, number = partial(self._tell, version=version), len(self.members)
        return self._carrier.send(named, tell, num_receivers=number, canary=canary)[0].digest

    def _tell(self, source: WeightSource, version: int) -> list[WeightReceipt]:
        with ThreadPoolExecutor(len(self.members)) as threads:
            told = threads.map(lambda m: m.load_weights(source, version=version), self.members)
            return [receipt for part in told for receipt in part]

    def _all_there(self) -> bool:
        """Whether all collectors run; a restarting one would be too late for a transfer."""
        try:
            return all(member.pid() for member in self.members)
        except WorkerError:
            return False

    def _watch(self) -> None:
        self._check_members()
        super()._watch()

    def _check_members(self) -> None:
        for member in list(self.members):
            try:
                member.check()
            except Exception as error:
                # The other collectors take over its claims; only the last one cannot be replaced.
                self.members.remove(member)
                if not self.members:
                    raise
                logger.warning(
                    f"continuing with {len(self.members)} collectors without {member.worker_name}: "
                    f"{type(error).__name__}: {error}"
                )
                member.shutdown(raise_on_error=False)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the channel and end the collectors; may be called twice."""
        super().shutdown(timeout, close_env, raise_on_error)
        with ThreadPoolExecutor(max(len(self.members), 1)) as threads:
            end = partial(
                RayLLMCollector.shutdown, timeout=timeout, close_env=close_env, raise_on_error=False
            )
            list(threads.map(end, self.members))
        self.members = []


@contextmanager
def ray_collection(config: AsyncGRPOConfig) -> Iterator[RayCollection]:
    """The configured collectors, built but not started; starts Ray if it is not running.

    Args:
        config: configuration of the recipe.

    Yields:
        A collection to start with the trained weights and to iterate.

    Raises:
        MissingExtraError: Ray is not installed.
        ResourceError: it has fewer CPUs or GPUs than the collectors need.
        WorkerError: a collector did not start in time.
        Exception: an error in the actor while it builds environment or policy.
    """
    ray = require_ray("grpo-async.py", running=False)
    number = config.ray.num_collectors
    bundle = {"CPU": config.ray.cpus_per_collector, "GPU": config.gpus_per_collector}
    own = not ray.is_initialized()
    if own:
        with _visible_gpus(config):
            ray.init(**_init_options(config))
    try:
        check_resources("grpo-async.py", [bundle] * number)
        channel = RayChannel(_WAITING * number, timeout_s=config.ray.timeout_s)
        # The GPU that Ray assigns, or the CPU.
        device = "auto" if config.gpus_per_collector else "cpu"
        what = of_collectors(config, device=device)
        make_env = partial(make_collecting_env, what)
        # Unique names for this run, because the ledger has the names of the resumed run.
        run = secrets.token_hex(3)
        carrier = _carrier(config, ray)
        primer = None
        if config.curriculum.order != "shuffle":
            # The actor ends with the process that starts it, so the learner starts it.
            make_env = partial(make_env, prompts=f"prompts-{run}")
            primer = make_env().primer
        make_policy = partial(make_collecting_policy, what)
        build = partial(_build, config, channel, make_env, make_policy, run)
        with ThreadPoolExecutor(number) as threads:
            members = list(threads.map(build, range(number)))
        rule: StalenessRule = config.train.staleness
        rows = config.rows_per_batch
        collection = RayCollection(
            members,
            channel,
            batch_rows=rows,
            pacer=Pacer(rule, batch_rows=rows * config.train.weight_update_frequency),
            timeout_s=config.ray.timeout_s,
            dtype=sent_dtype(config),
            primer=primer,
            carrier=carrier,
        )
        try:
            yield collection
        finally:
            collection.shutdown(raise_on_error=False)
            if isinstance(carrier, FileWriter):
                carrier.close()
            channel.shutdown()
            if isinstance(primer, RayDataLoadingPrimer):
                primer.shutdown()
    finally:
        if own:
            ray.shutdown()


def _carrier(config: AsyncGRPOConfig, ray: Any) -> FileWriter | VLLMTransfer | None:
    sync = config.weight_sync
    if sync.type == "files":
        return FileWriter(sync.folder)
    if sync.type == "ray":
        return None
    return VLLMTransfer(sync.type, address=ray.util.get_node_ip_address())


def _init_options(config: AsyncGRPOConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    if config.ray.address is not None:
        return {**options, "address": config.ray.address}
    number = config.ray.num_cpus
    if number is None:
        needed = math.ceil(config.ray.num_collectors * config.ray.cpus_per_collector)
        number = max(needed, os.cpu_count() or 1)
    # The collectors share the cores with the trainer. With Ray's default niceness 15 they would get
    # less CPU time than the trainer, which waits for them.
    return {**options, "num_cpus": number, "_system_config": {"worker_niceness": 0}}


@contextmanager
def _visible_gpus(config: AsyncGRPOConfig) -> Iterator[None]:
    """Hide the GPUs of policy and reference from a Ray started on this machine."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    kept = _trainers_gpus(config)
    if config.ray.address is None and kept and config.gpus_per_collector:
        found = torch.cuda.device_count()
        names = given.split(",") if given else [str(index) for index in range(found)]
        left = [name for index, name in enumerate(names) if index not in kept]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(left)
    try:
        yield
    finally:
        if given is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = given
        elif config.ray.address is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def _trainers_gpus(config: AsyncGRPOConfig) -> set[int]:
    """Indices of the GPUs of policy and reference among the visible GPUs."""
    policy = builders.device_of(config)
    if policy.type != "cuda":
        return set()
    kept = {policy.index or 0} if config.train_model.num_devices else set()
    if kept and config.train.parallel != "none":  # one per rank, starting with the first
        kept = set(range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if config.ref_model.num_devices:
        kept.add(builders.reference_device(config).index)
    return kept


def _build(
    config: AsyncGRPOConfig,
    channel: RowChannel,
    make_env: Callable[[], EnvBase],
    make_policy: Callable[[], Any],
    run: str,
    index: int,
) -> RayLLMCollector:
    rows = config.rows_per_claim
    return RayLLMCollector(
        make_env,
        policy_factory=make_policy,
        yield_completed_trajectories=True,
        **rollout_options(config),
        queue=channel,
        claim_rows=rows,
        name=f"collector-{run}-{index}",
        num_cpus=config.ray.cpus_per_collector,
        num_gpus=config.gpus_per_collector,
        in_flight=config.weight_sync.in_flight,
        wait_for_updates=config.weight_sync.type in ("nccl", "ipc"),
        max_restarts=config.ray.max_restarts,
        worker_timeout_s=config.ray.timeout_s,
        timeout_s=config.ray.timeout_s,
    )

"""Parts of the pipeline-RL recipe: its configuration, and both ends of the Redis channel.

Policy, environments, evaluation and algorithm are the same as in ``grpo``.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from redis_arguments import NO_PASSWORD, check_scheme

from torchrl_llm._checked import Ge, Gt
from torchrl_llm._masking import masked
from torchrl_llm._settings import Count, Group, dotted, ensure
from torchrl_llm._threads import BackgroundLoop
from torchrl_llm.collectors import ChannelCollector, LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker, WeightFollower
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport.redis_channel import RedisChannel
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.recipes import RENAMED, GRPOGroups, TrainConfig
from torchrl_llm.recipes.groups import AsyncWeightSyncConfig
from torchrl_llm.recipes.ray_collection import (
    make_collecting_env,
    make_collecting_policy,
    of_collectors,
    rollout_options,
    sent_dtype,
)
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.trainers import say
from torchrl_llm.weights import CanaryTarget, FileWriter, engine_weights
from torchrl_llm.weights.redis_weights import RedisWeightReader, RedisWeightWriter
from torchrl_llm.weights.shared_files import newest_update
from torchrl_llm.weights.weight_source import WeightSource

_WATCH_S = 1.0


class PipelineTrainConfig(TrainConfig):
    """The training loop of the learner.

    Attributes:
        max_lag: number of updates of the weights that are allowed since a token was sampled.
        on_stale: action at the limit ``max_lag`` (``wait``: actors wait; ``drop``: they continue,
            and older rows are dropped; ``mask``: they continue, and older tokens are not trained).
        weight_update_frequency: training steps after which the actors get new weights.
    """

    max_lag: Annotated[int, Ge(0)] = 2
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    weight_update_frequency: Count = 1

    @property
    def staleness(self) -> StalenessRule:
        """The rule from these keys."""
        return StalenessRule(max_policy_age=self.max_lag, on_stale=self.on_stale)


class PipelineWeightSyncConfig(AsyncWeightSyncConfig, key="weight_sync"):
    """How the actors get the trained weights.

    Attributes:
        type: ``redis`` for models that are small enough for the Redis and the network; ``files``
            through a folder that learner and actors share.
        folder: folder of these files.
        in_flight: effect of new weights on running conversations (``wait``: all finish their
            current answer, then continue with the new weights; ``keep``: partial answers continue
            with the new weights, and each token records its version; ``abort``: they are dropped,
            and new conversations begin).
        verify: after each update every actor compares its engine's log-probs of a few rows with the
            learner's, and ends if they differ by more than rounding. It has an effect only with
            ``inference_model.backend=vllm``.
    """

    type: Literal["redis", "files"] = "redis"


class RedisConfig(Group, key="redis"):
    """The Redis between learner and actors.

    Attributes:
        url: ``redis://[user@]host:port/db``, ``rediss://`` for TLS, ``unix://path``; the password
            comes from the environment variable ``TORCHRL_LLM_REDIS_PASSWORD``.
        name: name of the run; runs of different names may share a Redis.
        prompts_per_claim: prompts that an actor answers at a time.
        max_waiting: deliveries that may wait for the learner.
        reconnect_s: seconds that the Redis may be unreachable.
        timeout_s: seconds after which the learner stops if it gets no rows, or an actor if it finds
            no learner.
        worker_timeout_s: seconds without a heartbeat of an actor after which other actors get its
            claims.
    """

    url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    name: str = "pipeline-rl"
    prompts_per_claim: Count = 8
    max_waiting: Count = 8
    reconnect_s: Annotated[float, Ge(0)] = 60.0
    timeout_s: Annotated[float, Gt(0)] = 600.0
    worker_timeout_s: Annotated[float, Gt(0)] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(bool(self.name), "redis.name must not be empty")
        check_scheme(self.url)


class PipelineConfig(GRPOGroups):
    """All settings of ``actor.py`` and ``learner.py``."""

    train: PipelineTrainConfig
    weight_sync: PipelineWeightSyncConfig
    redis: RedisConfig

    @property
    def rows_per_claim(self) -> int:
        """Responses that an actor samples at once, in whole groups."""
        return self.redis.prompts_per_claim * self.env.repeats

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.train.prompts_per_batch % self.redis.prompts_per_claim == 0,
            f"train.prompts_per_batch={self.train.prompts_per_batch} is not a multiple of "
            f"redis.prompts_per_claim={self.redis.prompts_per_claim}: a step would get more rows, "
            "or fewer, than it has room for",
        )
        self.check_sampling_elsewhere()
        ensure(
            self.curriculum.order == "shuffle",
            f"curriculum.order={self.curriculum.order} has no effect: each actor draws its prompts "
            "by itself; grpo-sync.py and grpo-async.py have it",
        )


def load_config(values: Mapping[str, Any]) -> PipelineConfig:
    """Validate a composed configuration.

    Raises:
        ConfigError: an invalid combination, or a password in the configuration.
    """
    written = dotted(OmegaConf.to_container(OmegaConf.create(values), resolve=False))
    for key, value in written.items():
        if masked(value) != value:
            _forget_saved_config()
            raise ConfigError(f"{key} holds a password, {NO_PASSWORD}")
    return from_mapping(PipelineConfig, values, renamed=RENAMED)


def _forget_saved_config() -> None:
    """Remove the configuration that Hydra has already written."""
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    if hydra is not None and hydra.output_subdir is not None:
        Path(hydra.runtime.output_dir, hydra.output_subdir, "config.yaml").unlink(missing_ok=True)


# -- the learner's end ----------------------------------------------------------------------------


@contextmanager
def redis_collection(
    config: PipelineConfig, *, checks: Sequence[Callable[[], None]] = ()
) -> Iterator[ChannelCollector]:
    """The learner's iterator over the rows of actors on any machine.

    Args:
        config: configuration of the recipe.
        checks: functions that are called about once a second, and raise an error if further waiting
            is useless.
    """
    redis, sync = config.redis, config.weight_sync
    on_return: Callable[[], None] | None = None
    if sync.type == "redis":
        writer = RedisWeightWriter(
            redis.url, redis.name, reconnect_s=redis.reconnect_s, dtype=sent_dtype(config)
        )
        publish, on_return = writer.publish, writer.refresh
    else:
        writer = FileWriter(sync.folder)
        publish = partial(_write, writer, dtype=sent_dtype(config))
    channel = RedisChannel(
        redis.url,
        redis.name,
        redis.max_waiting,
        begin=True,
        reconnect_s=redis.reconnect_s,
        on_return=on_return,
    )
    rows = config.rows_per_batch
    collector = ChannelCollector(
        channel,
        batch_rows=rows,
        pacer=Pacer(config.train.staleness, rows * config.train.weight_update_frequency),
        publish=publish,
        timeout_s=redis.timeout_s,
        worker_timeout_s=redis.worker_timeout_s,
        checks=checks,
    )
    try:
        yield collector
    finally:
        collector.shutdown(raise_on_error=False)
        writer.close()


def _write(
    writer: FileWriter,
    weights: Any,
    version: int,
    *,
    dtype: torch.dtype | None,
    canary: CanaryTarget | None = None,
) -> str | None:
    named = engine_weights(weights, dtype=dtype)
    return writer.write(named, version=version, canary=canary).digest


# -- the actors' end ------------------------------------------------------------------------------


def run_actor(config: PipelineConfig, *, say: Callable[[str], None] = say) -> str:
    """Collect rows for the learner until it closes the channel.

    Args:
        config: configuration of the recipe, the same as the learner's.
        say: prints lines for the user at the terminal.

    Returns:
        Why it ended.

    Raises:
        WorkerError: no learner, or no Redis, for longer than the limits.
    """
    redis = config.redis
    channel = RedisChannel(redis.url, redis.name, reconnect_s=redis.reconnect_s)
    # A device of the learner such as cuda:1 may not exist on this machine.
    device = "cpu" if config.train.device == "cpu" else "auto"
    what = of_collectors(config, device=device)
    collector = LLMCollector(
        make_collecting_env(what),
        policy=make_collecting_policy(what),
        yield_completed_trajectories=True,
        **rollout_options(config),
    )
    # Unique over restarts, because the learner rejects a dropped worker that returns.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    worker = CollectorWorker(collector, channel, name=name, claim_rows=config.rows_per_claim)
    follower = WeightFollower(worker, _newest(config), in_flight=config.weight_sync.in_flight)
    watch = _Watch(channel, worker, redis.timeout_s)
    with collector:
        say(f"{name} waits for a learner at {channel.place}")
        follower.wait(timeout_s=redis.timeout_s)
        follower.start()
        watch.loop.start()
        say(f"{name} collects, from version {follower.version} of the weights")
        try:
            end = worker.run()
        finally:
            watch.loop.stop()
            follower.shutdown()
    watch.check()
    say(f"{name} ends: {end}")
    return end


def _newest(config: PipelineConfig) -> Callable[[], tuple[int, WeightSource] | None]:
    redis, sync = config.redis, config.weight_sync
    if sync.type == "redis":
        return RedisWeightReader(redis.url, redis.name, reconnect_s=redis.reconnect_s).newest
    return partial(newest_update, sync.folder)


class _Watch:
    """Ends a worker whose learner has ended, because it would never claim a row again."""

    def __init__(self, channel: RedisChannel, worker: CollectorWorker, limit_s: float) -> None:
        self._channel, self._worker, self._limit_s = channel, worker, limit_s
        self._gone = False
        self.loop = BackgroundLoop(self._look, name="watch")

    def _look(self) -> bool:
        if self.loop.stopping.wait(_WATCH_S):
            return False
        try:
            silence_s = self._channel.learner_silence_s()
        except WorkerError:
            return False  # the worker's own calls report errors of the Redis
        self._gone = silence_s is not None and silence_s > self._limit_s
        if self._gone:
            self._worker.stop()
        return not self._gone

    def check(self) -> None:
        """Raise an error if the learner has ended."""
        if self._gone:
            raise WorkerError(
                f"the learner has not been heard of for {self._limit_s:g} s; start it again with "
                "checkpoint.resume=auto, and this actor with it"
            )

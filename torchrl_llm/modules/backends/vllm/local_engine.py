"""Engine of this process, as all backends over it share it: its loop, its sleep, its version.

Sleep and wake are a machine of states, so that nothing is sampled from memory that is gone.

.. code-block:: text

    AWAKE --fall(1 or 2)--> ASLEEP --wake(weights_only=True)--> WEIGHTS --wake()--> AWAKE
                            ASLEEP --wake()-----------------------------------------> AWAKE
    AWAKE --release_cache()----------------------------------> WEIGHTS --wake()--> AWAKE

An engine whose weights are a trainer's too has the last line alone.
After ``fall(2)`` the weights are gone: the engine stays closed, whatever its state, until full ones
have arrived.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_llm._checked import checked
from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.modules.backends.backend_port import EngineStatus
from torchrl_llm.modules.backends.vllm.build import runs_on_cpu
from torchrl_llm.modules.backends.vllm.engine_loop import EngineLoop
from torchrl_llm.weights.vllm_loading import active_adapter


class _Mode(enum.Enum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "awake with its weights only, without a cache"


class SleepState:
    """What an engine may do now; changed by whoever is alone with it.

    Args:
        engine: a ``vllm.LLM``; it is told ``sleep``, ``release_kv_cache_memory`` and ``wake_up``.
        loop: admits no request while the engine cannot answer.
        enabled: whether the engine was built to sleep.
        frees_memory: ``False`` where sleeping changes nothing but the state (on the CPU).

    Example:
        >>> state = SleepState(None, EngineLoop(None), enabled=False, frees_memory=False)
        >>> state.fall(2)
        >>> state.wake(); state.reason
        'the engine lost its weights when it slept at level 2; bring full ones (update_weights)'
        >>> state.filled(); state.reason is None
        True
    """

    def __init__(self, engine: Any, loop: EngineLoop, *, enabled: bool, frees_memory: bool) -> None:
        self._engine, self._loop = engine, loop
        self._enabled, self._frees = enabled, frees_memory
        self._mode, self._empty, self._shared = _Mode.AWAKE, False, False
        self._waiting: Callable[[], Any] | None = None

    @property
    def reason(self) -> str | None:
        """Why the engine cannot answer; ``None`` when it can."""
        if self._mode is not _Mode.AWAKE:
            return f"the engine is {self._mode.value}; call wake() before it samples or scores"
        if self._empty:
            return (
                "the engine lost its weights when it slept at level 2; bring full ones "
                "(update_weights)"
            )
        return None

    def check_weights(self) -> None:
        """Raise :class:`~torchrl_llm.errors.BackendError` where there is no room for weights."""
        if self._mode is _Mode.ASLEEP:
            raise BackendError(
                "the engine is asleep and has no room for weights; call wake(weights_only=True)"
            )

    def share_weights(self) -> None:
        """Say that a trainer computes with the engine's weights: they stay where they are."""
        self._shared = True

    @checked
    def fall(self, level: Literal[1, 2]) -> None:
        """Fall asleep.

        Args:
            level: 1 keeps the weights, 2 does not.

        Raises:
            BackendError: it sleeps already.
            ConfigError: another level, or an engine that cannot.
        """
        if self._shared:
            raise ConfigError(
                "the weights of this engine are a trainer's too, who computes with them while the "
                "engine sleeps: give back its cache alone (release_cache)"
            )
        self._rest(_Mode.ASLEEP, lambda: self._engine.sleep(level))
        self._empty = self._empty or level == 2

    def release_cache(self) -> None:
        """Give back the memory of the cache; the weights stay where they are.

        Raises:
            BackendError: it sleeps already.
            ConfigError: an engine that cannot.
        """
        self._rest(_Mode.WEIGHTS, lambda: _discard_cache(self._engine))

    def _rest(self, mode: _Mode, free: Callable[[], None]) -> None:
        if self._mode is not _Mode.AWAKE:
            raise BackendError(f"the engine is {self._mode.value} already")
        if self._frees:
            if not self._enabled:
                raise ConfigError("this engine cannot sleep: build it with enable_sleep_mode=True")
            free()
        self._mode = mode
        self._loop.closed = self.reason

    def wake(self, *, weights_only: bool = False) -> None:
        """Wake up, all or in part.

        Args:
            weights_only: make room for the weights and not yet for the cache.

        Raises:
            BackendError: it is awake.
        """
        if self._mode is _Mode.AWAKE or (weights_only and self._mode is _Mode.WEIGHTS):
            raise BackendError(f"the engine is {self._mode.value} already")
        if self._frees:
            parts = ["weights"] if weights_only else ["weights", "kv_cache"]
            if self._mode is _Mode.WEIGHTS:
                parts = ["kv_cache"]
            self._engine.wake_up(parts)
        self._mode = _Mode.WEIGHTS if weights_only else _Mode.AWAKE
        self._loop.closed = self.reason

    def wait(self, action: Callable[[], Any]) -> bool:
        """Keep an action for when the engine can answer, in place of the one before.

        Args:
            action: what samples or scores.

        Returns:
            Whether it waits; ``False`` where the engine can answer now.
        """
        self._waiting = None if self.reason is None else action
        return self._waiting is not None

    def take_waiting(self) -> Callable[[], Any] | None:
        """What waited, once, when the engine can answer."""
        if self.reason is not None:
            return None
        action, self._waiting = self._waiting, None
        return action

    def filled(self) -> None:
        """Say that full weights arrived."""
        self._empty = False
        self._loop.closed = self.reason


def _discard_cache(llm: Any) -> None:
    """Unmap the cache of an engine that has nothing to do, and forget what was in it."""
    core = llm.llm_engine.engine_core.engine_core
    llm.sleep(level=0)  # it admits nothing from here on
    # Requests that are done leave the scheduler with the step after their last one.
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()
    llm.release_kv_cache_memory()


def draw_privately(engine: Any) -> None:
    """Give the sampler of an engine in this process a generator of its own.

    Rows with a seed are sampled as before. Nothing is done where the engine's sampler is not in
    this process or does not run on the CPU.

    Args:
        engine: a ``vllm.LLM``.
    """
    executor = getattr(engine.llm_engine, "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    sampler = getattr(getattr(worker, "model_runner", None), "sampler", None)
    inner = getattr(sampler, "topk_topp_sampler", None)
    if inner is not None and getattr(inner.forward, "__name__", "") == "forward_cpu":
        inner.forward = _PrivateDraws(inner)


class _PrivateDraws:
    def __init__(self, sampler: Any) -> None:
        self._mode = sampler.logprobs_mode
        self._generator = torch.Generator().manual_seed(0)

    def __call__(
        self,
        logits_BV: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits_BV = apply_top_k_top_p(logits_BV, k, p).float()
        processed = None
        if self._mode == "processed_logits":
            processed = logits_BV
        elif self._mode == "processed_logprobs":
            processed = logits_BV.log_softmax(dim=-1)
        seeds = [
            torch.randint(2**31, (1,), generator=generators.get(row, self._generator))
            for row in range(logits_BV.shape[0])
        ]
        return torch.ops._C.fused_gumbel_argmax(logits_BV, torch.cat(seeds)), processed


_ATTRIBUTE = "_torchrl_llm_engine"


class LocalEngine:
    """The one state of an engine of this process; get it by :meth:`of`.

    Args:
        llm: a ``vllm.LLM``.

    Attributes:
        loop: steps it for all callers.
        sleep: whether it can answer.
        version: number of its weights.
        versions: the number behind each label of weights that the engine puts on tokens; empty as
            long as no version was set.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self.loop = EngineLoop(
            self._engine,
            aborted=partial(_partial, self._engine),
            adapter=partial(active_adapter, llm),
        )
        self.sleep = SleepState(
            llm,
            self.loop,
            enabled=bool(self._engine.model_config.enable_sleep_mode),
            frees_memory=not runs_on_cpu(),
        )
        self.version = 0
        self.versions: dict[str, int] = {}
        draw_privately(llm)

    @classmethod
    def of(cls, llm: Any) -> LocalEngine:
        """That of an engine: two backends over it must not step it at once."""
        found = getattr(llm, _ATTRIBUTE, None)
        if found is None:
            found = cls(llm)
            setattr(llm, _ATTRIBUTE, found)
        return found

    @property
    def status(self) -> EngineStatus:
        """Share of the cache in use (where the scheduler is in this process), steps, and health."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        usage = None if manager is None else float(manager.usage)
        return EngineStatus(usage, self.loop.steps, self.loop.dead)

    def forget_cache(self) -> None:
        """Drop every cached key and value; what runs recomputes its own.

        Otherwise running responses would hold on to blocks of the old weights' cache, which new
        requests could then find. The caller is alone with the engine.
        """
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def weights_changed(self, version: int) -> None:
        """Drop the cache and count a version; the caller is alone with the engine.

        Args:
            version: number of the weights that the engine has now.

        Raises:
            BackendError: it sleeps.
        """
        self.sleep.check_weights()
        self.forget_cache()
        if not self.versions:
            self.versions[self._engine.get_weight_version()] = self.version
        label = str(version)
        self._engine.set_weight_version(label)
        self.versions[label] = self.version = version


def _partial(engine: Any, name: str) -> Any:
    """What a request has so far, as the output of an aborted one."""
    from vllm.v1.engine import FinishReason as NativeReason

    processor = engine.output_processor
    [inside] = processor.external_req_ids[name]
    return processor.request_states[inside].make_request_output([], None, NativeReason.ABORT, None)

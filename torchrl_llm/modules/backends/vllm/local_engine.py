"""State of an engine in this process, which its backends share: loop, sleep and version.

Sleep and wake form a state machine, so that no sample comes from freed memory.

.. code-block:: text

    AWAKE --fall(1 or 2)--> ASLEEP --wake(weights_only=True)--> WEIGHTS --wake()--> AWAKE
                            ASLEEP --wake()-----------------------------------------> AWAKE
    AWAKE --release_cache()----------------------------------> WEIGHTS --wake()--> AWAKE

For an engine that shares its weights with a trainer, only the last line is possible. ``fall(2)``
drops the weights. After it, the engine rejects requests in any state until full weights have
arrived.
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
    """Sleep state of an engine; only changed with exclusive access to the engine.

    Args:
        engine: a ``vllm.LLM``; its ``sleep``, ``release_kv_cache_memory`` and ``wake_up`` are
            called.
        loop: rejects requests while the engine cannot answer.
        enabled: whether the engine was built to sleep.
        frees_memory: ``False`` if sleeping only changes the state (on the CPU).

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
        """The reason why the engine cannot answer; ``None`` if it can."""
        if self._mode is not _Mode.AWAKE:
            return f"the engine is {self._mode.value}; call wake() before it samples or scores"
        if self._empty:
            return (
                "the engine lost its weights when it slept at level 2; bring full ones "
                "(update_weights)"
            )
        return None

    def check_weights(self) -> None:
        """Raise :class:`~torchrl_llm.errors.BackendError` if there is no room for weights."""
        if self._mode is _Mode.ASLEEP:
            raise BackendError(
                "the engine is asleep and has no room for weights; call wake(weights_only=True)"
            )

    def share_weights(self) -> None:
        """Mark the weights as shared with a trainer, so that they stay in place."""
        self._shared = True

    @checked
    def fall(self, level: Literal[1, 2]) -> None:
        """Fall asleep.

        Args:
            level: 1 keeps the weights, 2 does not.

        Raises:
            BackendError: the engine already sleeps.
            ConfigError: a different level, or an engine that cannot sleep.
        """
        if self._shared:
            raise ConfigError(
                "this engine shares its weights with a trainer, which uses them while the "
                "engine sleeps: only free its cache (release_cache)"
            )
        self._rest(_Mode.ASLEEP, lambda: self._engine.sleep(level))
        self._empty = self._empty or level == 2

    def release_cache(self) -> None:
        """Free the memory of the cache; the weights stay in place.

        Raises:
            BackendError: the engine already sleeps.
            ConfigError: an engine that cannot sleep.
        """
        self._rest(_Mode.WEIGHTS, lambda: _discard_cache(self._engine))

    def _rest(self, mode: _Mode, free: Callable[[], None]) -> None:
        if self._mode is not _Mode.AWAKE:
            raise BackendError(f"the engine is already {self._mode.value}")
        if self._frees:
            if not self._enabled:
                raise ConfigError("this engine cannot sleep: build it with enable_sleep_mode=True")
            free()
        self._mode = mode
        self._loop.closed = self.reason

    def wake(self, *, weights_only: bool = False) -> None:
        """Wake up completely or in part.

        Args:
            weights_only: allocate memory for the weights but not yet for the cache.

        Raises:
            BackendError: the engine is awake.
        """
        if self._mode is _Mode.AWAKE or (weights_only and self._mode is _Mode.WEIGHTS):
            raise BackendError(f"the engine is already {self._mode.value}")
        if self._frees:
            parts = ["weights"] if weights_only else ["weights", "kv_cache"]
            if self._mode is _Mode.WEIGHTS:
                parts = ["kv_cache"]
            self._engine.wake_up(parts)
        self._mode = _Mode.WEIGHTS if weights_only else _Mode.AWAKE
        self._loop.closed = self.reason

    def wait(self, action: Callable[[], Any]) -> bool:
        """Store an action until the engine can answer, in place of the previous action.

        Args:
            action: function that samples or scores.

        Returns:
            Whether the action waits; ``False`` if the engine can answer now.
        """
        self._waiting = None if self.reason is None else action
        return self._waiting is not None

    def take_waiting(self) -> Callable[[], Any] | None:
        """Remove and return the waiting action, if the engine can answer."""
        if self.reason is not None:
            return None
        action, self._waiting = self._waiting, None
        return action

    def filled(self) -> None:
        """Record that full weights arrived."""
        self._empty = False
        self._loop.closed = self.reason


def _discard_cache(llm: Any) -> None:
    """Unmap the cache of an idle engine and drop its content."""
    core = llm.llm_engine.engine_core.engine_core
    llm.sleep(level=0)  # it admits no requests from here on
    # Finished requests leave the scheduler one step after their last step.
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()
    llm.release_kv_cache_memory()


def draw_privately(engine: Any) -> None:
    """Give the sampler of an engine in this process its own generator.

    Sampling of rows with a seed does not change. The function does nothing if the engine's sampler
    is not in this process or does not run on the CPU.

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
    """The shared state of an engine in this process; get it by :meth:`of`.

    Args:
        llm: a ``vllm.LLM``.

    Attributes:
        loop: steps the engine for all callers.
        sleep: sleep state, which determines whether the engine can answer.
        version: version of the engine's weights.
        versions: version of the weights for each label that the engine puts on tokens; empty until
            a version is set.
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
        """Return the one state of an engine: two backends must not step it at the same time."""
        found = getattr(llm, _ATTRIBUTE, None)
        if found is None:
            found = cls(llm)
            setattr(llm, _ATTRIBUTE, found)
        return found

    @property
    def status(self) -> EngineStatus:
        """Return used share of the cache (with a scheduler in this process), steps, health."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        usage = None if manager is None else float(manager.usage)
        return EngineStatus(usage, self.loop.steps, self.loop.dead)

    def forget_cache(self) -> None:
        """Drop all cached keys and values; running requests recompute theirs.

        Otherwise running responses would keep cache blocks of the old weights, and new requests
        could reuse these blocks. The caller must have exclusive access to the engine.
        """
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def weights_changed(self, version: int) -> None:
        """Drop the cache and set the version; the caller must have exclusive access to the engine.

        Args:
            version: version of the engine's current weights.

        Raises:
            BackendError: the engine sleeps.
        """
        self.sleep.check_weights()
        self.forget_cache()
        if not self.versions:
            self.versions[self._engine.get_weight_version()] = self.version
        label = str(version)
        self._engine.set_weight_version(label)
        self.versions[label] = self.version = version


def _partial(engine: Any, name: str) -> Any:
    """Return the tokens of a request so far, in the form of an aborted request's output."""
    from vllm.v1.engine import FinishReason as NativeReason

    processor = engine.output_processor
    [inside] = processor.external_req_ids[name]
    return processor.request_states[inside].make_request_output([], None, NativeReason.ABORT, None)

"""What all backends over one engine share: who steps it, if it sleeps, which weights it has."""

from __future__ import annotations

from functools import partial
from typing import Any

from torchrl_llm.modules.backends.base import EngineStatus
from torchrl_llm.modules.backends.vllm.adapter import active_adapter
from torchrl_llm.modules.backends.vllm.engine import EngineLoop
from torchrl_llm.modules.backends.vllm.noise import draw_privately
from torchrl_llm.modules.backends.vllm.settings import runs_on_cpu
from torchrl_llm.modules.backends.vllm.sleep import SleepState

__all__ = ["LocalEngine"]

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
            long as nobody has said a version.
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
        """Drop every cached key and value; what runs computes its own anew.

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

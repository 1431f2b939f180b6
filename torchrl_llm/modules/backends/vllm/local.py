"""What all backends over one engine share: who steps it, if it sleeps, which weights it has."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.modules.backends.backend_port import EngineStatus
from torchrl_llm.modules.backends.vllm.engine_environment import runs_on_cpu
from torchrl_llm.modules.backends.vllm.engine_loop import EngineLoop
from torchrl_llm.modules.backends.vllm.lora_adapter import active_adapter
from torchrl_llm.modules.backends.vllm.sleep import SleepState


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

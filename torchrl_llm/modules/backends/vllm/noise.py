"""Keep an engine on the CPU off torch's global generator.

vLLM's sampler for the CPU draws a seed for every row and step from the global generator, also for
rows that have one of their own. Whoever else draws from it in this process (the trainer, a data
loader, another thread) would get other numbers depending on how far an engine has come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["draw_privately"]


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

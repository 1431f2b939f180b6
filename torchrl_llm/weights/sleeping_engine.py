"""Updater of engines that sleep during training, so that both fit on one GPU.

A sleeping engine has released all its memory, including the weights; the next push sends them
again. The engine wakes in two steps, so that weights arrive before the cache is allocated. The
canary check waits until the engine can answer again. With shared weights
(:class:`~torchrl_llm.weights.SharedEngineWeights`), only the cache is released.

:mod:`torchrl_llm.modules.backends.vllm.local_engine` implements the sleep states.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrl_llm.weights.engine_updaters import EngineWeights, Weights


class SleepingEngineWeights(EngineWeights):
    """:class:`~torchrl_llm.weights.EngineWeights` for engines that sleep between pushes.

    Call :meth:`sleep` after the rows of a step are collected, and :meth:`push_weights` after
    training. Between the two calls, sampling and scoring raise an error. A failed or unverified
    push raises an error as usual. The engine is then awake, but rejects requests until all weights
    have arrived.

    Args:
        *backends: engines with ``sleep`` and ``wake``
            (:class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`, on a GPU built with
            ``enable_sleep_mode=True``).
        **options: see :class:`~torchrl_llm.weights.EngineWeights`.

    Attributes:
        asleep: whether the engines are asleep.

    Example:
        >>> updater = SleepingEngineWeights(policy.backend, model=model)  # doctest: +SKIP
        >>> updater.sleep()  # doctest: +SKIP
        >>> train(model)  # doctest: +SKIP
        >>> updater.push_weights()  # doctest: +SKIP
    """

    asleep = False

    def sleep(self) -> None:
        """Release the engines' memory for the trainer; they drop weights and cache.

        Raises:
            BackendError: they are already asleep.
            ConfigError: a GPU engine that was built without ``enable_sleep_mode=True``.
        """
        for backend in self.backends:
            self._rest(backend)
        self.asleep = True

    def _rest(self, backend: Any) -> None:
        backend.sleep(level=2)

    def _make_room(self, backend: Any) -> None:
        """Let the engine allocate the memory of its weights before they arrive."""
        backend.wake(weights_only=True)

    def push_weights(self, policy_or_weights: Weights | None = None) -> None:
        """Wake the engines if they sleep, and send the weights; see the base class.

        Args:
            policy_or_weights: as in the base class.
        """
        if not self.asleep:
            super().push_weights(policy_or_weights)
            return
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # torch keeps freed memory of training until then
        for backend in self.backends:
            self._make_room(backend)
        self.asleep = False
        try:
            super().push_weights(policy_or_weights)
        finally:
            for backend in self.backends:
                backend.wake()  # raises if the postponed canary check fails

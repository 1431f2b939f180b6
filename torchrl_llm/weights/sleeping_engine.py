"""Updater of engines that sleep while the trainer trains, so that both fit on one GPU.

The two take turns. Asleep, an engine has given back all of its memory, weights included: the next
push brings them. It wakes in two steps, so that weights arrive before there is a cache, and is
compared with the trainer when it can answer again. Weights that are the trainer's too
(:class:`~torchrl_llm.weights.SharedEngineWeights`) stay, and the cache alone is given back.

Next: :mod:`torchrl_llm.modules.backends.vllm.local_engine` has the states of sleep.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrl_llm.weights.engine_updaters import EngineWeights, Weights


class SleepingEngineWeights(EngineWeights):
    """:class:`~torchrl_llm.weights.EngineWeights` of engines that sleep between two pushes.

    :meth:`sleep` when the rows of a step are there; :meth:`push_weights` when it was trained. In
    between, sampling and scoring are errors. A push that does not arrive, or is not proven, raises
    as always; the engine is awake then, and closed until all weights have come.

    Args:
        *backends: engines with ``sleep`` and ``wake``
            (:class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`, on a GPU built with
            ``enable_sleep_mode=True``).
        **options: see :class:`~torchrl_llm.weights.EngineWeights`.

    Attributes:
        asleep: whether the engines sleep.

    Example:
        >>> updater = SleepingEngineWeights(policy.backend, model=model)  # doctest: +SKIP
        >>> updater.sleep()  # doctest: +SKIP
        >>> train(model)  # doctest: +SKIP
        >>> updater.push_weights()  # doctest: +SKIP
    """

    asleep = False

    def sleep(self) -> None:
        """Give the engines' memory to the trainer; they forget their weights and their cache.

        Raises:
            BackendError: they sleep already.
            ConfigError: a GPU engine that was built without ``enable_sleep_mode=True``.
        """
        for backend in self.backends:
            self._rest(backend)
        self.asleep = True

    def _rest(self, backend: Any) -> None:
        backend.sleep(level=2)

    def _make_room(self, backend: Any) -> None:
        """Have it take the memory of its weights, before they come."""
        backend.wake(weights_only=True)

    def push_weights(self, policy_or_weights: Weights | None = None) -> None:
        """Wake the engines where they sleep, and send the weights; see the base.

        Args:
            policy_or_weights: as in the base.
        """
        if not self.asleep:
            super().push_weights(policy_or_weights)
            return
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # what training allocated and has freed is torch's until then
        for backend in self.backends:
            self._make_room(backend)
        self.asleep = False
        try:
            super().push_weights(policy_or_weights)
        finally:
            for backend in self.backends:
                backend.wake()  # raises where the canary that waited for it finds other weights

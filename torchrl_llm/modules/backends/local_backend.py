"""Backend with a model in this process: one call at a time, weights copied in place."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.modules.backends.backend_port import Backend, Cancelled, Completion, SamplingParams
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource, load_into, open_source


class LocalBackend(Backend):
    """Base class of backends that sample with their own module.

    Args:
        vocab_size: see :class:`Backend`.
        max_length: see :class:`Backend`.
        eos_token_ids: see :class:`Backend`.
    """

    records_support = True
    vocab_size: int = 0
    max_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __init__(
        self, *, vocab_size: int, max_length: int | None, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length
        self.eos_token_ids = tuple(eos_token_ids)
        # Two threads must not switch a module between training and sampling mode at the same time.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def exclusive(self) -> AbstractContextManager[Any]:
        """See :meth:`Backend.exclusive`; the thread that has the lock may acquire it again."""
        return self._lock

    def generate(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[list[Completion]]:
        """See :meth:`Backend.generate`."""
        return self.generate_cancellable(prompts, params, ())

    def generate_cancellable(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[list[Completion]]:
        """See :meth:`Backend.generate_cancellable`."""
        self.check_prompts(prompts)
        if not prompts:
            return []
        with self._lock, torch.no_grad():
            flat = self._sample(prompts, params, cancelled)
        size = params.num_samples
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    @abstractmethod
    def _sample(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[Completion]:
        """Return all samples of the first prompt, then all samples of the second, and so on."""

    def _room(self, prompt: Tensor, params: SamplingParams) -> int:
        """Return the most tokens of a response."""
        if self.max_length is None:
            return params.max_new_tokens
        return min(params.max_new_tokens, self.max_length - prompt.shape[0])

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end a response."""
        return (*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids)

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """See :meth:`Backend.update_weights`; copies in place between two calls of the model."""
        incoming = open_source(source, version=version)
        with self._lock:
            return [load_into(self.module, incoming, version=version)]

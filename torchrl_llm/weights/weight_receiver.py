"""The receiving end of weights that come without being asked for: poll, or listen in a thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from torchrl._utils import logger

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, TorchRLLLMError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_STOP_POLL_S = 0.5


def backend_of(engine: Any) -> Backend:
    """The backend of whatever samples.

    Args:
        engine: a backend, a policy around one, or a ``vllm.LLM`` of this process that nobody else
            steps while it is updated.

    Raises:
        MissingExtraError: vLLM is needed and not installed.
        ConfigError: for anything else.
    """
    if isinstance(engine, Backend):
        return engine
    if isinstance(engine, LLMWrapperBase):
        return engine.backend
    vllm = require("vllm", extra="vllm", feature=f"an engine given as {type(engine).__name__}")
    if not isinstance(engine, vllm.LLM):
        raise ConfigError(
            f"a {type(engine).__name__} is no engine: give a vllm.LLM, a policy, or a backend"
        )
    from torchrl_llm.modules.backends.vllm import VLLMBackend

    return VLLMBackend(engine)


class WeightReceiver(ABC):
    """Takes what a trainer publishes into the backend of this process.

    Args:
        backend: gets the weights; it goes on serving between and, if it must, through failures.

    Attributes:
        backend: as given.
        version: of the last weights that were taken; ``None`` before the first.
        receipts: of the last weights that were taken.
        failure: why the last update was not taken; ``None`` when it was.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.version: int | None = None
        self.receipts: list[WeightReceipt] = []
        self.failure: TorchRLLLMError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Wait for new weights and take them.

        Args:
            timeout: most seconds to wait for a trainer that has any.

        Returns:
            Whether there were any.

        Raises:
            WeightUpdateError: there were, and they did not arrive whole; the old ones stay.
        """

    def apply_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """Take weights from a source into the backend.

        Args:
            source: where they are.
            version: their number.

        Raises:
            WeightUpdateError: they did not arrive, or not as they were sent; the old ones stay.
        """
        try:
            self.receipts = self.backend.update_weights(source, version=version)
        except TorchRLLLMError as error:
            self.failure = error
            raise
        self.version, self.failure = version, None
        return self.receipts

    def listen(self) -> None:
        """Take weights as they come, in a thread, until :meth:`shutdown`; failures are logged."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="weights")
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll_and_apply(timeout=_STOP_POLL_S)
            except TorchRLLLMError as error:
                self.failure = error
                logger.warning(f"an update of the weights was not taken: {error}")
                self._stop.wait(_STOP_POLL_S)

    def shutdown(self) -> None:
        """Stop listening; an update that runs is finished first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

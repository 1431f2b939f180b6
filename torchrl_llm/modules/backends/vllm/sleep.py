"""Sleep and wake as a machine of states, so that nothing is sampled from memory that is gone.

.. code-block:: text

    AWAKE --fall(1 or 2)--> ASLEEP --wake(weights_only=True)--> WEIGHTS --wake()--> AWAKE
                            ASLEEP --wake()-----------------------------------------> AWAKE

After ``fall(2)`` the weights are gone: the engine stays closed, whatever its state, until full ones
have arrived.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.modules.backends.vllm.engine_loop import EngineLoop


class _Mode(enum.Enum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "awake with its weights only, without a cache"


class SleepState:
    """What an engine may do now; changed by whoever is alone with it.

    Args:
        engine: has ``sleep(level)`` and ``wake_up(tags)``.
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
        self._mode, self._empty = _Mode.AWAKE, False
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

    def fall(self, level: int) -> None:
        """Fall asleep.

        Args:
            level: 1 keeps the weights, 2 does not.

        Raises:
            BackendError: it sleeps already.
            ConfigError: another level, or an engine that cannot.
        """
        if level not in (1, 2):
            raise ConfigError(f"an engine sleeps at level 1 or 2, got {level}")
        if self._mode is not _Mode.AWAKE:
            raise BackendError(f"the engine is {self._mode.value} already")
        if self._frees:
            if not self._enabled:
                raise ConfigError("this engine cannot sleep: build it with enable_sleep_mode=True")
            self._engine.sleep(level)
        self._mode, self._empty = _Mode.ASLEEP, self._empty or level == 2
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

"""Scripted models whose process is killed at every so many calls, for tests."""

from __future__ import annotations

import os
import signal
import threading

from torchrl_llm.langmarl import scripted_world

_lock = threading.Lock()
_count = 0
_every = 0


def every(number):
    """Kill this process at the call after so many; never if 0."""
    global _every
    _every = number


def _killing(function):
    def answer(messages):
        global _count
        with _lock:
            _count += 1
            if _every and _count > _every:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(messages)

    return answer


actor = _killing(scripted_world.actor)
critic = _killing(scripted_world.critic)
optimizer = _killing(scripted_world.optimizer)

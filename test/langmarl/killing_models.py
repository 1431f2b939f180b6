"""Scripted models whose process is killed at every so many calls, for tests."""

from __future__ import annotations

import os
import signal
import threading

from fork_server import fork_server

from torchrl_llm import langmarl
from torchrl_llm.langmarl import scripted_world

_lock = threading.Lock()
_count = 0
_every = 0


def outcome(path, every):
    """Exit code of a process that trains, and is killed at the call after so many (never if 0)."""
    process = fork_server().Process(target=_train, args=(path, every))
    process.start()
    process.join(120)
    return process.exitcode


def _train(path, every):
    global _every
    _every = every
    langmarl.train(path)


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

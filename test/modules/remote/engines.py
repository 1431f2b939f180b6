"""Engines for tests of pools: ordinary, slow, hanging and broken ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torchrl_llm.errors import BackendError
from torchrl_llm.modules.backends import FakeBackend

VOCAB, EOS = 32, 2


def fake(max_length=4096, seed=0):
    return FakeBackend(vocab_size=VOCAB, eos_token_ids=(EOS,), max_length=max_length, seed=seed)


class SlowBackend(FakeBackend):
    """Takes a while for each call, and runs calls of several threads at once."""

    def __init__(self, seconds):
        super().__init__(vocab_size=VOCAB, eos_token_ids=(EOS,))
        self._seconds = seconds

    def generate(self, prompts, params):
        time.sleep(self._seconds)
        return super().generate(prompts, params)


class MarkedBackend(FakeBackend):
    """Does something bad once, at a prompt that begins with 13; a file remembers that it did."""

    def __init__(self, mark: Path, deed: str):
        super().__init__(vocab_size=VOCAB, eos_token_ids=(EOS,))
        self._mark, self._deed = mark, deed

    def generate(self, prompts, params):
        if int(prompts[0][0]) == 13 and not self._mark.exists():
            self._mark.write_text(str(os.getpid()))
            if self._deed == "hang":
                time.sleep(3600)
            if self._deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise BackendError("the engine stopped")
        return super().generate(prompts, params)


class BrittleBackend(FakeBackend):
    """Loses its engine at every prompt that begins with 13."""

    def __init__(self):
        super().__init__(vocab_size=VOCAB, eos_token_ids=(EOS,))

    def generate(self, prompts, params):
        if int(prompts[0][0]) == 13:
            raise BackendError("the engine stopped at 13")
        return super().generate(prompts, params)


def broken():
    raise ValueError("no such model")


def dies_when_built():
    os.kill(os.getpid(), signal.SIGKILL)


def built_once(mark: Path):
    """The first process gets a backend, later ones do not."""
    if mark.exists():
        raise ValueError("no second engine on this machine")
    mark.write_text("built")
    return fake()

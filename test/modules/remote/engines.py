"""Engines for tests of pools: an ordinary one, one that meets every trouble, and broken ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from torchrl_llm.errors import BackendError
from torchrl_llm.modules.backends import EngineStatus, FakeBackend, SamplingParams

VOCAB, EOS = 32, 2
SLOW, TROUBLE = 12, 13
DIE, RAISE, HANG, ALWAYS_RAISE = 3, 4, 5, 6


def fake(max_length=4096, seed=0):
    return FakeBackend(vocab_size=VOCAB, eos_token_ids=(EOS,), max_length=max_length, seed=seed)


class TroubledBackend(FakeBackend):
    """Takes half a second for prompts that begin with SLOW; TROUBLE and a deed does that deed.

    A deed but the last is done once on this machine: a file remembers the process that did it.
    """

    def __init__(self, folder: Path):
        super().__init__(vocab_size=VOCAB, eos_token_ids=(EOS,))
        self._folder = folder
        self._broken = None

    def status(self):
        return EngineStatus(broken=self._broken)

    def generate(self, prompts, params):
        first, *rest = prompts[0].tolist()
        if first == SLOW:
            time.sleep(0.5)
        if first == TROUBLE:
            self._do(rest[0])
        return super().generate(prompts, params)

    def _do(self, deed):
        mark = self._folder / str(deed)
        if deed == ALWAYS_RAISE:
            raise BackendError("the engine stopped, as always")
        if mark.exists():
            return
        mark.write_text(str(os.getpid()))
        if deed == HANG:
            time.sleep(3600)
        if deed == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self._broken = "it stopped"
        raise BackendError("the engine stopped")


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


def greedy(backend, prompts=((5, 6), (7,), (8, 9, 10)), **options):
    """The ids of greedy answers of six tokens."""
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    rows = [torch.tensor(row) for row in prompts]
    return [g[0].token_ids.tolist() for g in backend.generate(rows, params, **options)]


def seen_from_elsewhere(pool):
    """Processes and answers of a pool, to be asked for in another process."""
    return sorted(pool.replica_pids().values()), greedy(pool)

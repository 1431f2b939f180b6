"""Episodes of 1 to 12 turns through a backend that takes 200 ms for at most 32 rows.

    python test/benchmarks/bench_episodes.py [episodes]

256 episodes of a scripted world, whose lengths follow from their seeds, come in order of completion
out of collectors with 32 rows: a row that ends begins the next episode. Two collectors share the
backend, so that one does its own work while the other one waits for its answers. Beside them are
one collector, and one that begins 32 episodes together and waits for the last of them.

The bound is what nobody can beat: the turns of the episodes, 32 a call, 200 ms each. What a side
takes on top is the rows that have not ended when the last episode is there (or that wait), and our
own work where it is not hidden behind a call; the share of the calls that were made shows the
latter alone. That work is the CPU time of the process a turn that was answered, for a sleep costs
none.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from queue import Queue

import torch
from tensordict import TensorDictBase

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import FinishReason
from torchrl_llm.envs.games import Game, GameEnv, Outcome
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends.backend_port import Completion
from torchrl_llm.modules.backends.fake import FakeBackend
from torchrl_llm.modules.model_loading import load_tokenizer

ROWS, MOST_TURNS, CALL_S = 32, 12, 0.2
AIM_SHARE, AIM_MS = 0.8, 1.2
Source = Callable[["Waiting"], Iterator[TensorDictBase]]
ANSWER = "The next lamp is to my left, so I go there. <move>left</move>"


@dataclass(frozen=True)
class Walk:
    """Where the player is: the seed, turns so far, and turns that the episode has."""

    seed: int
    turns: int
    length: int


class Lamps(Game[Walk]):
    """A walk along lamps; the seed says how many turns it takes."""

    name = "lamps"
    action_name = "move"
    action_help = "left or right"
    rules = "You walk along a row of lamps until all of them are lit."
    state_type = Walk

    def reset(self, seed: int) -> Walk:
        return Walk(seed, 0, random.Random(seed).randint(1, MOST_TURNS))

    def observe(self, state: Walk) -> str:
        left = state.length - state.turns
        return f"Lamp {state.seed + state.turns} is lit. {left} lamps are dark. Where do you go?"

    def legal_actions(self, state: Walk) -> tuple[str, ...]:
        return ("left", "right") if state.turns < state.length else ()

    def best_actions(self, state: Walk) -> tuple[str, ...]:
        return self.legal_actions(state)

    def _apply(self, state: Walk, action: str) -> Outcome:
        state = replace(state, turns=state.turns + 1)
        ended = state.turns == state.length
        return Outcome(state, self.observe(state), float(ended), terminated=ended, success=ended)


class Waiting(FakeBackend):
    """Gives every prompt the same answer, all of them after one wait."""

    def __init__(self, tokenizer, seconds: float) -> None:
        super().__init__(tokenizer=tokenizer)
        ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        self.answer = Completion(torch.tensor(ids), torch.zeros(len(ids)), FinishReason.STOP)
        self.seconds = seconds
        self.asked: list[int] = []

    def _sample(self, prompts, params, cancelled):
        if len(prompts) > ROWS:
            raise ValueError(f"{len(prompts)} rows in one call, at most {ROWS}")
        self.asked.append(len(prompts))
        time.sleep(self.seconds)
        return [self.answer] * len(prompts)


@dataclass(frozen=True)
class Run:
    """What one side did: seconds of the clock and of the CPU, calls, rows asked, turns."""

    wall_s: float
    cpu_s: float
    calls: int
    asked: int
    turns: int

    @property
    def bound_s(self) -> float:
        return math.ceil(self.turns / ROWS) * CALL_S

    @property
    def share(self) -> float:
        return self.bound_s / self.wall_s

    @property
    def ms_per_turn(self) -> float:
        return 1e3 * self.cpu_s / self.asked


def make_collector(backend: Waiting, part: int, parts: int, **options) -> LLMCollector:
    """A collector of 32 rows, with its share of the seeds."""
    seeds = [{"seed": seed} for seed in range(part, 10_000, parts)]
    return LLMCollector(
        GameEnv(Lamps(), num_envs=ROWS, shuffle=False, dataset=seeds),
        policy=FakeWrapper(backend, tokenizer=backend.tokenizer),
        yield_completed_trajectories=True,
        **options,
    )


def from_one(backend: Waiting, *, waves: bool = False) -> Iterator[TensorDictBase]:
    """Batches of one collector; with ``waves`` it begins 32 episodes together."""
    yield from make_collector(backend, 0, 1, reset_at_each_iter=waves)


def from_two(backend: Waiting) -> Iterator[TensorDictBase]:
    """Batches of two collectors in threads: one works while the backend answers the other."""
    queue = Queue()
    collectors = [make_collector(backend, part, 2, queue=queue) for part in range(2)]
    for collector in collectors:
        collector.start()
    try:
        while True:
            yield queue.get(timeout=60)
    finally:
        for collector in collectors:
            collector.shutdown()


def collect(episodes: int, batches_of: Source, *, seconds: float = CALL_S) -> Run:
    """Collect at least so many episodes as they come, and check each."""
    backend = Waiting(load_tokenizer(None), seconds)
    gc.collect()
    gc.freeze()  # as the recipes do
    done, turns, batches = 0, 0, []
    wall, cpu = time.perf_counter(), time.process_time()
    with closing(batches_of(backend)) as source:
        for batch in source:
            batches.append(batch)
            done += int(batch["next", "done"].sum())
            turns += batch.numel()
            if done >= episodes:
                break
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        calls = list(backend.asked)
    check(batches)
    return Run(wall, cpu, len(calls), sum(calls), turns)


def check(batches) -> None:
    """Each episode came once, whole, and had as many turns as its seed says."""
    game, seeds, rows = Lamps(), [], []
    for batch in batches:
        for row in batch.unbind(0):
            rows.append(row)
            if row["next", "done"].any():
                (seed,) = {r["seed"] for r in rows}
                assert [int(r["turn"]) for r in rows] == list(range(game.reset(seed).length))
                assert all(r["next", "game_legal"] for r in rows)
                seeds.append(seed)
                rows = []
    assert not rows
    assert len(set(seeds)) == len(seeds)


def main(episodes: int = 256) -> None:
    for source in (from_one, from_two):
        collect(ROWS, source, seconds=0.0)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    sides = {
        "two collectors, order of completion": from_two,
        "one collector, order of completion": from_one,
        "one collector, waves": partial(from_one, waves=True),
    }
    for name, source in sides.items():
        run = collect(episodes, source)
        print(f"{name}: {run.turns} turns in {run.wall_s:.2f} s, bound {run.bound_s:.2f} s")
        print(f"  share of the bound   {run.share:5.2f}         aim {AIM_SHARE}")
        print(f"  share of its calls   {run.calls * CALL_S / run.wall_s:5.2f}")
        print(f"  own CPU              {run.ms_per_turn:5.2f} ms a turn   aim {AIM_MS}")
        print(
            f"  calls of the backend {run.calls:5d}         rows a call {run.asked / run.calls:.1f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

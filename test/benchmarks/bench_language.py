"""Episodes of agents in language space: time against the bound of the backend, CPU time, memory.

    python test/benchmarks/bench_language.py

64 episodes of 3 agents are asked of a backend that takes 200 ms for an answer and answers 32 rows
at a time. The bound is what it needs if it is never idle. "One after another" plays each episode
alone. CPU time a call is ours: the backend only sleeps. The last lines read ten of 10 and of 1,000
stored episodes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

from torchrl_llm.langmarl import LocalStore, Trajectory, TrajectoryStore, load_config, make_env
from torchrl_llm.langmarl.calls import CallLog
from torchrl_llm.langmarl.environment import Episodes
from torchrl_llm.rewards import ScriptedTextModel

AGENTS, ROWS = 3, 32


def environment(folder: Path, latency_s: float):
    task = {"question": "What is 2 + 2?", "answer": "4"}
    (folder / "qa.jsonl").write_text(json.dumps(task) + "\n")
    config = {
        "env": "language",
        "benchmark_path": str(folder),
        "num_agents": AGENTS,
        "episode_generation_workers": ROWS,
        "llm": {"model_string": "scripted:builtins:str", "concurrency": ROWS},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    env = make_env("language", load_config(path))

    def answer(messages):
        time.sleep(latency_s)
        return "I add both numbers. FINAL ANSWER: 4"

    model = ScriptedTextModel(answer, concurrency=ROWS)
    env.actor.asked = replace(env.actor.asked, model=model)
    return env


def played(env, count: int, log: CallLog, prefix: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a batch of episodes."""
    task = env.tasks()[0]
    episodes = Episodes([(k, task) for k in range(count)], log, prefix)
    begun, cpu = time.perf_counter(), time.process_time()
    found = env.collect_batch(env.default_policies(), episodes)
    taken = time.perf_counter() - begun, time.process_time() - cpu
    assert [one.reward for one in found] == [1.0] * count
    return taken


def memory(folder: Path, count: int) -> int:
    """Most bytes that are held while ten of so many episodes are read."""
    store = TrajectoryStore(LocalStore(folder / str(count)), "run")
    steps = [{"agent_id": f"agent_{k}", "observation": "x" * 2000} for k in range(AGENTS)]
    for number in range(count):
        store.save(0, number, Trajectory({"question": "q"}, steps, 1.0))
    tracemalloc.start()
    assert len(store.load(0, limit=10)) == 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(folder, given.latency)
        played(env, 2, CallLog(), "warm")
        log = CallLog(folder / "calls.jsonl")
        wall, cpu = played(env, given.episodes, log, "0")
        calls = given.episodes * AGENTS
        bound = AGENTS * math.ceil(given.episodes / ROWS) * given.latency
        single = sum(played(env, 1, log, f"1/{k}")[0] for k in range(4)) / 4 * given.episodes
        print(f"{given.episodes} episodes of {AGENTS} agents, {given.latency:g} s, {ROWS} rows")
        print(f"bound {bound:.2f} s, together {wall:.2f} s: {bound / wall:.3f} of the bound")
        print(f"one after another {single:.1f} s (of four): {single / wall:.1f} times as long")
        print(f"CPU time a call {1e3 * cpu / calls:.2f} ms")
        few, many = memory(folder, 10), memory(folder, 1000)
        print(f"ten of 10 episodes {few / 1024:.0f} KiB, ten of 1,000 {many / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

"""Rollouts that are kept: what writing costs of a training step, and what reading a row costs.

    python test/benchmarks/bench_store.py

Steps of grpo-sync.py with the model of the package, in pairs: one writes its rollouts as
``logging.rollouts=sample`` (the default) or ``all`` does, the other does not. A step that writes is
the step and the writing; the share is the writing over the step without. Read are rows in random
order, of steps that are open and of steps that are not, against the same rows from a pickle.
"""

from __future__ import annotations

import importlib.util
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sota-implementations" / "grpo"))

from hydra import compose, initialize_config_dir

from torchrl_llm.data import RolloutStore
from torchrl_llm.recipes import load_config
from torchrl_llm.trainers import TrainingRun, kept_rollouts

STEPS, ROWS = 40, 2000
RECIPE = Path(__file__).resolve().parents[2] / "sota-implementations" / "grpo"


def train(folder: str, kept: str, steps: int = STEPS, **more: Any) -> Iterator[TrainingRun]:
    """A run of grpo-sync.py."""
    spec = importlib.util.spec_from_file_location("grpo_sync", RECIPE / "grpo-sync.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    settings = {"train.max_steps": steps, "logging.rollouts": kept, "logging.samples": "null"}
    settings |= {"eval.num_prompts": 0, "logging.progress": "false", **more}
    with initialize_config_dir(str(RECIPE / "config"), version_base="1.3"):
        config = compose("grpo", overrides=[f"{key}={value}" for key, value in settings.items()])
    return page.train(load_config(config), folder)


@contextmanager
def writing_timed(seconds: list[float]) -> Iterator[None]:
    """CPU seconds of every write, in the process that trains."""
    original = kept_rollouts.KeptRollouts.record

    def record(*arguments: Any) -> None:
        begun = time.process_time()
        original(*arguments)
        seconds.append(time.process_time() - begun)

    kept_rollouts.KeptRollouts.record = record
    try:
        yield
    finally:
        kept_rollouts.KeptRollouts.record = original


def writing(kept: str, folder: str) -> tuple[float, float, float]:
    """Median CPU seconds of a step without its writing and of the writing, and their ratio."""
    written: list[float] = []
    steps: list[float] = []
    with writing_timed(written):
        begun = None
        for _ in train(folder, kept):
            now = time.process_time()
            if begun is not None:
                steps.append(now - begun)
            begun = time.process_time()
    bare = [step - write for step, write in zip(steps, written, strict=True)][5:]
    pairs = [write / step for write, step in zip(written[5:], bare, strict=True)]
    return statistics.median(bare), statistics.median(written[5:]), statistics.median(pairs)


def reading(folder: str) -> dict[str, float]:
    """Median seconds of reading a row."""
    store = RolloutStore(folder)
    steps = store.steps()
    order = random.Random(0)
    found: dict[str, list[float]] = {"of a step that is open": [], "of any step": []}
    store[0]
    per_step = len(store) // len(steps)
    for _ in range(ROWS):
        place = order.randrange(per_step)
        begun = time.perf_counter()
        store[place]
        found["of a step that is open"].append(time.perf_counter() - begun)
    for _ in range(ROWS // 4):
        place = order.randrange(len(store))
        begun = time.perf_counter()
        store[place]
        found["of any step"].append(time.perf_counter() - begun)
    data = [pickle.dumps(store[place]) for place in range(per_step)]
    found["as a pickle, for comparison"] = []
    for _ in range(ROWS // 4):
        one = order.choice(data)
        begun = time.perf_counter()
        pickle.loads(one)
        found["as a pickle, for comparison"].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    for kept, aim in (("sample", "<= 0.03"), ("all", "reported")):
        with tempfile.TemporaryDirectory() as folder:
            step, write, share = writing(kept, folder)
            store = RolloutStore(folder)
            size = sum(path.stat().st_size for path in store.folder.iterdir())
            sys.stdout.write(
                f"logging.rollouts={kept:<7} step {step * 1e3:7.2f} ms   writing "
                f"{write * 1e3:6.2f} ms   writing/step {share:6.4f}   aim {aim}   "
                f"{len(store) / STEPS:.0f} rows, {size / STEPS / 1024:.1f} KiB a step\n"
            )
            for name, seconds in reading(folder).items():
                aim = "<= 50 us" if "open" in name else "reported"
                sys.stdout.write(f"    a row {name:<28} {seconds * 1e6:7.1f} us   aim {aim}\n")


if __name__ == "__main__":
    main()

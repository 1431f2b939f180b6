"""Ten GRPO steps at 0.5B by the recipe itself, and what the loss waits for.

The recipe is ``grpo-sync.py`` with its own defaults (float32 weights, bfloat16 products), 8 prompts
x 8 samples x 128 new tokens, sampled by the same model. Its weights are random, so every sample is
128 tokens long and no reward is earned.

What counts as the model: sampling (prompts in, completions out), the scorer's forward of body and
head, each ``backward``, and clipping with the optimizer's step. Each is timed on the host, from an
idle device to an idle device. All else of a step is outside: prompts, rewards, rows, advantages,
layouts, metrics. Waiting at both ends keeps the host from working ahead, so the share outside is
never understated.

A synchronisation is a place where the host waits for the device; torch warns of them.
"""

from __future__ import annotations

import csv
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from results import Section
from shapes import QWEN_05B, TINY, make_model, make_rows, side, to_tensordicts

from torchrl_llm.modules.backends.local_backend import LocalBackend
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.modules.model_loading import load_tokenizer
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.recipes import launch
from torchrl_llm.trainers import optim

PAGE = "grpo/grpo-sync.py"


class Clock:
    """Seconds of calls, by name, from an idle device to an idle device."""

    def __init__(self, run: Section) -> None:
        self.run = run
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Time all calls of a function of a class or module under a name."""
        original: Callable[..., Any] = getattr(owner, attribute)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.run.synchronize()
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self.run.synchronize()
            self.seconds[name] += time.perf_counter() - start
            return result

        setattr(owner, attribute, timed)


def count_synchronizations(run: Section, model: torch.nn.Module) -> None:
    """Places where forward and backward of one micro-batch wait, for each layout."""
    if run.device.type != "cuda":
        run.fact("synchronisations", "a CPU has none")
        return
    rows = to_tensordicts(make_rows(QWEN_05B, groups=2, samples=4))
    folder = Path(__file__).parents[2].name
    for layout in ("auto", "packed", "shared", "bucketed"):
        loss_module = GRPOLoss(CausalScorer(model, layout=layout))
        loss_module(rows).total_loss().backward()
        places: Counter[str] = Counter()

        def note(message: Any, *_: Any, places: Counter[str] = places, **__: Any) -> None:
            if "synchroniz" not in str(message):
                return
            frames = [f for f in traceback.extract_stack()[:-1] if "warnings.py" not in f.filename]
            known = [f for f in frames if "torchrl_llm" in f.filename or folder in f.filename]
            shown = {str(f.filename) + str(f.lineno): f for f in (*known[-1:], frames[-1])}
            lines = [f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in shown.values()]
            places[" < ".join(lines)] += 1

        run.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss_module(rows).total_loss().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        run.fact(f"where layout {layout} waits", dict(places))
        count = sum(places.values())
        if layout == "auto":
            run.aim("synchronisations of a micro-batch, layout auto", count, "count", at_most=0)
        else:
            run.add(f"synchronisations of a micro-batch, layout {layout}", count, "count")


def train(run: Section, folder: Path) -> None:
    """The recipe's steps, timed."""
    page = launch.load_page(PAGE)
    tokens, samples, steps = (8, 4, 3) if run.tiny else (128, 8, 10)
    overrides = [
        f"model.name={folder / 'model'}",
        f"train.device={run.device.type}",
        "train.max_steps=1000",  # left early: what a run does at its end is not measured
        f"train.prompts_per_batch={samples}",
        f"env.repeats={samples}",
        f"inference_model.max_tokens={tokens}",
        "train.no_signal_steps=null",
        "reward.on_all_invalid=continue",
        "eval.interval=null",
        "eval.num_prompts=2",
        "logging.progress=false",
        "logging.samples=null",
        "checkpoint.interval=1000",
    ]
    config = Path(page.__file__).parent / "config"
    composed = launch.compose_files(config, "grpo", overrides)
    clock, ends, model_seconds = Clock(run), [], []
    clock.watch(LocalBackend, "generate", "sampling")
    clock.watch(CausalScorer, "forward", "forward")
    clock.watch(torch.Tensor, "backward", "backward")
    clock.watch(optim, "clipped_step", "optimizer")
    for _ in page.train(page.load_config(composed), folder / "run"):
        run.synchronize()
        ends.append(time.perf_counter())
        model_seconds.append(dict(clock.seconds))
        clock.seconds.clear()
        # The run is given back once before its first step.
        if len(ends) > steps or run.seconds_left < (0 if run.tiny else 8):
            break
    report(run, ends, model_seconds, folder / "run")


def report(run: Section, ends: list[float], parts: list[dict[str, float]], folder: Path) -> None:
    """Write down medians over the steps after the first, which warms up."""
    walls = [end - begin for begin, end in pairwise(ends)]
    parts = parts[1:]  # the first is what came before the steps
    run.fact("steps", len(walls))
    walls, parts = (walls[1:], parts[1:]) if len(walls) > 1 else (walls, parts)
    outside = [1 - sum(p.values()) / wall for p, wall in zip(parts, walls, strict=True)]
    share = statistics.median(outside)
    run.aim("share of a step outside the model", share, "ratio", at_most=0.05)
    run.add("seconds a step", statistics.median(walls), "s")
    for name in ("sampling", "forward", "backward", "optimizer"):
        value = statistics.median(p.get(name, 0.0) for p in parts)
        run.add(f"seconds a step: {name}", value, "s")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))[1:]
    for name in rows[0] if rows else ():
        values = [float(row[name]) for row in rows if name.startswith("perf/") and row[name]]
        if values:
            run.add(f"of the run: {name}", statistics.median(values), name.rpartition("_")[2])


def main(run: Section) -> None:
    shape = TINY if run.tiny else QWEN_05B
    model = make_model(shape, run)
    with side(run, "synchronisations"):
        count_synchronizations(run, model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.zero_grad()
        model.save_pretrained(folder / "model")
        load_tokenizer().save_pretrained(folder / "model")
        del model
        run.free()
        with side(run, "steps"):
            train(run, folder)


if __name__ == "__main__":
    main(Section.from_command_line())

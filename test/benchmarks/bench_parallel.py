"""Two gloo processes on two cores against one process with two threads: seconds of a GRPO step.

    taskset -c 0,1 python test/benchmarks/bench_parallel.py [steps] [rounds]

``grpo-sync.py`` on the default task: with the embedded model (0.33M parameters), and with one of 8M
parameters from a seed, with answers of 16 tokens. Wall-clock time, the median ``perf/step_s``
without the first two steps, in turns: run it on a machine that does nothing else.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = str(ROOT / "sota-implementations" / "grpo" / "grpo-sync.py")
SIDES = {
    "one process, two threads": ("none",),
    "two processes, ddp": ("ddp",),
    "fsdp2": ("fsdp2",),
    "fsdp2, gathers=model": ("fsdp2", "train.gathers=model"),
}


def make_model(folder: Path) -> Path:
    """A Llama of 8M parameters with the tokenizer of the package."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchrl_llm.modules import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer(None)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=3,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def step_s(side: str, folder: Path, steps: int, options: list[str]) -> float:
    """Median seconds of a step."""
    parallel, *more = SIDES[side]
    threads = 2 if parallel == "none" else 1
    start = [sys.executable]
    if parallel != "none":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    fixed = ["eval.num_prompts=0", "logging.progress=false", "logging.samples=null"]
    fixed += ["train.no_signal_steps=null", "optimizer.warmup_steps=0", "optimizer.lr=1e-6"]
    fixed += [f"train.num_threads={threads}", f"train.max_steps={steps}"]
    command = [*start, PAGE, f"train.parallel={parallel}", f"hydra.run.dir={folder}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [*command, *fixed, *more, *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        check=True,
        capture_output=True,
    )
    with (folder / "metrics.csv").open(newline="") as file:
        seconds = [float(row["perf/step_s"]) for row in csv.DictReader(file)]
    return statistics.median(seconds[2:])


def main(steps: int = 12, rounds: int = 3) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {
            "embedded model": [],
            "8M parameters": [
                f"model.name={make_model(folder / 'model')}",
                "inference_model.max_tokens=16",
            ],
        }
        for title, options in models.items():
            found: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(rounds):
                for place, side in enumerate(SIDES):
                    run = folder / f"{title}-{number}-{place}".replace(" ", "-")
                    found[side].append(step_s(side, run, steps, options))
            alone = statistics.median(found["one process, two threads"])
            for side, seconds in found.items():
                middle = statistics.median(seconds)
                print(f"{title}, {side:<25} {middle * 1e3:8.0f} ms a step   {middle / alone:5.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

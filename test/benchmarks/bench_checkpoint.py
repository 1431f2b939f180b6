"""Save of a checkpoint against writing its bytes, and the memory that it takes.

    python test/benchmarks/bench_checkpoint.py

A Qwen2 of 50 million parameters in float32, with the two moments of AdamW: 600 MB. Both sides write
the same files of the same lengths into the same folder and flush each to the disk; ours also sums
up checksums and renames. Seconds are of the wall clock, for a disk takes no CPU time. Memory is
that of a process that has trained a step, at the most while it saves, above what it held before.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import peak_memory
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.modules import load_tokenizer
from torchrl_llm.trainers import TrainingRun, make_optimizer
from torchrl_llm.trainers.run_config import CheckpointConfig, LoggingConfig

CONFIG = Qwen2Config(
    hidden_size=512,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=1536,
    vocab_size=31_000,
    tie_word_embeddings=True,
)
SHARD = "50MB"


def make_run(folder: Path, size: str, *, lora: bool = False) -> TrainingRun:
    """A run that has taken a step, as far as a checkpoint can tell."""
    torch.set_num_threads(1)
    model = Qwen2ForCausalLM(CONFIG)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    optimizer = make_optimizer(model.parameters(), name="AdamW", lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    run = TrainingRun(
        folder,
        max_steps=1,
        model=model,
        tokenizer=load_tokenizer(),
        parts={"optimizer": optimizer},
        logging=LoggingConfig(progress=False),
        checkpoint=CheckpointConfig(keep_last=1, max_shard_size=size),
    )
    run.step = 1
    return run


def write_bytes(lengths: dict[str, int], folder: Path, data: memoryview) -> None:
    """Files of the same lengths, each flushed."""
    for name, length in lengths.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data[:length])
            file.flush()
            os.fsync(file.fileno())


def seconds(work: Callable[[], object]) -> float:
    """Seconds of the wall clock that a piece of work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def save(folder: str, size: str, lora: bool) -> Callable[[], object]:
    """The save whose memory is measured."""
    run = make_run(Path(folder), size, lora=lora)
    run.save()  # whatever is imported or cached the first time
    return run.save


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", "5GB")
        number = sum(p.numel() for p in run.model.parameters()) / 1e6
        made = run.save()
        files = [path for path in made.rglob("*") if path.is_file()]
        lengths = {str(path.relative_to(made)): path.stat().st_size for path in files}
        data = memoryview(bytearray(max(lengths.values())))
        plain = Path(folder) / "plain"
        times = []
        for _ in range(pairs):
            ours = seconds(run.save)
            other = seconds(lambda: write_bytes(lengths, plain, data))
            shutil.rmtree(plain)
            times.append((ours, other))
        ours, other = (statistics.median(side) for side in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        print(
            f"{number:.0f}M parameters, {sum(lengths.values()) / 1e6:.0f} MB: saved in {ours:.2f} "
            f"s, its bytes written in {other:.2f} s, ratio {ratio:.2f} (aim 1.5)"
        )
        for size, lora in (("5GB", False), (SHARD, False), (SHARD, True)):
            above, _ = peak_memory(partial(save, f"{folder}/{size}{lora}", size, lora))
            kind = "LoRA" if lora else "all weights"
            print(f"{kind}, shards of {size}: {above:.0f} MiB above training (aim: one shard)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)

"""Peak memory of a training step against what ``torchrl-llm memory`` says by formula.

    python test/benchmarks/bench_memory.py
    python test/benchmarks/bench_memory.py 2000

A Qwen2 of 45 million parameters in float32 on the CPU, 4 rows of 512 tokens: forward, backward and
a step of AdamW; adapters also over weights of four and eight bits. Measured are the bytes that
torch's allocator has given out at once, above those of the model and the states of AdamW; and what
the process grows by, which may be more: the C library keeps freed memory for later.

With a number: what the process of grpo-sync.py holds over so many steps of the model of the
package, with rollouts written; the slope of a line through the steps after the first 200.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import peak_memory
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config

from torchrl_llm.functional.chunked_head import chunked_log_probs
from torchrl_llm.modules import load_model
from torchrl_llm.recipes import load_config, memory
from torchrl_llm.trainers import make_optimizer

ROWS, LENGTH = 4, 512
CONFIG = Qwen2Config(
    hidden_size=512,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=1536,
    vocab_size=30_000,
    tie_word_embeddings=True,
)
OPTIMIZER = {"name": "AdamW", "lr": 1e-5}


def setup(
    folder: str, checkpointing: bool, lora: bool, bits: str | None = None
) -> Callable[[], None]:
    """The model, and the step that is measured."""
    torch.set_num_threads(1)
    adapters = {"r": 8, "target_modules": "all-linear"} if lora else None
    model = load_model(
        folder, gradient_checkpointing=checkpointing, lora=adapters, quantization=bits
    ).train()
    if lora and checkpointing:
        model.enable_input_require_grads()
    optimizer = make_optimizer(model.parameters(), **OPTIMIZER)
    base = model.get_base_model() if lora else model

    def step() -> None:
        ids = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH))
        hidden = base.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        scores = chunked_log_probs(hidden, base.lm_head.weight, ids[:, 1:].flatten())
        scores.log_probs.mean().backward()
        del hidden, scores
        optimizer.step()
        optimizer.zero_grad()

    step()  # the states are there from the second on
    return step


def most_allocated(work: Callable[[], None]) -> float:
    """MiB of tensors that a piece of work holds at once, above those that were there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, num_bytes in changes:
        held += num_bytes
        most = max(most, held)
    return most / 2**20


def by_formula(folder: str, checkpointing: bool, lora: bool, bits: str | None = None) -> float:
    """MiB that the step adds."""
    values = {
        "model": {"name": folder, "quantization": bits},
        "train_model": {"lora": {"enabled": lora}, "gradient_checkpointing": checkpointing},
        "train": {"device": "cpu", "prompts_per_batch": 1, "micro_token_budget": None},
        "env": {"repeats": ROWS},
        "inference_model": {"max_tokens": LENGTH - 1},
    }
    parts = memory.memory_parts(load_config(values), prompt_tokens=1)
    held = (p.num_bytes for p in parts if p.name in ("weights", "optimizer states"))
    return (memory.peak_bytes(parts, "train") - sum(held)) / 2**20


def held_over_steps(steps: int) -> None:
    """Print how what the process holds grows with the steps; aim: below 1 kB a step."""
    import numpy
    from bench_store import train

    held = []
    with tempfile.TemporaryDirectory() as folder:
        for run in train(folder, "sample", steps):
            held.append((run.step, _anonymous_kib()))
    numbers, kib = numpy.array(held).T
    late = numbers > 200
    slope = numpy.polyfit(numbers[late], kib[late], 1)[0]
    sys.stdout.write(
        f"{steps} steps: {kib[late][0] / 1024:.1f} MiB after 200, {kib[-1] / 1024:.1f} MiB at the "
        f"end, {slope:+.3f} KiB a step   aim < 1\n"
    )


def _anonymous_kib() -> int:
    """Resident memory without pages of files, which come and go with what else the machine does."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def main() -> None:
    if len(sys.argv) > 1:
        held_over_steps(int(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
        for lora, bits in ((False, None), (True, None), (True, "4bit"), (True, "8bit")):
            for checkpointing in (False, True):
                how = (folder, checkpointing, lora, bits)
                measured = most_allocated(setup(*how))
                held, _ = peak_memory(partial(setup, *how))
                told = by_formula(*how)
                name = f"LoRA {bits or ''}" if lora else "all weights"
                sys.stdout.write(
                    f"{name:<12} checkpointing {checkpointing!s:<6} "
                    f"measured {measured:6.0f} MiB   formula {told:6.0f}   "
                    f"measured/formula {measured / told:5.2f}"
                    f"   process {held:6.0f} MiB\n"
                )


if __name__ == "__main__":
    main()

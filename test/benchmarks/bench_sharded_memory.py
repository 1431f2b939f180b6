"""Memory of a rank under ``train.parallel=fsdp2``, against what its shards and one layer take.

    python test/benchmarks/bench_sharded_memory.py [layers] [steps]

``grpo-sync.py`` with a random Llama of ``layers`` layers (75M parameters by default) in float32 and
AdamW, once in one process and once in two (gloo), each with the same rows a process. Peaks are of
resident memory, beyond what the process has before it loads the model. The activations are what one
process has beyond its weights, gradients and optimizer states.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "sota-implementations" / "grpo" / "grpo-sync.py"
# Runs the page; each rank tells bytes before the model is there, and at most.
MEASURED = """
import os, runpy, sys
from torchrl_llm.recipes import launch
sys.path.insert(0, os.path.dirname({page!r}))
def status(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) << 10
launch.load_page({page!r})
import torch, transformers.models.llama.modeling_llama
before = status("VmRSS")
sys.argv[0] = {page!r}
try:
    runpy.run_path({page!r}, run_name="__main__")
finally:
    rank = os.environ.get("RANK", "0")
    open({folder!r} + "/rank" + rank, "w").write(str(status("VmHWM") - before))
"""


def make_model(folder: Path, layers: int) -> tuple[Path, int, int]:
    """A Llama with the tokenizer of the package; its bytes, and those of a layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchrl_llm.modules import load_tokenizer

    tokenizer = load_tokenizer(None)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    return folder, sum(p.nbytes for p in model.parameters()), layer


def peaks(folder: Path, model: Path, number: int, steps: int, *options: str) -> list[int]:
    """Peak bytes of each process."""
    folder.mkdir()
    page = folder / "page.py"
    page.write_text(MEASURED.format(page=str(PAGE), folder=str(folder)))
    start = [sys.executable]
    if number > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    fixed = [f"train.prompts_per_batch={2 * number}", "env.repeats=4", f"model.name={model}"]
    fixed += ["inference_model.max_tokens=8", "eval.num_prompts=0", "train.num_threads=1"]
    fixed += ["optimizer.warmup_steps=0", "logging.progress=false", "logging.samples=null"]
    fixed += ["checkpoint.interval=null", "train.no_signal_steps=null", "optimizer.lr=1e-6"]
    command = [*start, str(page), *fixed, f"train.max_steps={steps}", *options]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Freed memory goes back at once, so that what is resident is what is used.
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*command, f"hydra.run.dir={folder}/run"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [int((folder / f"rank{rank}").read_text()) for rank in range(number)]


def main(layers: int = 24, steps: int = 3) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, weights, layer = make_model(folder / "model", layers)
        (alone,) = peaks(folder / "alone", model, 1, steps)
        activations = alone - 4 * weights
        shards = 4 * weights // 2
        aim = shards + layer + activations
        mib = 1 << 20
        print(f"weights {weights / mib:.0f} MiB, a layer {layer / mib:.0f} MiB")
        print(f"one process {alone / mib:.0f} MiB: activations {activations / mib:.0f} MiB")
        print(f"shards, a layer and activations: {aim / mib:.0f} MiB")
        for gathers in ("layer", "model"):
            found = peaks(
                folder / f"by-{gathers}",
                model,
                2,
                steps,
                "train.parallel=fsdp2",
                f"train.gathers={gathers}",
            )
            each = ", ".join(f"{peak / mib:.0f} MiB ({peak / aim:.2f})" for peak in found)
            print(f"ranks, train.gathers={gathers}: {each}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""The card and the versions, and the two ceilings that other figures are shares of."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from results import Section

_PACKAGES = "torch triton transformers tensordict torchrl accelerate peft trl vllm flash_attn"


def main() -> None:
    run = Section.from_command_line()
    run.fact("Python", platform.python_version())
    for package in _PACKAGES.split():
        try:
            run.fact(package, version(package))
        except PackageNotFoundError:
            run.fact(package, "not installed")
    if run.device.type == "cuda":
        card = torch.cuda.get_device_properties(0)
        run.fact("card", card.name)
        run.fact("CUDA", torch.version.cuda)
        run.fact("driver", _driver())
        run.add("memory", card.total_memory / 2**30, "GiB")
        run.add("multiprocessors", card.multi_processor_count, "")
    else:
        run.fact("card", "none: a rehearsal on a CPU")
    size = 256 if run.tiny else 8192
    left, right = (
        torch.randn(size, size, dtype=torch.bfloat16, device=run.device) for _ in range(2)
    )
    seconds, _ = run.measure(lambda: left @ right, repeats=20, warmup=5)
    run.add(f"matrix product, bfloat16, {size} cubed", 2 * size**3 / seconds / 1e12, "TFLOP/s")
    entries = (1 << 20) if run.tiny else (1 << 30)
    source = torch.randint(100, (entries,), dtype=torch.int32, device=run.device)
    into = torch.empty_like(source)
    seconds, _ = run.measure(lambda: into.copy_(source), repeats=20, warmup=5)
    run.add("device-to-device copy, read and written", 8 * entries / seconds / 1e12, "TB/s")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


if __name__ == "__main__":
    main()

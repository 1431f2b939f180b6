"""Checks of memory and disk: by formula, and with ``--calibrate`` by trying."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import AsyncGRPOConfig, builders, memory
from torchrl_llm.recipes.doctor.calibrate import Trial, all_ranks, largest
from torchrl_llm.recipes.doctor.finding import Finding
from torchrl_llm.recipes.doctor.subject import Subject
from torchrl_llm.recipes.grpo_config import GRPOGroups

BUDGET = "train.micro_token_budget"
_SMALLEST = 256
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int | None:
    """Bytes that a run could have on a device; ``None`` where nothing says it.

    Args:
        device: of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = []
    if (table := Path("/proc/meminfo")).is_file():
        found = re.findall(r"MemAvailable:\s+(\d+) kB", table.read_text())
        limits += [int(kibibytes) * 1024 for kibibytes in found]
    files = [_CGROUP / name for name in ("memory.max", "memory.current")]
    if all(file.is_file() for file in files):
        most, used = (file.read_text().strip() for file in files)
        if most.isdigit():
            limits.append(int(most) - int(used))
    return min(limits, default=None)


def _parts(subject: Subject, budget: int | None = None) -> list[memory.MemoryPart]:
    """What the run needs; without what depends on tokens for recipes other than GRPO's."""
    config = subject.config
    if isinstance(config, GRPOGroups):
        if budget is not None:
            train = replace(config.train, micro_token_budget=budget)
            config = replace(config, train=train)
        return memory.memory_parts(config, prompt_tokens=subject.prompt_tokens)
    trained = memory.trained(subject.model)
    weights, own = memory.tensor_bytes(subject.model.parameters()), memory.tensor_bytes(trained)
    states = memory.optimizer_bytes(trained, config.optimizer.arguments)
    return [
        memory.MemoryPart("weights", weights, "both", ""),
        memory.MemoryPart("gradients", own, "train", ""),
        memory.MemoryPart("optimizer states", states, "both", ""),
        memory.MemoryPart("checkpoint", weights + own + states, "disk", ""),
    ]


def _peak(subject: Subject, budget: int | None = None) -> int:
    parts = _parts(subject, budget)
    peaks = [memory.peak_bytes(parts, where) for where in ("train", "sample")]
    # Collectors of this machine have its memory at the same time.
    is_async = isinstance(subject.config, AsyncGRPOConfig) and subject.config.ray.address is None
    return sum(peaks) if is_async and builders.device_kind(subject.config) == "cpu" else max(peaks)


def needed_memory(subject: Subject) -> Iterator[Finding]:
    """What the run needs at once is there."""
    free = free_memory(builders.device_of(subject.config))
    try:
        peak = _peak(subject)
    except ConfigError as error:
        yield Finding("note", "model.name", f"memory was not counted: {error}")
        return
    if free is None:
        return
    what = f"by formula a run needs {memory.show_bytes(peak)}, {memory.show_bytes(free)} are free"
    if peak <= free:
        yield Finding("ok", BUDGET, what)
        return
    key, advice = "model.name", "Take a smaller model, train_model.lora.enabled=true, or a machine"
    advice += " with more (torchrl-llm memory shows the parts)"
    if isinstance(subject.config, GRPOGroups) and subject.config.train.micro_token_budget:
        high = subject.config.train.micro_token_budget
        found = largest(lambda budget: _peak(subject, budget) <= free, 1, high)
        if found:
            key, advice = BUDGET, f"{BUDGET}={found} would fit"
    yield Finding("error", key, f"{what}. {advice}")


def disk(subject: Subject) -> Iterator[Finding]:
    """The checkpoints of the run fit on the disk."""
    config, folder = subject.config, subject.folder.absolute()
    try:
        sizes = [part.num_bytes for part in _parts(subject) if part.where == "disk"]
    except ConfigError:
        return  # told by needed_memory
    steps, interval = subject.flat.get("train.max_steps"), config.checkpoint.interval
    saves = 1 if interval is None or steps is None else -(-steps // interval)
    kept = min(saves, config.checkpoint.keep_last or saves) + 1  # and the one being written
    size = (sizes[0] or 0) * kept
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    what = (
        f"{kept} checkpoints of {memory.show_bytes(sizes[0])} are {memory.show_bytes(size)}, and "
        f"{memory.show_bytes(free)} are free in {there}"
    )
    if size > free:
        yield Finding(
            "error",
            "checkpoint.keep_last",
            f"{what}: the run would end while it saves. Keep fewer, save less often "
            "(checkpoint.interval), or write elsewhere (hydra.run.dir)",
        )
    else:
        yield Finding("ok", "checkpoint.keep_last", what)


def calibration(subject: Subject) -> Iterator[Finding]:
    """The largest micro-batch that fits, by training on it; the budget is not above."""
    if not subject.calibrates:
        return
    config, row = subject.config, subject.row_tokens
    device = builders.device_of(config)
    high = subject.rows_per_step * row
    trial = Trial(config, subject.policy, row)

    def fits(budget: int) -> bool:
        # A CPU's memory is given out before it is there, and whoever takes it is killed.
        if device.type == "cpu" and (free := free_memory(device)) is not None:
            if isinstance(config, GRPOGroups) and _peak(subject, budget) > free:
                return False
        return trial(budget)

    found = largest(fits, min(_SMALLEST, high), high, agree=all_ranks)
    wanted = config.train.micro_token_budget or high
    if not found:
        yield Finding("error", BUDGET, f"not even {min(_SMALLEST, high)} tokens fit on {device}")
    elif found < min(wanted, high):
        yield Finding(
            "error", BUDGET, f"{wanted} tokens do not fit on {device}; set {BUDGET}={found}"
        )
    else:
        all_of_it = " (all of a step)" if found == high else ""
        yield Finding("ok", BUDGET, f"{found} tokens{all_of_it} fit on {device}; it is {wanted}")

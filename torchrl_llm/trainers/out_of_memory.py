"""Out-of-memory errors that say which keys to lower, for every recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchrl_llm.errors import ResourceError

# What the memory of each part of a step grows with, the key that costs least to lower first.
_KEYS = {
    "train": ("train.micro_token_budget",),
    "sample": (
        "train.prompts_per_batch",
        "env.repeats",
        "inference_model.max_tokens",
        "train.micro_token_budget",
    ),
    "evaluate": ("eval.batch_size", "eval.max_tokens", "inference_model.max_tokens"),
}


@contextmanager
def naming_keys(part: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names the keys to lower.

    Args:
        part: of a step: ``train``, ``sample`` or ``evaluate``; in others the error stays as it is.
        config: flat, dotted key to value; keys that are not there are not named.

    Raises:
        ResourceError: the device ran out of memory; torch's error is its cause.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = [f"{key} (now {config[key]})" for key in _KEYS.get(part, ()) if key in config]
        if not advice:
            raise
        if part == "train" and not config.get("train_model.gradient_checkpointing", True):
            advice.append("or set train_model.gradient_checkpointing=true")
        what = str(error).partition(" GPU ")[0].rstrip(". ")
        raise ResourceError(
            f"{what}, in the part {part!r} of a step. Lower {', '.join(advice)}; torchrl-llm "
            "memory, with the keys of this run, shows what the memory goes to"
        ) from error

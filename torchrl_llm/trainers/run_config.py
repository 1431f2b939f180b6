"""Settings of a run for every algorithm; which may change on resume, and which determine memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch

from torchrl_llm._checked import Ge, Gt
from torchrl_llm._settings import Count, Group, naming, several
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.modules.weight_files import size_in_bytes
from torchrl_llm.trainers.hub import check_repository
from torchrl_llm.trainers.kept_rollouts import Kept

# Keys that may differ between a run and its continuation: none of them changes past results.
_FREE_ON_RESUME = ("checkpoint.", "logging.", "eval.", "redis.", "ray.")
_FREE_ON_RESUME += ("train.max_steps", "train.max_epochs")
_FREE_ON_RESUME += ("train.micro_token_budget", "train.packing", "train.no_signal_steps")
_FREE_ON_RESUME += ("reward.on_all_invalid", "train.parallel", "train.timeout_s")
_FREE_ON_RESUME += ("train.max_seq_len", "train.on_overlong")  # a row that was too long ended it
_FREE_ON_RESUME += ("env.on_overlong", "train.gathers")


# Keys that increase the memory of each part of a step; lowering the first one costs least.
_LOWERED = {
    "train": ("train.micro_token_budget",),
    "sample": (
        "train.prompts_per_batch",
        "env.repeats",
        "inference_model.max_tokens",
        "train.micro_token_budget",
    ),
    "evaluate": ("eval.batch_size", "eval.max_tokens", "inference_model.max_tokens"),
}


class LoggingConfig(Group, key="logging"):
    """Loggers of a run; ``metrics.csv`` is always written.

    Attributes:
        backend: any of ``csv``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
        experiment_name: name of the run in these loggers.
        project: W&B's or Trackio's project, MLflow's experiment; ``None`` for the one in the
            environment (``WANDB_PROJECT``, ``MLFLOW_EXPERIMENT_NAME``), or else a default.
        progress: show a progress bar.
        samples: number of steps after which the run again shows two answers of a batch, the best
            and the worst answer to one prompt; the first step also shows them; ``None`` for never.
            A run of 100 steps shows its start, its middle and its end.
        rollouts: rows that are kept in ``<run folder>/rollouts``, for
            :class:`~torchrl_llm.data.rollout_store.RolloutStore`: 16 of each step, all, or none.
    """

    backend: list[str] = several("csv")
    experiment_name: str = "run"
    project: str | None = None
    progress: bool = True
    samples: Count | None = 50
    rollouts: Kept = "sample"


class CheckpointConfig(Group, key="checkpoint"):
    """Checkpoints in ``<run folder>/checkpoints``; the last step is always saved.

    Attributes:
        interval: steps between checkpoints; ``None`` for the last step only.
        keep_last: number of checkpoints to keep.
        resume: ``auto`` continues from the newest whole checkpoint of the run's folder, or starts a
            new run if there is none; ``never`` starts a new run, and rejects a folder with
            checkpoints.
        push_to_hub: repository, ``owner/name``, for a push of the model at the end of the run; it
            is created as private if it does not exist. A failed push is reported and changes
            nothing.
        max_shard_size: maximum size of a file of weights, such as ``"5GB"`` or ``"500MB"``; a
            larger model is written as shards with an index, which ``from_pretrained`` loads.
    """

    interval: Count | None = 100
    keep_last: Count | None = 2
    max_shard_size: str = "5GB"
    resume: Literal["never", "auto"] = "never"
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming("checkpoint.max_shard_size"):
            size_in_bytes(self.max_shard_size)
        with naming("checkpoint.push_to_hub"):
            if self.push_to_hub is not None:
                check_repository(self.push_to_hub)


class EvalConfig(Group, key="eval"):
    """Greedy accuracy on held-out prompts.

    Attributes:
        interval: steps between evaluations; ``None`` for the last step only.
        num_prompts: number of held-out prompts; 0 switches evaluation off, also if other keys
            request it; ``None`` for all held-out prompts of the task or the file, or for a tenth of
            the rows, at most 128, if the last rows are held out.
        before_train: also evaluate the model before training.
        batch_size: prompts that are answered together.
    """

    interval: Count | None = None
    num_prompts: Annotated[int, Ge(0)] | None = 512
    before_train: bool = True
    batch_size: Count = 128

    repeats = 1  # without a type: no key if nothing is sampled


class SampledEvalConfig(EvalConfig):
    """Accuracy on held-out prompts, of greedy answers or of several samples.

    Attributes:
        repeats: samples per prompt; with more than 1, answers are sampled as in training, for
            ``eval/pass@k`` and ``eval/majority@k`` with k = 2, 4, ... and the number of samples.
        temperature: temperature of these samples; ``None`` for ``inference_model.temperature``.
    """

    repeats: Count = 1
    temperature: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only("temperature", self.repeats > 1, "with eval.repeats=1, which answers greedily")


def check_resumed(earlier: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise an error if a run is resumed with a configuration that would make a different run.

    Args:
        earlier: dotted key to value, of the run.
        present: the same for the resumed run.

    Raises:
        ConfigError: keys that differ, with both values.
    """
    changed = [
        f"{key}: {earlier.get(key)!r} -> {present.get(key)!r}"
        for key in sorted(earlier.keys() | present.keys())
        if earlier.get(key) != present.get(key) and not key.startswith(_FREE_ON_RESUME)
    ]
    if changed:
        raise ConfigError(
            "checkpoint.resume=auto continues a run as it was, but these keys differ: "
            + "; ".join(changed)
        )


@contextmanager
def naming_keys(part: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names the keys to lower.

    Args:
        part: of a step: ``train``, ``sample`` or ``evaluate``; in other parts the error does not
            change.
        config: flat, dotted key to value; missing keys are not named.

    Raises:
        ResourceError: the device ran out of memory; torch's error is its cause.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = [f"{key} (now {config[key]})" for key in _LOWERED.get(part, ()) if key in config]
        if not advice:
            raise
        if part == "train" and not config.get("train_model.gradient_checkpointing", True):
            advice.append("or set train_model.gradient_checkpointing=true")
        what = str(error).partition(" GPU ")[0].rstrip(". ")
        raise ResourceError(
            f"{what}, in the part {part!r} of a step. Lower {', '.join(advice)}; torchrl-llm "
            "memory, with the keys of this run, shows what the memory goes to"
        ) from error

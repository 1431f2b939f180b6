"""First line of a run: recipe, model, data, reward, loss, advantage and folder, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrl_llm._run_log import display_path

PROGRESS = "logging.progress"
"""Key that turns on the first line and the progress of a run."""

_LOSS = ("loss.type", "loss.function", "loss.estimator")


def introduction(recipe: str, settings: Mapping[str, Any], folder: str | Path) -> str:
    """The first line of a run.

    Args:
        recipe: name of the recipe.
        settings: dotted key to value; keys that are missing here are not in the line.
        folder: folder of the run.

    Example:
        >>> settings = {"model.name": None, "env.dataset": "gsm8k", "loss.type": "grpo"}
        >>> introduction("grpo", settings, "runs/one")
        'grpo: model of the package, task gsm8k, loss grpo, folder runs/one'
    """
    return f"{recipe}: " + ", ".join([*_facts(settings), f"folder {display_path(folder)}"])


def _facts(settings: Mapping[str, Any]) -> Iterable[str]:
    get = settings.get
    if "model.name" in settings:
        yield f"model {get('model.name') or 'of the package'}"
    if get("teacher.name"):
        yield f"teacher {_listed(get('teacher.name'))}"
    task = _listed(get("tasks") or get("env.dataset"))
    if task and task != "rows":
        yield f"task {task}"
    if data := get("data.source") or get("env.data_files"):
        yield f"data {_listed(data)}"
    parts = [key.split(".")[2] for key in settings if key.startswith("reward.components.")]
    if own := [each for each in (get("reward.function"), *dict.fromkeys(parts)) if each]:
        yield f"reward {_listed(own)}"
    elif "reward.function" in settings and task:
        yield "reward of the task"
    for name, keys in {"loss": _LOSS, "advantage": ("advantage.type",)}.items():
        if found := next((get(key) for key in keys if get(key)), None):
            yield f"{name} {found}"


def _listed(value: Any) -> str:
    return " + ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")

"""Reads a run of language-space training for its page: policies, credit, advice and episodes.

:class:`~torchrl_llm.langmarl.MonteCarloTrainer` writes the folder of the run.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_llm._files import plain_file
from torchrl_llm.errors import DataError
from torchrl_llm.evaluation.report.token_texts import visible

_META = "run_meta.json"
_MODELS = ("actor_llm", "critic_llm", "optimizer_llm")
_WORD = re.compile(r"\s+|[^\s]+")


def read_language_run(run: Path, most: int) -> dict[str, Any] | None:
    """Read the facts that the page shows, as JSON; ``None`` for a different kind of run.

    Args:
        run: folder of the run.
        most: largest number of episodes; each iteration shows its first episodes.

    Returns:
        A dict with ``facts``, from the configuration; ``agents``, each with the difference between
        its first and its newest policy; and ``iterations``, each with its episodes and with the
        advice and difference of each agent.

    Raises:
        DataError: when a file is damaged.
    """
    if not (run / _META).is_file():
        return None
    meta = _read(run / _META)
    agents = [name for name in map(str, meta.get("agents", ())) if Path(name).name == name]
    folders = sorted((run / "trajectories").glob("iter_*"), key=_number)
    stats = {row["iteration"]: row for row in _lines(run / "metrics" / "training_curve.jsonl")}
    policies = [{name: str(text) for name, text in meta.get("policies", {}).items()}]
    iterations, each = [], math.ceil(most / max(len(folders), 1))
    for folder in folders:
        number = _number(folder)
        saved = run / "checkpoints" / f"iter_{number + 1}"
        policies.append({name: _text(saved / f"{name}.txt") for name in agents})
        found = stats.get(number, {})
        iterations.append({
            "number": number + 1,
            "reward": found.get("avg_reward"),
            "accepted": (found.get("metadata") or {}).get("accepted", True),
            "agents": [
                {
                    "name": visible(name),
                    "advice": visible(
                        _text(run / "gradients" / folder.name / f"{name}_aggregated.txt")
                    ),
                    "diff": _difference(policies[-2].get(name, ""), policies[-1][name]),
                }
                for name in agents
            ],
            "episodes": [_episode(run, file) for file in sorted(folder.glob("*.json"))[:each]],
        })  # fmt: skip
    config = _read(run / "config.json")
    models = {key: config.get(key) or config.get("llm") or {} for key in _MODELS}
    names = {key: model["name"] for key, model in models.items() if "name" in model}
    ends = [(policies[0].get(name, ""), policies[-1].get(name, "")) for name in agents]
    return {
        "facts": {key: config[key] for key in ("env", "paradigm", "seed") if key in config} | names,
        "agents": [
            {"name": visible(name), "diff": _difference(*pair) or [["=", visible(pair[1])]]}
            for name, pair in zip(agents, ends, strict=True)
        ],
        "iterations": iterations,
    }


def _episode(run: Path, file: Path) -> dict[str, Any]:
    data = _read(file)
    judged = run / "evaluations" / file.parent.name / f"eval_{file.name}"
    credit = _read(judged).get("per_agent", {}) if judged.is_file() else {}
    task = ((key, value) for key, value in data["task"].items() if key != "task_type")
    return {
        "reward": data.get("reward"),
        "error": visible(str(data.get("metadata", {}).get("error", ""))),
        "task": [[visible(str(key)), visible(str(value))] for key, value in task],
        "turns": [
            [visible(str(step.get(key, ""))) for key in ("agent_id", "observation", "action")]
            for step in data["transitions"]
        ],
        "credit": [[visible(name), visible(str(said))] for name, said in credit.items() if said],
    }


def _difference(before: str, after: str) -> list[list[str]]:
    """Return the words that stayed (=), went (-) and came (+); nothing if the texts are equal."""
    if before == after:
        return []
    old, new = _WORD.findall(before), _WORD.findall(after)
    parts = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        texts = [("=", old[a:b])] if kind == "equal" else [("-", old[a:b]), ("+", new[c:d])]
        parts += [[mark, visible("".join(words))] for mark, words in texts if words]
    return parts


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1


def _text(file: Path) -> str:
    return plain_file(file).read_text(encoding="utf-8") if file.is_file() else ""


def _read(file: Path) -> Mapping[str, Any]:
    [value] = _lines(file, whole=True)
    return value


def _lines(file: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """Read a file with a JSON object per line, or one object; skip a partial last line."""
    text = _text(file)
    try:
        parts = [text] if whole else text[: text.rfind("\n") + 1].splitlines()
        found = [json.loads(part, parse_constant=lambda _: None) for part in parts]
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not all(isinstance(value, dict) for value in found):
        raise DataError(f"{file} cannot be read: it holds no JSON object")
    return found

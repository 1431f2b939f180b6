"""Folders of evaluations as the recipe ``evaluate`` leaves them, written by hand."""

import json
import os
from datetime import datetime

import yaml

WORDS = {"r": "right", "w": "wrong", "i": "invalid"}
NUMBERS = {"r": "4", "w": "5", "i": "6"}
DAY = datetime(2026, 1, 31, 12).timestamp()


def record(prompt, answer, outcome):
    """An answer: ``right``, ``wrong`` or ``invalid``."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    valid = outcome != "invalid"
    found = {"query": prompt, "answer": "4", "messages": messages, "valid": valid}
    found |= {"success": outcome == "right", "cut": False, "length": 3}
    found["reward"] = float(outcome == "right") if valid else None
    return found | ({} if valid else {"error": "TimeoutError: too slow"})


def write_evaluation(folder, answers, *, task="sums", figures=lambda records: {}, **config):
    """Write a folder.

    Args:
        folder: where.
        answers: prompt to the outcomes of its answers, by their first letters.
        task: its name.
        figures: function of the records that gives the task's figures.
        **config: dotted keys with ``__`` for the dot.
    """
    records = [
        {"prompt": number} | record(prompt, NUMBERS[letter], WORDS[letter])
        for number, (prompt, outcomes) in enumerate(answers.items())
        for letter in outcomes
    ]
    folder.mkdir(parents=True, exist_ok=True)
    groups = {"inference_model": {"temperature": 0.5, "url": None}, "model": {"name": "tiny"}}
    for key, value in config.items():
        group, _, name = key.partition("__")
        groups.setdefault(group, {})[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(groups))
    path = folder / f"answers_{task}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    os.utime(path, (DAY, DAY))
    file = folder / "metrics.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    known[task] = figures(records)
    file.write_text(json.dumps(known))
    return folder

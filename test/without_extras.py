"""Programs that run as after ``pip install torchrl_llm``: no package of an extra can be imported.

What the base installation brings is read from ``pyproject.toml`` and the metadata of the installed
packages. Every other package is hidden, as if it were not there.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What is chosen by name and needs an extra. All others are made without one.
NEEDS = {
    "rewards math": "math",
    # Their rows are on the hub, unless a file has them.
    **dict.fromkeys(("tasks gsm8k", "tasks humaneval", "tasks ifeval", "tasks math"), "data"),
    "math of a file": "math",
    "ifeval of a file": "ifeval",
    "tools browser": "browser",
    "loggers mlflow": "mlflow",
    "loggers trackio": "trackio",
    "loggers wandb": "wandb",
    "backends vllm": "vllm",
}
MAKE = """
import json
from pathlib import Path
from torchrl_llm._registry import KINDS, find, names
from torchrl_llm.langmarl.environment import env_class, list_envs

# Losses, advantage estimators, weights and the transformers backend take a model or a number.
ARGUMENTS = {
    "loggers": {"run_dir": "runs", "experiment_name": "one"},
    "judge": {"url": "http://localhost:1/v1", "model": "judge"},
    "model": {"name": "scores"},
    "length": {"longest": 9},
    "program": {"command": "true"},
    "verifiers": {"dataset": [{"query": "1+1?", "task": "{}"}]},
    "rows": {"dataset": [{"query": "1+1?", "answer": "2"}], "reward": str.__eq__},
}
made = {}
kind = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
Path("scores").mkdir(exist_ok=True)
Path("scores/config.json").write_text(json.dumps({"model_type": "llama", **kind}))


def make(entry, target, **arguments):
    try:
        target(**arguments)
    except Exception as error:
        made[entry] = [type(error).__name__, str(error)]
    else:
        made[entry] = ["", ""]


for kind in KINDS:
    for name in names(kind):
        arguments = ARGUMENTS.get(name, ARGUMENTS.get(kind, {}))
        make(f"{kind} {name}", find(kind, name), **arguments)
for name in list_envs():
    make(f"environments {name}", env_class, name=name)
make("math of a file", find("tasks", "math"), dataset=[{"problem": "Half?", "answer": "1/2"}])
row = {"key": 1, "prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
make("ifeval of a file", find("tasks", "ifeval"), dataset=[row])
print(json.dumps(made))
"""


class Without:
    """A finder of ``sys.meta_path`` that does not find some packages.

    Args:
        finder: finds all others.
        hidden: names of top-level packages.
    """

    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.hidden:
            return self.finder.find_spec(name, path, target)


def _plain_name(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _brought(dependencies):
    """Distributions that these need, and what those need in turn."""
    todo, found = [Requirement(text) for text in dependencies], set()
    while todo:
        needed = todo.pop()
        name = _plain_name(needed.name)
        if (name, *sorted(needed.extras)) in found:
            continue
        found.add((name, *sorted(needed.extras)))
        try:
            texts = requires(name) or []
        except PackageNotFoundError:
            continue
        for below in map(Requirement, texts):
            kinds = [{"extra": extra} for extra in ("", *needed.extras)]
            if below.marker is None or any(map(below.marker.evaluate, kinds)):
                todo.append(below)
    return {name for name, *_ in found}


def optional_packages(*also):
    """Import names of the installed packages that neither the base nor these requirements bring."""
    base = _brought([*PROJECT["dependencies"], *also]) | {"torchrl-llm", "pip", "setuptools"}
    packages = packages_distributions().items()
    return {name for name, found in packages if not base & set(map(_plain_name, found))}


def hide(packages):
    """Let this process find none of them from now on."""
    hidden = frozenset(packages)
    assert not hidden & set(sys.modules), f"imported already: {sorted(hidden & set(sys.modules))}"
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]


def run_hidden(code, folder=None, also=()):
    """Run a program from which these packages are hidden.

    Args:
        code: the program; it can import this file.
        folder: its working folder.
        also: requirements that are installed besides the base.

    Returns:
        The process that has ended, with what it printed.
    """
    hidden = (
        f"from without_extras import hide, optional_packages\nhide(optional_packages(*{also!r}))\n"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, "-c", hidden + code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


def wrong_names(made):
    """What :data:`MAKE` has printed that a user without extras should not see, a line each."""
    free = ("rewards", "tasks", "tools", "agents", "loggers", "environments")
    wrong = []
    for name, (kind, message) in made.items():
        if name in NEEDS:
            well = kind == "MissingExtraError" and f"torchrl_llm[{NEEDS[name]}]" in message
        elif name.startswith(free):
            well = not kind
        else:
            well = kind not in ("MissingExtraError", "ModuleNotFoundError", "ImportError")
        if not well:
            wrong.append(f"{name}: {kind} {message}")
    return wrong

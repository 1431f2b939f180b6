"""Running a recipe in this process, which saves seconds of imports each time."""

import copy
import csv
import re
import runpy
import sys
from functools import cache
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from recipes.glossary import unknown

from torchrl_llm.recipes import launch
from torchrl_llm.trainers import run_results


def load_recipe(path, overrides):
    """A recipe's page, and its configuration with overrides as a user would type them."""
    page, file = launch.load_page(path), launch.PAGES / path
    folder, name = file.parent / "config", file.stem.removesuffix("-sync").removesuffix("-model")
    checked = launch.check_arguments([*overrides], folder, name)
    return page, page.load_config(compose(folder, name, checked))


def compose(folder, name, overrides):
    """What Hydra composes, in less time than a step takes: the files once, then the values."""
    values = [each for each in overrides if re.match(r"(?!hydra\.)\w+\.[\w.]+=", each)]
    groups = tuple(each for each in overrides if each not in values)
    config = copy.deepcopy(_composed(folder, name, groups))
    try:
        parsed = OverridesParser.create().parse_overrides(values)
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    except Exception:  # whole, it says what is wrong as a user is told
        return launch.compose_files(folder, name, overrides)
    return config


@cache
def _composed(folder, name, groups):
    return launch.compose_files(folder, name, groups)


def run_main(monkeypatch, script, folder, *overrides):
    """Train in a folder with overrides as a user would type them; the rows of its metrics.csv.

    Hydra starts no program and no curve is drawn, which take as long as two steps;
    :func:`run_typed` does both.
    """
    path = f"{script.parent.name}/{script.name}"
    if not hasattr(launch.load_page(path), "train"):
        return run_typed(monkeypatch, script, folder, *overrides)
    page, config = load_recipe(path, overrides)
    with monkeypatch.context() as without:
        without.setattr(run_results, "save_curves", lambda picture, curves: picture)
        for _ in page.train(config, folder):
            pass
    return read_metrics(folder)


def run_typed(monkeypatch, script, folder, *overrides):
    """Run a script with overrides as a user would type them; the rows of its metrics.csv."""
    run_alone(monkeypatch, script, folder, *overrides)
    return read_metrics(folder)


def run_alone(monkeypatch, script, folder, *overrides):
    """Run a script with overrides as a user would type them, whatever it writes."""
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    arguments = [f"hydra.run.dir={folder}", *overrides, *quiet]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("TORCHRL_LLM_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def read_metrics(folder):
    """The rows of metrics.csv, every column of which the glossary explains."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert not unknown(reader.fieldnames), "docs/source/reference/metrics.yaml lacks these"
        return list(reader)

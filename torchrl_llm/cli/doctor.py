"""Checks a configuration before a long run: ``torchrl-llm doctor grpo model.name=...``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from torchrl_llm._run_log import shown
from torchrl_llm._settings import Group, several
from torchrl_llm.cli._options import Word, make_parser
from torchrl_llm.cli.train import FLAT, RECIPES
from torchrl_llm.errors import ConfigError, DataError

PAGES = {name: page for name, page in RECIPES.items() if name not in FLAT} | {
    "evaluate": "evaluate/evaluate.py",
    "pipeline-rl": "pipeline-rl/learner.py",
}
"""Name of a recipe to its page."""

_FAILED = 1


class Options(Group):
    """Check a configuration before a long run: tokens, template, data, reward, memory, disk.

    Nothing is trained or written.

    Attributes:
        config: one of {recipes}, a YAML file, or the folder of a run.
        overrides: keys of the recipe.
        recipe: recipe of the file, if the keys of the file do not identify it.
        calibrate: find the largest train.micro_token_budget that fits, by training with it.
        sample: let the model answer some prompts, however large it is.
        json: print findings as JSON.
        trust: import the objects that the file or the run's config.yaml names.
    """

    config: Annotated[str, Word("RECIPE|FILE")]
    overrides: Annotated[list[str], Word("KEY=VALUE")] = several()
    recipe: Annotated[str | None, tuple(PAGES)] = None
    calibrate: bool = False
    sample: bool = False
    json: bool = False
    trust: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the problems of this configuration that would fail, mislead or waste a run.

    Args:
        arguments: a recipe or a YAML file, overrides of its keys, and options.

    Returns:
        The exit status: 1 if a finding is an error.

    Raises:
        SystemExit: no such recipe or file, or one that cannot be read; status 2.
    """
    usage = "torchrl-llm doctor RECIPE|FILE.yaml [KEY=VALUE ...] [options]"
    parser = make_parser(Options, "doctor", usage=usage, recipes=", ".join(PAGES))
    given = Options(**vars(parser.parse_intermixed_args(arguments)))
    begun = time.perf_counter()
    from torchrl_llm.recipes.doctor import compose

    file = None if given.config in PAGES else Path(given.config)
    try:
        name = given.config if file is None else compose.recipe_of(file, PAGES)
    except DataError as error:
        known = f"; a recipe is one of {', '.join(PAGES)}" * (file.suffix == "")
        parser.error(shown(f"{error}{known}"))
    name = given.recipe or name

    from torchrl_llm._registry import importing_only
    from torchrl_llm.recipes.doctor import examine, finding
    from torchrl_llm.recipes.doctor.subject import Subject

    folders = [each for each in given.overrides if each.startswith("hydra.run.dir=")]
    folder = Path(folders[-1].partition("=")[2] if folders else "outputs")
    wanted = {"folder": folder, "samples": given.sample, "calibrates": given.calibrate}
    closes = file is not None and not given.trust
    whose = importing_only(given.overrides, whose=str(file))
    with (
        contextlib.redirect_stdout(sys.stderr),  # output of the user's code
        whose if closes else contextlib.nullcontext(),
    ):
        try:
            config, page = compose.compose(name, PAGES[name], given.overrides, file)
            found = examine.examine(Subject(config, page, **wanted))
        except ConfigError as error:
            found = [finding.error("", str(error), "configuration")]
    if given.json:
        told = [{key: shown(text) for key, text in each._asdict().items()} for each in found]
        text = json.dumps({"recipe": name, "findings": told})
    else:
        text = f"{shown(finding.shown(found))} ({name}, {time.perf_counter() - begun:.0f} s)"
    if os.environ.get("RANK", "0") == "0":  # ranks of torchrun agree
        sys.stdout.write(f"{text}\n")
    return _FAILED if any(each.level == "error" for each in found) else 0

"""Settings of a recipe without YAML files: one flat dataclass, overridden by the command line.

The recipes ``langmarl``, ``langmarl-weights`` and ``pico`` use them. All others compose YAML files
(``recipes/command_keys.py``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchrl_llm._settings import Group, sentences
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.launch import check_folder
from torchrl_llm.recipes.strict_config import from_mapping

T = TypeVar("T", bound=Group)


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value``; a value that is JSON is read as JSON, any other value is text.

    ``hydra.run.dir``, the key of the other recipes for the folder of a run, is an alias of
    ``folder``.

    Args:
        arguments: arguments of the command line.

    Raises:
        ConfigError: an argument has no ``=``.

    Example:
        >>> parse_overrides(["num_iterations=3", "paradigm=central_global", "llm=null"])
        {'num_iterations': 3, 'paradigm': 'central_global', 'llm': None}
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not key:
            raise ConfigError(f"a setting is given as key=value, got {argument!r}")
        key = "folder" if key == "hydra.run.dir" else key
        try:
            found[key] = json.loads(value)
        except ValueError as error:
            if value[:1] in ("{", "["):  # not shown: it may contain a secret key
                raise ConfigError(f"the value of {key} is no JSON: {error}") from None
            found[key] = value
    return found


def read_settings(group: type[T], arguments: Sequence[str], about: str) -> T:
    """Read the settings of a command line, or print its help.

    Args:
        group: the dataclass of the settings.
        arguments: ``key=value`` each, or ``--help``.
        about: the text before the keys in the help.

    Raises:
        ConfigError: an unknown key (the message names the nearest one), or an impossible value.
        SystemExit: the help was printed.
    """
    if {"--help", "-h"} & set(arguments):
        show_keys(group, about)
    return from_mapping(group, parse_overrides(arguments))


def show_keys(group: type[Group], about: str) -> NoReturn:
    """Print the keys of a dataclass with their defaults and meaning, and exit.

    Args:
        group: the dataclass.
        about: the text before the keys.

    Raises:
        SystemExit: always, with status 0.
    """
    said, lines = sentences(group), []
    for entry in fields(group):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        value = default if isinstance(default, str) else json.dumps(default)
        lines.append(f"{entry.name + '=' + value:32}  # {said[entry.name].replace('``', '')}")
    sys.stdout.write("\n".join([about.replace("``", "").rstrip(), "", *lines, ""]))
    raise SystemExit(0)


def new_folder(recipe: str, given: str | None = None) -> Path:
    """Make the folder of a run: ``outputs/RECIPE/DATE/TIME``.

    Args:
        recipe: its name.
        given: the value of the key ``folder``, which replaces the default folder.

    Raises:
        ConfigError: the folder cannot be made.
    """
    path = Path(given or f"outputs/{recipe}/{datetime.now():%Y-%m-%d/%H-%M-%S}")
    check_folder(path, "folder")
    path.mkdir(parents=True, exist_ok=True)
    return path

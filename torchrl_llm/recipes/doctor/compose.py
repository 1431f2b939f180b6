"""Configuration of any recipe, by its name or from a YAML file, composed without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from torchrl_llm._registry import refuse_foreign
from torchrl_llm._settings import dotted
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.command_keys import KeyTable, check_option
from torchrl_llm.trainers.run_folder import CONFIG_FILE, read_mapping

# Keys of ``evaluate`` with user-defined names, whose value in the file is not empty.
_OPEN = {"evaluate": ("data_files", "options")}
_SIBLINGS = {"grpo": "grpo-async", "grpo-async": "grpo"}


def read_file(path: Path) -> dict[str, Any]:
    """Nested values of a YAML file, or of the file in a run's folder.

    Args:
        path: the file or the folder.

    Raises:
        DataError: the file does not exist, or is not a YAML mapping.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        return read_mapping(file)
    except OSError as error:
        raise DataError(f"there is no file {file}") from error


def recipe_of(path: Path, pages: Mapping[str, str]) -> str:
    """The recipe of a file: the recipe in its path, or else the first recipe with most of its keys.

    Args:
        path: path of the file, or of a run's folder.
        pages: name of a recipe to its page.

    Raises:
        DataError: as :func:`read_file`, or no recipe has any of the keys.
    """
    values, known = read_file(path), {}
    composed = "defaults" in values
    keys = KeyTable.read(path.parent, path.stem).plain if composed else list(dotted(values))
    for name, page in pages.items():
        if path.resolve() == (_folder(page) / f"{name}.yaml").resolve():
            return name
        table = KeyTable.read(_folder(page), name, open_keys=_OPEN.get(name, ()))
        names = {*table.keys, *(f"{group}.type" for group in table.groups)}
        known[name] = sum(key in names or table.is_open(key) for key in keys)
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise DataError(f"{path} has no key of any recipe ({', '.join(pages)})")
    return best


def compose(
    name: str, page: str, overrides: Sequence[str], file: Path | None = None
) -> tuple[Any, ModuleType]:
    """The configuration of a run, and the module of its page.

    Args:
        name: name of the recipe.
        page: path of its page, below ``sota-implementations``.
        overrides: overrides of the command line, which take precedence.
        file: its values replace the recipe's. If it has a list of ``defaults``, Hydra composes it
            in its own folder.

    Raises:
        ConfigError: a run would raise the same error.
        DataError: as :func:`read_file`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder, entry, values = _folder(page), name, {} if file is None else read_file(file)
    if file is not None and "defaults" in values:
        for place in (values.get("hydra") or {}).get("searchpath") or ():
            if str(place).startswith("pkg://"):  # Hydra imports it
                refuse_foreign(str(place))
        folder, entry, values = file.parent, file.stem, {}
    values.pop("hydra", None)
    open_keys, other = _OPEN.get(name, ()), _SIBLINGS.get(name)
    siblings = {other: f"recipe {other}"} if other and folder == _folder(page) else None
    checked = launch.check_arguments(
        list(overrides), folder, entry, open_keys=open_keys, siblings=siblings
    )
    typed = {each.lstrip("+~").partition("=")[0] for each in checked}
    groups = KeyTable.read(folder, entry, open_keys=open_keys)
    files = _files(values, groups, typed)
    chosen = [f"{group}={option}" for group, option in files.items()]
    composed = launch.compose_files(folder, entry, [*chosen, *checked])
    try:
        if values:
            composed = _merged(composed, values, set(groups.groups) - set(files), typed)
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the values do not go together: {error}") from error
    module = launch.load_page(page)
    schema = [module.AsyncGRPOConfig] if name == "grpo-async" else []
    return module.load_config(plain, *schema), module


def _folder(page: str) -> Path:
    return (launch.PAGES / page).parent / "config"


def _files(values: dict[str, Any], table: KeyTable, typed: set[str]) -> dict[str, str]:
    """Options that the values choose for groups; drop values of groups that the user typed."""
    files = {}
    for group, options in table.groups.items():
        value = values.get(group)
        if not isinstance(value, (Mapping, str, NoneType)):
            raise ConfigError(f"{group} is a group of keys, or the name of one, got {value!r}")
        if isinstance(value, str):
            check_option(group, value, table)
        if group in typed or isinstance(value, str):
            values.pop(group, None)
        name = value.get("dataset", value.get("type")) if isinstance(value, dict) else value
        if group not in typed and isinstance(name, str) and name in options:
            files[group] = name
    return files


def _merged(composed: Any, values: dict[str, Any], others: set[str], typed: set[str]) -> Any:
    """Merge the defaults, the values of a file, and the typed values; later ones win."""
    from omegaconf import OmegaConf

    below = OmegaConf.to_container(composed)
    # A user-defined loss or estimator has its own keys.
    below |= {group: {} for group in others & values.keys() if "type" in (values[group] or ())}
    merged = OmegaConf.merge(OmegaConf.create(below), OmegaConf.create(values))
    for key in typed:
        if OmegaConf.select(composed, key) is not None or key in dotted(below):
            OmegaConf.update(merged, key, OmegaConf.select(composed, key), force_add=True)
    return merged

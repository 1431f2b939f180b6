"""Configuration of any recipe, by its name or from a YAML file, composed without running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.command_keys import KeyTable, check_option
from torchrl_llm.trainers.run_folder import CONFIG_FILE, dotted, read_config

# Mappings of the recipe ``evaluate`` with names that only its user knows, and entries in its file.
_OPEN = {"evaluate": ("data_files", "options")}
_SIBLINGS = {"grpo": "grpo-async", "grpo-async": "grpo"}


class Composed(NamedTuple):
    """A configuration and the page that would run it.

    Attributes:
        config: checked; a dataclass of the recipe's.
        page: module of the recipe's page.
    """

    config: Any
    page: ModuleType


def read_file(path: Path) -> dict[str, Any]:
    """Nested values of a YAML file, or of a run's folder.

    Args:
        path: the file or the folder.

    Raises:
        DataError: it is not there, or is no YAML mapping.
    """
    if path.is_dir():
        if not (found := read_config(path)):
            raise DataError(f"{path} holds no {CONFIG_FILE}")
        return found
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no mapping of keys to values")
    return found


def recipe_of(path: Path, pages: Mapping[str, str]) -> str:
    """The recipe that a file is of: the one that has most of its keys.

    Args:
        path: of the file, or of a run's folder; one of a recipe's own is told by its place.
        pages: name of a recipe to its page.

    Raises:
        DataError: as :func:`read_file`, or no recipe has any of the keys.
    """
    values, known = read_file(path), dict.fromkeys(pages, 0)
    keys = list(dotted(values))
    if "defaults" in values:
        keys = KeyTable.read(path.parent, path.stem).plain
    for name, page in pages.items():
        folder = _folder(page)
        if path.resolve() == (folder / f"{name}.yaml").resolve():
            return name
        table = KeyTable.read(folder, name, open_keys=_OPEN.get(name, ()))
        names = {*table.keys, *(f"{group}.type" for group in table.groups)}
        known[name] = sum(key in names or table.is_open(key) for key in keys)
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise DataError(f"{path} has no key of any recipe ({', '.join(pages)})")
    return best


def compose(name: str, page: str, overrides: Sequence[str], file: Path | None = None) -> Composed:
    """The configuration that a run would have.

    Args:
        name: of the recipe.
        page: path of its page, below ``sota-implementations``.
        overrides: of the command line, which win.
        file: with values over the recipe's defaults; or, where it has a list of ``defaults``, what
            Hydra composes in its folder instead of them.

    Raises:
        ConfigError: what any run with it would be refused for.
        DataError: as :func:`read_file`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder, entry, values = _folder(page), name, {} if file is None else read_file(file)
    if file is not None and "defaults" in values:
        folder, entry, values = file.parent, file.stem, {}
    values.pop("hydra", None)
    open_keys, other = _OPEN.get(name, ()), _SIBLINGS.get(name)
    siblings = {other: f"recipe {other}"} if other and folder == _folder(page) else None
    checked = launch.check_arguments(
        list(overrides), folder, entry, open_keys=open_keys, siblings=siblings
    )
    table = KeyTable.read(folder, entry, open_keys=open_keys)
    typed = {each.lstrip("+~").partition("=")[0] for each in checked}
    files = dict(_files(values, table, typed))
    groups = [f"{group}={option}" for group, option in files.items()]
    composed = launch.compose_files(folder, entry, [*groups, *checked])
    try:
        merged = _merged(composed, values, table, files, typed) if values else composed
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the values do not go together: {error.msg or error}") from error
    module = launch.load_page(page)
    schema = [module.AsyncGRPOConfig] if name == "grpo-async" else []
    return Composed(module.load_config(plain, *schema), module)


def _folder(page: str) -> Path:
    return (launch.PAGES / page).parent / "config"


def _option(group: str, value: Any) -> Any:
    """What a file chooses for a group: ``loss: gspo``, or the type among its keys."""
    name = "dataset" if group == "env" else "type"
    return value.get(name) if isinstance(value, Mapping) else value


def _files(
    values: Mapping[str, Any], table: KeyTable, typed: set[str]
) -> Iterator[tuple[str, str]]:
    """Groups whose file the values choose, where the command line does not."""
    for group, options in table.groups.items():
        value = values.get(group)
        if isinstance(value, str):
            check_option(group, value, table)
        if group not in typed and (option := _option(group, value)) in options:
            yield group, option


def _merged(
    composed: Any,
    values: dict[str, Any],
    table: KeyTable,
    files: Mapping[str, str],
    typed: set[str],
) -> Any:
    """The values of a file over the defaults, and what was typed over both."""
    from omegaconf import OmegaConf

    OmegaConf.set_struct(composed, False)
    below = OmegaConf.to_container(composed)
    for group in table.groups:
        if group in typed or not isinstance(values.get(group), Mapping):
            values.pop(group, None)
        elif group not in files and group != "env":
            below[group] = {}  # a class of the user's, with keys of its own
    merged = OmegaConf.merge(OmegaConf.create(below), OmegaConf.create(values))
    for key in typed:
        if key not in table.groups and not key.startswith("hydra"):
            OmegaConf.update(merged, key, OmegaConf.select(composed, key), force_add=True)
    return merged

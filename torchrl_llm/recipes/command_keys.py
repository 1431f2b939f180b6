"""Keys of a recipe, read from its YAML files, and the check of a command line against them.

This module has no heavy imports, so that a mistyped key is rejected in a fraction of a second. The
recipe's dataclasses (:mod:`torchrl_llm.recipes.strict_config`) check values and their combinations
later. Their keys are the same: a test compares the two.

Next: :mod:`torchrl_llm.recipes.launch` calls this before a recipe imports anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.other_names import OTHER_NAMES, RENAMED
from torchrl_llm.trainers.run_folder import read_yaml

# Groups that accept a single value, and the key that receives it.
SHORT = {"data": "data.source", "reward": "reward.function"}
# Settings of a task that may be written without "options".
_OPTIONS = {"env.id": "env.options.id", "env.args": "env.options.args"}
# Keys that select a program as agent.
_PROGRAM = {"agent.program", "agent.command"}
# File of a group with the keys that the other files share.
_SHARED = "shared"
# Smallest similarity (difflib's ratio, 1 for equal) at which a name counts as a typing error.
_SIMILAR = 0.7
# The same limit for names that may belong to a different group, or name a group.
_ALIKE = 0.85
# Flags of Hydra, and its flags whose value is the next word.
_FLAG = re.compile(
    "--(help|hydra-help|version|resolve|run|multirun|shell-completion|info)|-(h|r|m|sc|i)"
)
_FLAG_WITH_WORD = re.compile(
    "--(cfg|package|config-path|config-name|config-dir|experimental-rerun)|-(c|p|cp|cn|cd)"
)
# Values that Hydra reads as one word, or as a list, without quotes.
_ONE_WORD = re.compile(r"[\w./:@%+*?,~\[\]{}$-]*|\[.*\]", re.ASCII)


@dataclass
class KeyTable:
    """Keys that a recipe has.

    Attributes:
        plain: dotted keys, groups included, in the order of the files.
        groups: name of a group of files to its options, each with the keys that it writes.
        defaults: default option of each group.
        open: keys whose value is a mapping with user-defined names.
        open_options: groups whose options cannot be listed, because they come from a different
            package.
    """

    plain: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    open_options: bool = False

    @property
    def keys(self) -> list[str]:
        """Every dotted key, including the keys of all options."""
        options = [keys for group in self.groups.values() for keys in group.values()]
        own = (key for keys in options for key in keys)
        return list(dict.fromkeys((*self.plain, *self.groups, *own)))

    @classmethod
    def read(
        cls, folder: Path, name: str, *, more: Sequence[Path] = (), open_keys: Iterable[str] = ()
    ) -> KeyTable:
        """The keys of a recipe.

        Args:
            folder: the recipe's ``config``.
            name: name of the file that composes the others.
            more: folders with further options of the groups.
            open_keys: open keys whose value in the file is not empty.
        """
        table = cls(open=set(open_keys))
        for entry in (main := _load(folder / f"{name}.yaml")).pop("defaults", ()):
            if isinstance(entry, Mapping):
                # Hydra's own groups have their files in a different place.
                table.defaults |= {k: v for k, v in entry.items() if not k.startswith("override ")}
            elif entry != "_self_":
                table._add(_load(folder / f"{entry}.yaml"))
        main.pop("hydra", None)
        table._add(main)
        for group in table.defaults:
            files = [file for each in (folder, *more) for file in (each / group).glob("*.yaml")]
            for file in sorted(files):
                if file.stem != _SHARED:
                    table.groups.setdefault(group, {})[file.stem] = list(_option(file, group))
        return table

    def _add(self, values: Mapping[str, Any]) -> None:
        for key, value in _walk(values):
            self.plain.append(key)
            if value == {}:
                self.open.add(key)

    def is_own(self, group: str, option: Any) -> bool:
        """Whether an option is a user-defined class, ``module:name``, which has no file.

        Args:
            group: a group with an option ``none``, so that a class needs no keys of a file.
            option: the given option.
        """
        return isinstance(option, str) and ":" in option and "none" in self.groups.get(group, ())

    def is_open(self, key: str) -> bool:
        """Whether a key is within a mapping with free names."""
        return key.startswith(tuple(f"{each}." for each in self.open))


def _load(file: Path) -> dict[str, Any]:
    return read_yaml(file) or {}


def _walk(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")


def _option(file: Path, group: str) -> Iterator[str]:
    """Keys of a group's option, including keys that its file inherits from other files."""
    if "@package _global_" in file.read_text(encoding="utf-8"):
        return  # a user's class sets the recipe's own keys
    values = _load(file)
    for entry in values.pop("defaults", ()):
        # A user's folder of options has no copy of the recipe's shared file.
        if entry != "_self_" and (other := file.with_name(f"{entry}.yaml")).is_file():
            yield from _option(other, group)
    yield from (key for key, _ in _walk(values, f"{group}."))


def check_overrides(
    arguments: Iterable[str], table: KeyTable, *, elsewhere: Mapping[str, str] | None = None
) -> list[str]:
    """Reject overrides ``key=value`` whose key or group value a recipe does not have.

    Hydra's own flags (``--cfg``, ``-m``) and keys (``hydra.run.dir``) pass.

    Args:
        arguments: arguments of the command line.
        table: keys of the recipe.
        elsewhere: keys of other recipes, with the message for each.

    Returns:
        The arguments for Hydra: ``data=FILE``, ``reward=NAME`` and ``env=FILE.py:NAME`` written
        out. Mappings with user-defined names, and the keys within them, get the prefix ``++`` for
        new keys, without which Hydra rejects them.

    Raises:
        ConfigError: a key is unknown, was renamed, or has no effect with the chosen option of its
            group; an option does not exist; a word is not an override.
    """
    arguments = [each for argument in arguments for each in _own_env(argument, table)]
    pairs = (argument.partition("=") for argument in arguments)
    own = {key for key, _, value in pairs if table.is_own(key, value)}
    checked, given, before = [], {}, ""
    for argument in arguments:
        key, separator, value = argument.partition("=")
        name = key.lstrip("+~").partition("@")[0]
        if not key or name.startswith("-") or not (separator or key.startswith("~")):
            _check_word(argument, before, table)
        before = argument
        if not separator or name == "hydra" or name.startswith(("-", "hydra.", "hydra/")):
            checked.append(argument)
            continue
        if (whole := SHORT.get(name)) in table.plain:
            argument, name = f"{whole}={_as_it_stands(value)}", whole
        if (whole := _OPTIONS.get(name)) and "env.options" in table.plain:
            argument, name = f"{whole}={value}", whole
        if name in own:
            checked += [f"{name}=none", f"++{name}.type={_as_it_stands(value)}"]
            continue
        if name.partition(".")[0] in own:
            checked.append(f"++{argument.lstrip('+')}")
            continue
        given[name] = value
        free = name in table.open or table.is_open(name)
        new = free and not argument.startswith(("+", "~"))
        checked.append(f"++{argument}" if new else argument)
    implied = _implied(given, table)
    known = given | dict(argument.split("=") for argument in implied)
    for name, value in given.items():
        _check_key(name, value, known, table, elsewhere or {})
    return checked + implied


def _own_env(argument: str, table: KeyTable) -> list[str]:
    """``env=FILE.py:NAME`` as the option for user-defined tasks, with the name."""
    key, _, value = argument.partition("=")
    own = [each for each in ("rows", "own") if each in table.groups.get("env", ())]
    if key != "env" or ":" not in value or not own:
        return [argument]
    return [f"env={own[0]}", f"env.dataset={_as_it_stands(value)}"]


def _check_word(argument: str, before: str, table: KeyTable) -> None:
    """Reject words that are not an override, a flag of Hydra, or the value of a flag."""
    flag = argument.partition("=")[0]
    if any(_FLAG_WITH_WORD.fullmatch(word) for word in (before, flag)) or _FLAG.fullmatch(flag):
        return
    key = flag.lstrip("-")
    known = key in table.keys or not key
    meant = f"{key or 'KEY'}=VALUE is meant" if known else refusal(key, table.keys)
    raise ConfigError(
        f"{argument!r}: settings are written KEY=VALUE, without dashes or spaces; {meant}"
    )


def _implied(given: Mapping[str, str], table: KeyTable) -> list[str]:
    """The implied options: ``env=rows`` for given rows, ``agent=program`` for a given program."""
    implied = []
    if "agent" not in given and _PROGRAM & given.keys() & {*table.keys}:
        implied.append("agent=program")
    if "data.source" not in given:
        return implied
    if "rows" in table.groups.get("env", ()) and not {"env", "env.dataset"} & given.keys():
        return [*implied, "env=rows"]
    own = "tasks" in table.plain and "tasks" not in given
    return [*implied, "tasks=[rows]"] if own else implied


def quoted(text: str) -> str:
    r"""A text quoted for Hydra, with any characters.

    Args:
        text: the text that Hydra shall read.

    Example:
        >>> print(quoted("it's"))
        'it\'s'
    """
    # Hydra reads a backslash literally unless a quote follows.
    inner = re.sub(r"(\\+)('|\Z)", r"\1\1\2", text).replace("'", r"\'")
    return f"'{inner}'"


def _as_it_stands(value: str) -> str:
    """A value that Hydra reads as it was typed."""
    return value if _ONE_WORD.fullmatch(value) or value.startswith(("'", '"')) else quoted(value)


def _check_key(
    name: str, value: str, given: Mapping[str, str], table: KeyTable, elsewhere: Mapping[str, str]
) -> None:
    if table.is_open(name):
        return
    if name in table.groups:
        for option in value.split(","):
            check_option(name, option.strip(), table)
        return
    if name not in table.keys:
        if name in elsewhere:
            raise ConfigError(f"{name!r}: {elsewhere[name]}")
        raise ConfigError(refusal(name, table.keys))
    if inner := dict.fromkeys(key for key in table.plain if key.startswith(f"{name}.")):
        if not (table.open_options or value.startswith(("{", "$"))):
            raise ConfigError(f"{name!r} is a group of keys, {', '.join(inner)}; got {value!r}")
        return
    group, _, leaf = name.rpartition(".")
    options = table.groups.get(group, {})
    if not any(options.values()):
        return
    if leaf == "type":
        raise ConfigError(f"{name}={value}: choose it with its settings, {group}={value}")
    chosen = given.get(group, table.defaults.get(group))
    if chosen in options and name not in options[chosen]:
        owners = ", ".join(option for option, keys in options.items() if name in keys)
        raise ConfigError(f"{name} has no effect with {group}={chosen}; it is a key of {owners}")


def check_option(group: str, option: str, table: KeyTable) -> None:
    """Reject an option that a group does not have.

    Args:
        group: name of a group of files.
        option: the given option.
        table: keys of the recipe.

    Raises:
        ConfigError: the option does not exist; the message names the nearest option and all
            options.
    """
    options = table.groups[group]
    if option in options or table.open_options:
        return
    near = _near(option.lower().replace("+", "_plus"), options)
    hint = f"did you mean {near[0]!r}? " if near else ""
    own = " A task of your own is env=FILE.py:CLASS." if group == "env" else ""
    own = f" One of your own is {group}=module:class." if "none" in options else own
    raise ConfigError(f"{group}={option}: {hint}There are {', '.join(sorted(options))}.{own}")


def refusal(key: str, keys: Sequence[str], renamed: Mapping[str, str] = RENAMED) -> str:
    """Message for a rejected key, with the key that was probably meant.

    The key may belong to a different library, be in the wrong group, or be mistyped, most often
    within its own group. Without a similar key the message lists the keys of its group.

    Args:
        key: an unknown dotted key.
        keys: the valid keys.
        renamed: old dotted key to the new key, or to a sentence.

    Example:
        >>> refusal("optimizer.lrr", ["optimizer", "optimizer.lr", "seed"])
        "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"
        >>> refusal("learning_rate", ["optimizer", "optimizer.lr", "seed"])
        "unknown key 'learning_rate'; here it is 'optimizer.lr'"
        >>> refusal("banana", ["optimizer", "optimizer.lr", "seed"])
        "unknown key 'banana'; --help lists all keys"
    """
    if key in renamed:
        target = renamed[key]
        return f"{key!r} was renamed to {target!r}" if target in keys else f"{key!r}: {target}"
    group, _, leaf = key.rpartition(".")
    leaves: dict[str, list[str]] = {}
    groups = {each.rpartition(".")[0] for each in keys}
    for each in keys:
        if not group or each not in groups:
            leaves.setdefault(each.rpartition(".")[2], []).append(each)
    if (target := _other_name(key, keys)) is not None:
        return f"unknown key {key!r}; {target}"
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == group}
    begun = [name for name in siblings if len(leaf) > 2 and name.startswith(leaf)]
    near = begun[:1] or _near(leaf, siblings, _SIMILAR if group else _ALIKE)
    for name in [leaf] if leaf in leaves else near:
        if meant := [siblings[name]] if name in siblings else _elsewhere(key, leaves[name]):
            return f"unknown key {key!r}; did you mean {' or '.join(map(repr, meant))}?"
    for name in _near(leaf, OTHER_NAMES, _ALIKE if group and group in groups else 0.9):
        if (target := _other_name(f"{group}.{name}".lstrip("."), keys)) is not None:
            return f"unknown key {key!r}; {target}"
    for name in _near(leaf, leaves, _ALIKE):
        if meant := _elsewhere(key, leaves[name]):
            return f"unknown key {key!r}; did you mean {' or '.join(map(repr, meant))}?"
    own = f"{group} has {', '.join(siblings)}; " if siblings and group else ""
    return f"unknown key {key!r}; {own}--help lists all keys"


def _elsewhere(key: str, named: Sequence[str]) -> Sequence[str]:
    """Keys of the same name in other groups, if they mean the same there."""
    group = key.rpartition(".")[0]
    if whole := [each for each in named if key.endswith(f".{each}")]:
        return whole
    if _is_of_evaluation(key):
        named = [each for each in named if each.startswith("eval.")]
    if not group:
        return named[:3]
    # A name in several groups or in a nested group has a meaning only in its group.
    inner = [part for each in named for part in each.split(".")[1:-1]]
    return named if len(named) == 1 and {*inner} <= {*group.split(".")} else ()


def _is_of_evaluation(key: str) -> bool:
    """Whether the name of a key refers to evaluation, which has separate settings."""
    return not {"eval", "val"}.isdisjoint(re.split(r"[._]", key))


def _near(name: str, names: Collection[str], similarity: float = _SIMILAR) -> list[str]:
    """The most similar name, if it is similar enough; a permutation of its letters always is."""
    if swapped := [each for each in names if sorted(each) == sorted(name)]:
        return swapped[:1]
    return difflib.get_close_matches(name, names, 1, similarity)


def _other_name(key: str, keys: Sequence[str]) -> str | None:
    """This package's name for a key of a different library, if this recipe has it."""
    parts, groups = key.split("."), {each.rpartition(".")[0] for each in keys}
    # A group takes a value if its options are files, which have a type.
    valued = {each for each in keys if each not in groups or f"{each}.type" in keys}
    for start in range(len(parts)):
        target = OTHER_NAMES.get(".".join(parts[start:]))
        if target is None and len(parts) > 1 and parts[-2].endswith("_kwargs"):
            target = OTHER_NAMES.get(parts[-2])  # a dict, with one key named
        if target is None or (_is_of_evaluation(key) and "eval" not in target):
            continue
        named = [each.partition("=")[0] for each in target.split(" and ")]
        if set(named) <= valued:
            return "here it is " + " and ".join(map(repr, target.split(" and ")))
        if " " in target and " and " not in target:
            return target
    return None

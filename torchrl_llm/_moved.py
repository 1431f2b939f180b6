"""Import finder for TorchRL paths that have no file in this package.

The table is ``assets/moved_modules.txt``, one line per path. The first word is the path, below
``torchrl_llm.``; the others define its target:

- ``old new``: the module ``new`` itself, as an alias.
- ``old new other:Name,Name``: a module that has the names of ``new`` and some of ``other``; the
  first target may also have the form ``other:Name``. ``other:Old=New`` provides ``New`` as ``Old``.
- ``path path other:Name``: the existing file at ``path``, with names of ``other`` added.

Names are imported at first access, so a line causes no import cycle and loads nothing.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLE = Path(__file__).parent / "assets" / "moved_modules.txt"


@cache
def moved_modules() -> dict[str, tuple[str, ...]]:
    """Map each path to the words of its target, all below ``torchrl_llm.``.

    Example:
        >>> moved_modules()["data.topk"]
        ('compat.topk_selector',)
    """
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    return {path: tuple(words) for path, *words in map(str.split, lines)}


class _Alias(Loader):
    """Loader that returns a different module for a path."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the alias's spec
        if not hasattr(module, "__path__"):
            module.__path__ = []  # it may have submodules


class _Gathered(Loader):
    """Loader of a module that takes its names from others."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []  # it may have submodules
        _add_names(module, self._words)


class _MovedFinder(MetaPathFinder):
    """Finder of these paths, used first: the new folder of an old package has the same files."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        words = moved_modules().get(rest) if package == "torchrl_llm" else None
        if words is None:
            return None
        if words[0] == rest:
            spec = PathFinder.find_spec(fullname, path, target)
            return None if spec is None else _with_names(spec, words[1:])  # left to other finders
        one = len(words) == 1 and ":" not in words[0]
        loader = _Alias(f"torchrl_llm.{words[0]}") if one else _Gathered(words)
        return ModuleSpec(fullname, loader)


def _with_names(spec: ModuleSpec, words: tuple[str, ...]) -> ModuleSpec:
    """Spec of a file that gets names of other modules after it has run."""
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _add_names(module, words)

    spec.loader.exec_module = exec_module
    return spec


def _add_names(module: ModuleType, words: tuple[str, ...]) -> None:
    """Make a module provide names of others, in the order of the words."""
    own = getattr(module, "__getattr__", None)
    listed = getattr(module, "__dir__", None) if own else None
    whole = [word for word in words if ":" not in word]
    pairs = [word.split(":") for word in words if ":" in word]
    named = [(target, name.partition("=")) for target, names in pairs for name in names.split(",")]
    where = {name: (target, other or name) for target, (name, _, other) in named}

    def __getattr__(name: str) -> Any:
        targets = [where[name]] if name in where else [(target, name) for target in whole]
        for target, theirs in [] if name.startswith("__") else targets:
            found = getattr(importlib.import_module(f"torchrl_llm.{target}"), theirs, module)
            if found is not module:
                setattr(module, name, found)
                return found
        if own is not None:
            return own(name)
        if name == "__all__":  # imported by `from module import *`
            return [each for each in __dir__() if not each.startswith("_")]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        names = {*vars(module), *where, *(listed() if listed else ())}
        for target in whole:
            names |= set(dir(importlib.import_module(f"torchrl_llm.{target}")))
        return sorted(names)

    module.__getattr__, module.__dir__ = __getattr__, __dir__


def install() -> None:
    """Make the paths importable; a second call does nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())

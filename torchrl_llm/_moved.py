"""Finder of modules under the paths that they had before: an old path gives the new module.

The table is ``assets/moved_modules.txt``, a line ``old new`` for each module. It is read when a
module of this package is asked for that does not exist.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_TABLE = Path(__file__).parent / "assets" / "moved_modules.txt"


@cache
def moved_modules() -> dict[str, str]:
    """Old dotted path to new dotted path, below ``torchrl_llm.``.

    Example:
        >>> moved_modules()["envs.sandbox"]
        'sandbox'
    """
    return dict(line.split() for line in _TABLE.read_text(encoding="utf-8").splitlines())


class _Alias(Loader):
    """Loader that answers an old path with the module of the new one."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the alias's in its place
        if not hasattr(module, "__path__"):
            module.__path__ = []  # what was a package has old paths below it


class _MovedFinder(MetaPathFinder):
    """Finder of old paths, asked first: the new folder of an old package has the same files."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "torchrl_llm" or rest not in moved_modules():
            return None
        return ModuleSpec(fullname, _Alias(f"torchrl_llm.{moved_modules()[rest]}"))


def install() -> None:
    """Make the old paths importable; a second call does nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())

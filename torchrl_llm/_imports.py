"""Imports at use: optional packages (:func:`require`), names of a higher floor (:func:`lazy`)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from torchrl_llm.errors import MissingExtraError


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Args:
        module: dotted name of the module to import.
        extra: the extra of this package that installs it.
        feature: what the caller needs it for; it begins the error message.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: when the module cannot be found.

    Example:
        >>> require("json", extra="none", feature="this example").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        raise MissingExtraError(
            f"{feature} needs the package {root!r}, which is not installed: "
            f'pip install "torchrl_llm[{extra}]"'
        ) from error


def lazy(package: str, modules: dict[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package whose names are imported when they are asked for.

    ``dir`` of the package lists them from the start. They are its ``__all__``, unless it has one.

    Args:
        package: ``__name__`` of the package.
        modules: dotted path of a module to the names that it defines, separated by spaces.

    Returns:
        A function that imports a name when it is first asked for, and keeps it in the package.

    Example:
        >>> sys.modules["example"] = ModuleType("example")
        >>> lazy("example", {"pathlib": "Path PurePath"})("Path").__name__
        'Path'
        >>> sys.modules.pop("example").__all__
        ['Path', 'PurePath']
    """
    where = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(where[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    namespace = vars(sys.modules[package])
    namespace.setdefault("__all__", sorted(where))
    # What completes names, or lists them for the reference pages, asks for the directory.
    namespace["__dir__"] = lambda: sorted({*namespace, *where})
    return __getattr__

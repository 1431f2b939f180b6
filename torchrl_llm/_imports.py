"""Late imports: optional packages (:func:`require`), lazy names of packages (:func:`lazy`)."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from torchrl_llm.errors import MissingExtraError


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import an optional package; if missing, raise an error that names the extra.

    Args:
        module: dotted name of the module to import.
        extra: the extra of this package that installs it.
        feature: the feature that needs the package; it begins the error message.

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


def lazy(package: str) -> None:
    """Give a package names that are imported at first access.

    Its stub, ``__init__.pyi``, defines the names and their modules, for type checkers and for this
    function. They form the package's ``__all__``, and ``dir`` lists them from the start. A name
    that is also the name of a file in the package is imported at once; otherwise importing that
    file would overwrite the name.

    Args:
        package: ``__name__`` of the package.

    Example:
        >>> import torchrl_llm.objectives
        >>> "GRPOLoss" in dir(torchrl_llm.objectives)
        True
    """
    namespace = vars(sys.modules[package])
    stub = Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
    where = {
        name: module
        for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.*)", stub, re.MULTILINE)
        for name in re.findall(r"(\w+) as \1", names)
    }

    def __getattr__(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = namespace[name] = getattr(importlib.import_module(where[name]), name)
        return found

    # Name completion and the reference pages use the directory.
    namespace.update(
        __all__=sorted(where), __getattr__=__getattr__, __dir__=lambda: sorted({*namespace, *where})
    )
    for name, module in where.items():
        if module == f"{package}.{name}":
            __getattr__(name)

"""The one idiom for optional packages: :func:`require` at the point of use."""

from __future__ import annotations

import importlib
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

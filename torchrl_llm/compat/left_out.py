"""TorchRL names without a counterpart here: they can be imported and raise an error at use.

A program that imports SGLang's classes but runs vLLM works unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from torchrl_llm.errors import ConfigError

_FILE = Path(__file__).with_suffix(".json")
_REASONS = {
    name: why
    for why, names in json.loads(_FILE.read_text(encoding="utf-8")).items()
    for name in names
}


class LeftOut(type):
    """Metaclass of names that TorchRL has and this package does not.

    Such a name may be imported and used in ``isinstance``; calls and attributes raise.

    Example:
        >>> from torchrl_llm.modules import SGLangWrapper
        >>> isinstance(3, SGLangWrapper)
        False
        >>> SGLangWrapper("a model")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        torchrl_llm.errors.ConfigError: SGLangWrapper is left out: SGLang is not offered: ...
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise with the reason why the class is left out.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{cls.__name__} is left out: {_REASONS[cls.__name__]}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(f"{cls.__name__} is left out: {_REASONS[cls.__name__]}")


globals().update({name: LeftOut(name, (), {"__module__": __name__}) for name in _REASONS})
__all__ = ["LeftOut", *_REASONS]

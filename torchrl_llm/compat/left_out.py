"""Names of TorchRL that have no counterpart here: they can be imported and say why at use.

A program that imports SGLang's classes and runs vLLM works unchanged.
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
    """Kind of a name that TorchRL has and this package has not.

    It may be imported and named in ``isinstance``; a call and an attribute raise.

    Example:
        >>> from torchrl_llm.modules import SGLangWrapper
        >>> isinstance(3, SGLangWrapper)
        False
        >>> SGLangWrapper("a model")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        torchrl_llm.errors.ConfigError: SGLangWrapper is left out: SGLang is not offered: ...
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Say why there is nothing to make.

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

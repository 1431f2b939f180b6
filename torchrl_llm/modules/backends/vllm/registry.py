"""Pickles of what lives in one process: found again there, refused elsewhere."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any

from torchrl_llm.errors import ConfigError

__all__ = ["share_within_process"]

_HERE: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def share_within_process(thing: Any, *_: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For use as ``__reduce__``: the unpickled thing is the same object.

    Args:
        thing: to be pickled; it must take weak references.
    """
    key = thing.__dict__.setdefault("_shared_key", secrets.token_hex(8))
    _HERE[key] = thing
    return _find, (key, os.getpid(), type(thing).__name__)


def _find(key: str, process: int, kind: str) -> Any:
    thing = _HERE.get(key)
    if thing is None or os.getpid() != process:
        raise ConfigError(
            f"a {kind} lives in the process that built it (pid {process}) and cannot be sent to "
            "another; share engines between processes with AsyncVLLM"
        )
    return thing

"""Warnings that are logged once per process."""

from __future__ import annotations

import threading

from torchrl._utils import logger

_lock = threading.Lock()
_told: set[str] = set()
_MOST_MESSAGES = 1000


def tell_once(message: str) -> None:
    """Log a warning, unless the same one was logged before.

    Args:
        message: the warning; the text decides, so a different row or number makes a different
            warning.

    Example:
        >>> tell_once("padding has no effect here")
        >>> tell_once("padding has no effect here")  # not said again
    """
    with _lock:
        if message in _told or len(_told) >= _MOST_MESSAGES:
            return
        _told.add(message)
    logger.warning(f"{message} (said once)")

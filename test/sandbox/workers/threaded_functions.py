"""A module that starts a thread when it is imported, which makes a fork of its process unsafe."""

from __future__ import annotations

import os
import threading

LOCK = threading.Lock()


def _hold():
    with LOCK:
        threading.Event().wait()


threading.Thread(target=_hold, daemon=True).start()


def parent_and_threads():
    """Parent of this process, and its threads."""
    return [os.getppid(), threading.active_count()]

"""Waiting for what another process or thread will do."""

from __future__ import annotations

import time


def wait_until(condition, seconds=60.0):
    """Return when a condition holds; a busy machine has a minute for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.005)

"""Processes of this machine, found by their command lines."""

import os
from pathlib import Path


def survivors(token):
    """Numbers and command lines of the other processes whose command line holds a token."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if token.encode() in line and int(name) != os.getpid():
            found.append((int(name), line))
    return found

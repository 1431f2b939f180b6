"""Which interpreter a sandbox runs, and the folders that it needs to see for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchrl_llm.errors import ResourceError

ROOT_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders of the system beside ``/usr``; links into it on most distributions."""

_SYSTEM = "/usr/bin/python3"


def own_python() -> str:
    """The interpreter that the trainer's environment was made from, or else that environment's."""
    base = getattr(sys, "_base_executable", None)
    return base if base and os.access(base, os.X_OK) else sys.executable


def candidates(python: str | None) -> list[tuple[str, tuple[str, ...]]]:
    """Interpreters to try, with the folders that each needs besides the system's.

    Args:
        python: the only one to try; ``None`` for the trainer's own, then the system's.

    Raises:
        ResourceError: ``python`` is no interpreter that runs here.
    """
    if python is not None:
        return [(python, _folders(python))]
    own = os.path.realpath(own_python())
    pythons = [(own, _outside_usr(sys.base_prefix, os.path.dirname(own)))]
    if own != os.path.realpath(_SYSTEM):
        pythons.append((_SYSTEM, ()))
    return pythons


def _folders(python: str) -> tuple[str, ...]:
    """The folders that an interpreter needs, by its own account.

    Raises:
        ResourceError: it is no interpreter that runs here.
    """
    ask = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"python={python!r} is no Python that runs here: {error}") from error
    places = [os.path.dirname(python), os.path.dirname(os.path.realpath(python))]
    return _outside_usr(*answer.stdout.split("\n")[:2], *places)


def _outside_usr(*folders: str) -> tuple[str, ...]:
    """Those that are not shown anyway, none inside another."""
    shown = [Path("/usr"), *map(Path, ROOT_FOLDERS)]
    kept: list[Path] = []
    for folder in sorted({Path(os.path.abspath(f)) for f in folders if f}):
        if not any(folder.is_relative_to(other) for other in (*shown, *kept)):
            kept.append(folder)
    return tuple(map(str, kept))

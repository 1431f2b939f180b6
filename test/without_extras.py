"""Programs that run as after ``pip install torchrl_llm``: no package of an extra can be imported.

What the base installation brings is read from ``pyproject.toml`` and the metadata of the installed
packages. Every other package is hidden, as if it were not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


class Without:
    """A finder of ``sys.meta_path`` that does not find some packages.

    Args:
        finder: finds all others.
        hidden: names of top-level packages.
    """

    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.hidden:
            return self.finder.find_spec(name, path, target)


def _plain_name(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _brought(dependencies):
    """Distributions that these need, and what those need in turn."""
    todo, found = [Requirement(text) for text in dependencies], set()
    while todo:
        needed = todo.pop()
        name = _plain_name(needed.name)
        if (name, *sorted(needed.extras)) in found:
            continue
        found.add((name, *sorted(needed.extras)))
        try:
            texts = requires(name) or []
        except PackageNotFoundError:
            continue
        for below in map(Requirement, texts):
            kinds = [{"extra": extra} for extra in ("", *needed.extras)]
            if below.marker is None or any(map(below.marker.evaluate, kinds)):
                todo.append(below)
    return {name for name, *_ in found}


def optional_packages(*also):
    """Import names of the installed packages that neither the base nor these requirements bring."""
    base = _brought([*PROJECT["dependencies"], *also]) | {"torchrl-llm", "pip", "setuptools"}
    packages = packages_distributions().items()
    return {name for name, found in packages if not base & set(map(_plain_name, found))}


def hide(packages):
    """Let this process find none of them from now on."""
    hidden = frozenset(packages)
    assert not hidden & set(sys.modules), f"imported already: {sorted(hidden & set(sys.modules))}"
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]


def run_hidden(code, folder=None, also=()):
    """Run a program from which these packages are hidden.

    Args:
        code: the program; it can import this file.
        folder: its working folder.
        also: requirements that are installed besides the base.

    Returns:
        The process that has ended, with what it printed.
    """
    hidden = (
        f"from without_extras import hide, optional_packages\nhide(optional_packages(*{also!r}))\n"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, "-c", hidden + code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )

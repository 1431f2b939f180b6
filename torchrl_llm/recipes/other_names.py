"""Keys of TorchRL's recipe, TRL, verl, prime-rl and OpenRLHF, and this package's keys for them.

An unknown key is first searched in these tables, and then by spelling. A name is rejected, never
accepted as an alias: no two keys mean the same.

The two tables are text files in this folder, one line per entry: the name, then our key. In
``other_names.txt`` "and" joins two keys; several lines for one name are for recipes with different
keys; "=" shows the value, and any other sentence is shown unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def _read(file: str) -> dict[str, str]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    lines = (line.split(maxsplit=1) for line in text.splitlines())
    return {name: ours for name, ours in lines if name != "#"}


RENAMED: Mapping[str, str] = _read("renamed_keys.txt")
"""Keys of TorchRL's recipe and former keys of this package: the new key, or an explanation."""

OTHER_NAMES: Mapping[str, str] = _read("other_names.txt")
"""Key of a different library, with as many groups as needed to be unique, to this package's key."""

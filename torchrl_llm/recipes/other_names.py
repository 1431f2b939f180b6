"""Names that users of TorchRL's recipe, TRL, verl, prime-rl and OpenRLHF type, and ours for them.

An unknown key is looked up here before anything is suggested by its spelling. A name is refused,
never accepted as an alias: no two keys mean the same.

The two tables are text files beside this one, a line each: the name, then our key. In
``other_names.txt`` two keys are joined by "and"; several lines of one name are those of recipes
with other keys; "=" shows the value, and any other sentence is said as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def _read(file: str) -> dict[str, str]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    lines = (line.split(maxsplit=1) for line in text.splitlines())
    return {name: ours for name, ours in lines if name != "#"}


RENAMED: Mapping[str, str] = _read("renamed_keys.txt")
"""Keys of TorchRL's recipe and former ones of this: the new key, or what became of it."""

OTHER_NAMES: Mapping[str, str] = _read("other_names.txt")
"""Name of another library's, with as many of its groups as it takes to be told apart, to ours."""

"""Names that users of TorchRL's recipe, TRL, verl, prime-rl and OpenRLHF type, and ours for them.

An unknown key is looked up here before anything is suggested by its spelling. A name is refused,
never accepted as an alias: no two keys mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def _read(name: str) -> dict[str, str]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line[:1] != "#")
    return dict(filter(None, lines))


RENAMED: Mapping[str, str] = _read("renamed_keys.txt")
"""Keys of TorchRL's recipe and former ones of this: the new key, or what became of it."""

OTHER_NAMES: Mapping[str, str] = _read("other_names.txt")
"""Name of another library's, with as many of its groups as it takes to be told apart, to ours."""

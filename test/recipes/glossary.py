"""The glossary of metrics, as the documentation shows it, and the columns that it does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "source" / "reference"
GROUPS = yaml.safe_load((FOLDER / "metrics.yaml").read_text(encoding="utf-8"))
METRICS = {name: told for group in GROUPS.values() for name, told in group.items()}
_PATTERNS = [re.sub("<.*?>", "[^/]+", name) for name in METRICS]


def unknown(columns: Iterable[str]) -> list[str]:
    """Columns without an entry, whatever stands for the variable part of a name."""
    return [name for name in columns if not any(re.fullmatch(p, name) for p in _PATTERNS)]

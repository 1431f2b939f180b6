"""Tables of cases that lie beside a test file: a YAML file of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def cases(file: str) -> dict[str, Any]:
    """The tables of a test file by name.

    Args:
        file: ``__file__`` of the test.
    """
    return yaml.safe_load(Path(file).with_suffix(".yaml").read_text(encoding="utf-8"))

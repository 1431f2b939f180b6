"""What the pages for users of TRL and verl name exists."""

import csv
import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "sota-implementations" / "grpo" / "config"
GROUPS = ("loss", "advantage", "env")


def _keys(node, prefix=""):
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _load(path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("page", ["coming_from_trl", "coming_from_verl"])
def test_every_key_that_a_page_names_is_one_of_the_recipes(page):
    files = CONFIG.parents[1].glob("*/config/*.yaml")
    keys = {key for path in files for key in _keys(_load(path) or {})}
    for group in ("loss", "advantage"):
        keys |= {f"{group}.{key}" for path in (CONFIG / group).iterdir() for key in _load(path)}
    text = (ROOT / "docs" / "source" / f"{page}.rst").read_text()
    rows = list(csv.reader(line.strip() for line in text.splitlines() if line.startswith('   "``')))
    rows += list(csv.reader(line.strip() for line in text.splitlines() if line.startswith("   ``")))
    named = [each for row in rows for each in re.findall("``([^`]+)``", row[1])]
    assert len(named) > 50
    for each in named:
        key, _, value = each.partition("=")
        if key in GROUPS and ":" in value:
            continue  # a class of the user's file
        if key in GROUPS and value:
            assert (CONFIG / key / f"{value}.yaml").is_file(), each
        else:
            assert key in keys, each
    for path in re.findall(r":(?:class|func):`~([\w.]+)`", text):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
    for command in re.findall(r"grpo-sync\.py ((?:[^\n]*\\\n)*[^\n]*)", text):
        named = [each.partition("=")[0] for each in command.replace("\\\n", " ").split()]
        assert not set(named) - keys - set(GROUPS)

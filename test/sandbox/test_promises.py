"""The page on what each sandbox promises names the programs that try it, all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sandbox import test_hostile_escapes, test_hostile_judge, test_hostile_resources

MODULES = (test_hostile_escapes, test_hostile_judge, test_hostile_resources)
PAGE = Path(__file__).parents[2] / "docs/source/howto/what_a_sandbox_promises.rst"


def variants(function):
    """How many programs a test runs in each sandbox."""
    number = 1
    for mark in getattr(function, "pytestmark", ()):
        number *= len(mark.args[1]) if mark.name == "parametrize" else 1
    return number


@pytest.mark.skipif(not PAGE.exists(), reason="needs the sources of the documentation")
def test_the_page_names_every_program_and_how_many_there_are():
    programs = {
        name.removeprefix("test_").replace("_", " "): variants(function)
        for module in MODULES
        for name, function in vars(module).items()
        if name.startswith("test_") and name != "test_a_program_ends_as_it_must"
    }
    for module in MODULES:
        programs |= dict.fromkeys(getattr(module, "PROGRAMS", ()), 1)
    text = PAGE.read_text()
    assert sorted(re.findall(r"^    - (.+)$", text, re.MULTILINE)) == sorted(programs)
    honest = sum(number for name, number in programs.items() if name.startswith("an honest"))
    told = re.search(r"(\d+) hostile programs\s+and (\d+) honest ones", text)
    assert [int(number) for number in told.groups()] == [sum(programs.values()) - honest, honest]

"""The reference: a page for each name, formulas without a network, keys found by other names."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("math_core")

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/source/reference"
PAGE = """
Small page
==========

A formula: :math:`-\\frac{1}{n} A \\log \\pi`.

.. csv-table::

   ``inference_model.vllm.gpu_memory_utilization``,share

.. autosummary::
   :toctree: reference/generated

   torchrl_llm.objectives.GRPOLoss

.. other-names::
"""


@pytest.fixture(scope="module")
def extensions():
    """The folder of the documentation's extensions can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


@pytest.fixture(scope="module")
def built(extensions, tmp_path_factory):
    """The folder of a small page that was built as the documentation is."""
    from sphinx.application import Sphinx

    folder = tmp_path_factory.mktemp("pages")
    (folder / "reference").mkdir()
    (folder / "_templates").symlink_to(ROOT / "docs/source/_templates")
    (folder / "index.rst").write_text(PAGE)
    (folder / "reference/objectives.rst").write_text(":orphan:\n\nObjectives\n==========\n")
    out = folder / "out"
    app = Sphinx(folder, ROOT / "docs/source", out, folder / "doctrees", "html", status=None)
    app.build()
    return out


def listed() -> list[str]:
    """Full names in the tables and the modules that a page describes with their members."""
    from sphinx.ext.autosummary.generate import find_autosummary_in_files

    pages = [REFERENCE.parent / "configuration.rst", *REFERENCE.glob("*.rst")]
    names = [entry.name for entry in find_autosummary_in_files([str(page) for page in pages])]
    for page in pages:
        names += re.findall(r"automodule:: (\S+)\n(?!   :no-members:)", page.read_text() + "\n")
    return names


def home(path: str) -> str:
    found = pkgutil.resolve_name(path)
    return path if inspect.ismodule(found) else f"{found.__module__}.{found.__qualname__}"


def test_each_public_class_and_function_has_exactly_one_page():
    homes = [home(name) for name in listed()]
    assert sorted(set(homes)) == sorted(homes)
    texts = "\n".join(page.read_text() for page in REFERENCE.glob("*.rst"))
    rooms = set(re.findall(r"automodule:: (\S+)\n   :no-members:", texts))
    assert {"torchrl_llm.data", "torchrl_llm.envs.games", "torchrl_llm.objectives"} <= rooms
    missing = []
    for room in sorted(rooms):
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            if not (inspect.isclass(found) or inspect.isfunction(found)):
                continue
            place = found.__module__
            if place.split(".")[:2] != room.split(".")[:2]:
                continue  # described in its own room
            if not {f"{place}.{found.__qualname__}", place} & set(homes):
                missing.append(f"{room}.{name}")
    assert not missing


def test_formulas_are_mathml_and_no_page_loads_anything_remote(built):
    from offline import remote_files

    page = (built / "index.html").read_text()
    assert "<mfrac><mn>1</mn><mi>n</mi></mfrac>" in page
    assert "mathjax" not in page.lower()
    assert not [
        file.name
        for kind in ("html", "css")
        for file in built.rglob(f"*.{kind}")
        if remote_files(file.read_text())
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<script src="https://cdn.org/mathjax.js"></script>', ["https://cdn.org/mathjax.js"]),
        ('<link rel="stylesheet" href="//fonts.org/a.css">', ["//fonts.org/a.css"]),
        ("@font-face { src: url(https://fonts.org/a.woff) }", ["https://fonts.org/a.woff"]),
        ('<a href="https://pytorch.org">', []),
        ('<link rel="stylesheet" href="_static/pages.css">', []),
    ],
)
def test_remote_files_are_found(extensions, text, expected):
    from offline import remote_files

    assert remote_files(text) == expected


def test_a_wrong_formula_is_an_error_with_its_place(extensions, caplog):
    from docutils import nodes
    from formulas import mathml

    with caplog.at_level("WARNING", logger="sphinx.formulas"):
        assert mathml(nodes.math("", r"\nonsense"), displaystyle=False) == ""
    assert "nonsense" in caplog.text


def test_a_name_of_a_table_has_a_page_outside_of_the_contents(built):
    page = (built / "reference/generated/torchrl_llm.objectives.GRPOLoss.html").read_text()
    assert 'id="torchrl_llm.objectives.GRPOLoss"' in page
    assert 'href="../objectives.html"' in page
    assert "toctree-l1" not in (built / "index.html").read_text()


def test_keys_may_break_after_dots_and_underscores(built):
    page = re.sub(r"</?span[^>]*>", "", (built / "index.html").read_text())
    expected = "inference_<wbr>model.<wbr>vllm.<wbr>gpu_<wbr>memory_<wbr>utilization"
    assert expected in re.sub(r"\s", "", page)


def test_a_search_for_a_name_of_another_library_finds_its_key(built):
    script = (built / "searchindex.js").read_text()
    entries = json.loads(script[script.index("(") + 1 : script.rindex(")")])["indexentries"]
    page = re.sub(r"<[^>]+>", "", (built / "index.html").read_text())
    for name, key in [
        ("num_generations", "env.repeats"),
        ("actor_rollout_ref.rollout.n", "env.repeats"),
        ("beta", "train.kl_to_ref_coeff"),
    ]:
        [[_, place, is_main]] = entries[name]
        assert is_main  # else it stands below all pages that have the word
        assert place == f"other-name-{name.removeprefix('actor_rollout_ref.').replace('.', '-')}"
        assert f'id="{place}"' in (built / "index.html").read_text()
        assert key in page

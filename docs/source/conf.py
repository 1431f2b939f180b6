"""Sphinx configuration; ``sphinx-build -W docs/source docs/build`` must print no warning."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # docs/metrics_glossary.py
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from docutils.parsers.rst.directives.tables import CSVTable
from sphinx.util.nodes import make_refnode

import torchrl_llm

project = "torchrl_llm"
author = "torchrl_llm developers"
copyright = "2026, torchrl_llm developers"
version = release = torchrl_llm.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "metrics_glossary",
]
autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
templates_path = ["_templates"]
html_theme = "furo"
html_static_path = ["_static"]
html_title = f"torchrl_llm {release}"
# Lines of 100 characters, as long as those of the code, fit without scrolling.
html_theme_options = {"light_css_variables": {"code-font-size": "0.73em"}}
suppress_warnings = ["ref.python"]
doctest_test_doctest_blocks = ""


_described: dict[str, str] = {}


def _skip_what_is_not_ours(app, what, name, obj, skip, options):
    """Leave out what tensorclasses and torchrl put on our classes, and second mentions."""
    target = getattr(obj, "fget", None) or getattr(obj, "__func__", obj)
    module = getattr(target, "__module__", None) or ""
    inside_class = what in ("class", "exception") and callable(target)
    if inside_class and not module.startswith("torchrl_llm"):
        return True
    if what == "module" and module.startswith("torchrl_llm"):
        # Rooms export names of their sub-rooms and of other rooms; each is described once: in its
        # own room, where it comes first.
        place = app.env.temp_data.get("autodoc:module")
        if _room(module) != _room(place):
            return True
        if _described.setdefault(f"{module}.{name}", place) != place:
            return True
    return skip


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _link_through_exports(app, env, node, contnode):
    """Link a name by any path that it can be imported by to where it is described."""
    path, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or not path.startswith("torchrl_llm"):
        return None
    try:
        target = getattr(import_module(path), name)
        home = f"{target.__module__}.{name}"
    except (ImportError, AttributeError):
        return None
    entry = env.get_domain("py").objects.get(f"{_described.get(home)}.{name}")
    if entry is None:
        return None
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)


class Differences(CSVTable):
    """A table of ``coming_from_torchrl/``: other results first, without what holds each row."""

    def parse_csv_data_into_rows(self, csv_data, dialect, source):
        rows, _ = super().parse_csv_data_into_rows(csv_data, dialect, source)
        order = ["other", "refused", "works", "", "missing"]
        rows.sort(key=lambda row: order.index(k) if (k := "".join(row[1][3])) in order else -1)
        return [row[:-1] for row in rows], 4


def setup(app):
    app.add_directive("differences", Differences)
    app.connect("autodoc-skip-member", _skip_what_is_not_ours)
    app.connect("missing-reference", _link_through_exports)

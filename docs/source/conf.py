"""Sphinx configuration; ``sphinx-build -W docs/source docs/build`` must print no warning."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
        # A room exports names of its sub-rooms; each is described once, where it comes first.
        place = app.env.temp_data.get("autodoc:module")
        if _described.setdefault(f"{module}.{name}", place) != place:
            return True
    return skip


def setup(app):
    app.connect("autodoc-skip-member", _skip_what_is_not_ours)

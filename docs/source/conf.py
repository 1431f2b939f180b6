"""Sphinx configuration; ``sphinx-build -W docs/source docs/build`` must print no warning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the extensions of ours
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from docutils.parsers.rst.directives.tables import CSVTable

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
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    "code_in_tables",
    "cross_references",
    "formulas",
    "metrics_glossary",
    "offline",
    "other_names",
    "reference_pages",
]
# A reference that finds nothing is a warning, so an error of the build. Of others only the names of
# these packages are written, which no inventory is fetched for.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|torchrl|tensordict|queue)\..*")]
autosummary_generate = True
autosummary_imported_members = False
# Where classes have their methods from one base: GRPO, SFT and DPO from Command.
autosummary_context = {"inherited": ["torchrl_llm.recipes.front"]}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
templates_path = ["_templates"]
html_theme = "furo"
html_static_path = ["_static"]
html_math_renderer = "mathml"
html_title = f"torchrl_llm {release}"
html_css_files = ["pages.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "1em"}}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
# The doctest builder needs no notebook; a page shows what its notebook printed in this build.
nb_execution_mode = "off" if "doctest" in sys.argv else "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True  # a run writes its folder there
nb_output_stderr = "remove"
nb_merge_streams = True
suppress_warnings = ["ref.python"]
doctest_test_doctest_blocks = ""


class Differences(CSVTable):
    """A table of ``coming_from_torchrl/``: other results first, without what holds each row."""

    def parse_csv_data_into_rows(self, csv_data, dialect, source):
        rows, _ = super().parse_csv_data_into_rows(csv_data, dialect, source)
        order = ["other", "refused", "works", "", "missing"]
        rows.sort(key=lambda row: order.index(k) if (k := "".join(row[1][3])) in order else -1)
        return [row[:-1] for row in rows], 4


def setup(app):
    app.add_directive("differences", Differences)

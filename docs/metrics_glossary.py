"""Sphinx extension: ``.. metrics:: GROUP`` shows a group of ``reference/metrics.yaml``.

Each metric is a term of a glossary, with a link of its own, so that the page can be read on a
narrow screen and ``:term:`` leads to a metric.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class Metrics(SphinxDirective):
    """The metrics of a group: what each is, its unit, what is normal, what to do otherwise."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        file = Path(self.env.srcdir) / "reference" / "metrics.yaml"
        self.env.note_dependency(str(file))
        self.env.note_dependency(__file__)
        metrics = yaml.safe_load(file.read_text(encoding="utf-8"))[self.arguments[0]]
        lines = [".. glossary::"]
        for name, told in metrics.items():
            lines += ["", f"   ``{name}``", f"      | {told['what']}"]
            for field in ("unit", "normal", "otherwise"):
                lines.append(f"      | **{field.capitalize()}:** {told[field]}")
        return self.parse_text_to_nodes(StringList(lines, source=str(file)))


def setup(app):
    app.add_directive("metrics", Metrics)
    return {"parallel_read_safe": True}

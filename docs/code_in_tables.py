"""Sphinx extension: a long name in a table may break after a dot, and before a capital."""

from __future__ import annotations

import re

from docutils import nodes

PARTS = re.compile(r"(?<=[._/,(=])(?=\w)|(?<=[a-z])(?=[A-Z])")


def allow_breaks(app, doctree, docname):
    if app.builder.format != "html":
        return
    for entry in doctree.findall(nodes.entry):
        for code in entry.findall(nodes.literal):
            first, *others = PARTS.split(code.astext())
            code.children = []
            code += nodes.Text(first)
            for part in others:
                code += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def setup(app):
    app.connect("doctree-resolved", allow_breaks)
    return {"parallel_read_safe": True}

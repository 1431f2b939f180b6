"""Sphinx extension: each name in a table has a page, which is not in the contents at the left."""

from __future__ import annotations

from pathlib import Path

from sphinx.ext.autosummary import autosummary_toc


def remove_old_pages(app):
    """Remove pages of names that no table lists any more."""
    for page in Path(app.srcdir).glob("reference/generated/*.rst"):
        if page.stem not in app.listed_names:
            page.unlink()


def leave_out_of_contents(app, doctree):
    """Remove the contents that a table adds, before Sphinx reads them."""
    for node in list(doctree.findall(autosummary_toc)):
        node.parent.remove(node)


def setup(app):
    app.setup_extension("cross_references")  # which lists the names first
    app.connect("builder-inited", remove_old_pages)
    app.connect("doctree-read", leave_out_of_contents, priority=100)
    return {"parallel_read_safe": True}

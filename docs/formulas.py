"""Sphinx extension: formulas become MathML, which browsers show without a script or a network."""

from __future__ import annotations

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
CONVERTER = LatexToMathML()


def mathml(node, displaystyle: bool) -> str:
    """Convert the formula of a node; warn where it is wrong, with its place."""
    try:
        return CONVERTER.convert_with_local_state(node.astext(), displaystyle=displaystyle)
    except LatexError as error:
        LOGGER.warning("%s", error, location=node)
        return ""


def show_inline(self, node):
    self.body.append(mathml(node, displaystyle=False))
    raise nodes.SkipNode


def show_block(self, node):
    self.body.append(f'<div class="math">{mathml(node, displaystyle=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (show_inline, None), (show_block, None))
    return {"parallel_read_safe": True}

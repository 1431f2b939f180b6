"""Sphinx extension: a page that loads anything from the network is a warning of the build."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
REMOTE = re.compile(
    r"""<(?:script|img|iframe|link\b[^>]*\brel="(?:stylesheet|preload|preconnect)")[^>]*"""
    r"""\b(?:src|href)="((?:https?:)?//[^"]+)|(?:@import\s+|url\()["']?((?:https?:)?//[^"')]+)"""
)


def remote_files(text: str) -> list[str]:
    """Addresses from which a page or a stylesheet loads a script, a style, a font or a picture."""
    return [html or css for html, css in REMOTE.findall(text)]


def check_pages(app, error):
    if error or app.builder.format != "html":
        return
    for suffix in ("html", "css"):
        for file in Path(app.outdir).rglob(f"*.{suffix}"):
            for address in remote_files(file.read_text(encoding="utf-8")):
                LOGGER.warning("%s loads %s", file.relative_to(app.outdir), address)


def setup(app):
    app.connect("build-finished", check_pages)
    return {"parallel_read_safe": True}

"""Sphinx extension: each name is described once, and a reference to it finds that place.

Rooms export names of their sub-rooms and of other rooms. A name in a table has a page of its own;
the page of a module describes the other names of the module. A reference may take any path by which
the name can be imported, and a docstring may use the bare names of its module. A reference in a
sentence that finds nothing is a warning, in a docstring as on a page; a type in a signature that no
page describes is only shown.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

from docutils import nodes
from sphinx.ext.autosummary.generate import find_autosummary_in_files
from sphinx.util.nodes import get_node_source, make_refnode

PACKAGE = "torchrl_llm"
_DOCSTRING_OF = re.compile(r"docstring of ([\w.]+)")


def list_names(app):
    """Find the names in tables, and the module in which each was written."""
    pages = [str(file) for file in Path(app.srcdir).rglob("*.rst")]
    names = {entry.name: _home(entry.name) for entry in find_autosummary_in_files(pages)}
    app.listed_names = {name: ".".join([home, *path]) for name, (home, path) in names.items()}


def list_places(app, env):
    """Remember the module under which each name is described."""
    env.torchrl_llm_described = {}
    for path, entry in env.get_domain("py").objects.items():
        home, names = _home(path)
        if len(names) == 1 and not entry.aliased:
            env.torchrl_llm_described[f"{home}.{names[0]}"] = path.rpartition(".")[0]


def skip_what_is_not_ours(app, what, name, obj, skip, options):
    """Leave out what tensorclasses and torchrl put on our classes, and second mentions."""
    target = getattr(obj, "fget", None) or getattr(obj, "__func__", obj)
    module = getattr(target, "__module__", None) or ""
    inside_class = what in ("class", "exception") and callable(target)
    if inside_class and not module.startswith(PACKAGE):
        return True
    if what == "module" and module.startswith(PACKAGE):
        place = app.env.temp_data.get("autodoc:module")
        if module != place or f"{module}.{name}" in app.listed_names.values():
            return True
    return skip


def link_through_exports(app, env, node, contnode):
    """Link a name to where it is described."""
    if node.get("refdomain") != "py" or not node.get("reftarget"):
        return None
    for path in _full_paths(node):
        entry = _entry(env, *_home(path))
        if entry is not None:
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)
    return None


def _full_paths(node) -> list[str]:
    """What a target may mean: itself, or a name of the module or the class that it stands in."""
    target = node["reftarget"]
    if target.startswith(PACKAGE):
        return [target]
    found = _DOCSTRING_OF.search(get_node_source(node) or "")
    place = found[1] if found else node.get("py:module") or ""
    paths = []
    while place.startswith(PACKAGE):
        paths.append(f"{place}.{target}")
        # What a class inherits may have been written in another module.
        bases = getattr(_object(place), "__mro__", ())
        paths += [f"{base.__module__}.{target}" for base in bases]
        place = place.rpartition(".")[0]
    return [path for path in paths if path.startswith(PACKAGE)]


def _object(path: str):
    """What has this dotted name, or ``None``."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def _home(path: str) -> tuple[str, list[str]]:
    """The module in which a dotted name was written, and its name there; empty if there is none."""
    found, (owner, _, name) = _object(path), path.rpartition(".")
    if found is None:
        return "", []
    if inspect.ismodule(found):
        return path, []
    ours = (getattr(found, "__module__", None) or "").startswith(PACKAGE)
    if ours and (inspect.isclass(found) or inspect.isfunction(found)):
        return found.__module__, found.__qualname__.split(".")
    home, names = _home(owner)
    return home, [*names, name]


def _entry(env, home: str, names: list[str]):
    """The place of a name, or of the class that has it, or of the first that a module has."""
    objects, described = env.get_domain("py").objects, env.torchrl_llm_described
    if home and not names:
        first = next((key for key in described if key.rpartition(".")[0] == home), None)
        exported = getattr(_object(home), "__all__", None)
        if first is None and exported:
            return _entry(env, *_home(f"{home}.{exported[0]}"))
        names = [first.rpartition(".")[2]] if first else []
    for end in range(len(names), 0, -1):
        place = described.get(f"{home}.{names[0]}")
        entry = objects.get(".".join([place or home, *names[:end]]))
        if entry is not None:
            return entry
    return None


def quiet_about_types(app, domain, node):
    """A type in a signature, a base class or a field of a docstring need not be a link."""
    generated = node.parent.astext().startswith(("Bases: ", "alias of "))
    written = isinstance(node[0], nodes.literal) and not generated
    return True if node.get("refdomain") == "py" and not written else None


def setup(app):
    app.connect("builder-inited", list_names)
    app.connect("env-updated", list_places)
    app.connect("autodoc-skip-member", skip_what_is_not_ours)
    app.connect("missing-reference", link_through_exports)
    app.connect("warn-missing-reference", quiet_about_types)
    return {"parallel_read_safe": False, "env_version": 2}

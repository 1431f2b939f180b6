"""Functions and rows from the user's Python program, under names for a configuration.

A configuration is plain text, which can be saved, compared and typed. An object that is passed to
:class:`~torchrl_llm.GRPO` gets an import path: its own if it has one, else a name in this module,
which only this process can import.
"""

from __future__ import annotations

import inspect
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import xxhash

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def path_of(thing: Any) -> str:
    """Return the import path of an object in this process.

    Args:
        thing: a text, which already is a path; a function or class; or any other object, which
            becomes a name in this module.

    Example:
        >>> path_of("rewards.py:exactly"), path_of(json.dumps)
        ('rewards.py:exactly', 'json:dumps')
        >>> path_of(lambda response, answer: 1.0)
        'torchrl_llm.recipes.given:function'
    """
    if isinstance(thing, str):
        return thing
    name, module = getattr(thing, "__qualname__", ""), sys.modules.get(_module_name(thing))
    if name and getattr(module, name, None) is thing:
        file = getattr(module, "__file__", None)
        if module.__name__ == "__main__" or file is None or file.startswith(_INSTALLED):
            return f"{module.__name__}:{name}"
        ours = (Path(__file__).parents[1], Path(file).resolve())
        return f"{module.__name__}:{name}" if ours[0] in ours[1].parents else f"{file}:{name}"
    return keep(thing, getattr(thing, "__name__", "object"))


def rows_path(rows: Any) -> str:
    """Return the import path of rows in this process; equal rows have the same path.

    Args:
        rows: a list of dicts, a ``datasets.Dataset``, or any other kind of rows.
    """
    known = getattr(rows, "_fingerprint", None)
    if known is None and not isinstance(rows, (list, tuple)):
        return keep(rows, "rows")  # this object may compute or read its rows
    if known is None:
        text = json.dumps(rows, default=str)
        known = xxhash.xxh64_hexdigest(text.encode())
    globals()[name := f"rows_{known}"] = rows
    return f"{__name__}:{name}"


def keep(thing: Any, name: str) -> str:
    """Store an object under a name in this module.

    Args:
        thing: the object.
        name: its name; a number is added if a different object has this name.

    Returns:
        Its path.
    """
    wanted = "".join(sign if sign.isidentifier() or sign.isdigit() else "_" for sign in name)
    wanted = {"_lambda_": "function"}.get(wanted, wanted)
    kept, number = wanted, 1
    while kept in globals() and globals()[kept] is not thing:
        number += 1
        kept = f"{wanted}_{number}"
    globals()[kept] = thing
    return f"{__name__}:{kept}"


def only_here(path: str) -> bool:
    """Whether only this process can import a path.

    Args:
        path: a path from :func:`path_of`.
    """
    return path.startswith((f"{__name__}:", "__main__:"))


def _module_name(thing: Any) -> str | None:
    is_named = inspect.isroutine(thing) or inspect.isclass(thing)
    return getattr(thing, "__module__", None) if is_named else None

"""Options of a command, declared as a group of settings: each field is an option with its help.

The metadata of a field's type determine its form. A :class:`Word` is an argument without dashes; a
text is the name of the value in the help; a tuple has all possible values. A bool is a flag; a list
is an option that may be repeated.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torchrl_llm._settings import Group, sentences

T = TypeVar("T", bound=Group)


class Word(NamedTuple):
    """An argument without dashes.

    Attributes:
        shown: its name in the help.
    """

    shown: str


def summary(file: Path) -> str:
    """The first line of a module's docstring, as plain text.

    Args:
        file: the module's.
    """
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "")


def listing(found: Mapping[str, str]) -> str:
    """A line for each name, with its description.

    Args:
        found: name to a line of text.
    """
    width = max(map(len, found), default=0)
    return "".join(f"  {name:{width}}  {line}\n" for name, line in found.items())


def make_parser(options: type[Group], name: str, **words: str) -> argparse.ArgumentParser:
    """Make the parser of a command: ``options(**vars(parser.parse_args(...)))`` are its settings.

    Args:
        options: class of the options; its docstring is the description.
        name: name of the command.
        **words: ``usage``, and values for the braces in the help.
    """
    usage = words.pop("usage", None)
    about = inspect.getdoc(options).partition("\n\nAttributes:")[0].format(**words)
    parser = argparse.ArgumentParser(prog=f"torchrl-llm {name}", usage=usage, description=about)
    said, hints = sentences(options), get_type_hints(options, include_extras=True)
    for entry in fields(options):
        text = said[entry.name].format(**words).replace("``", "").rstrip(".")
        parser.add_argument(
            *_flags(entry.name, hints[entry.name]), **_how(entry, hints[entry.name], text)
        )
    return parser


def parse(options: type[T], name: str, arguments: Sequence[str], **words: str) -> T:
    """Parse the arguments of a command.

    Args:
        options: as for :func:`make_parser`.
        name: as for :func:`make_parser`.
        arguments: arguments of the command line.
        **words: as for :func:`make_parser`.

    Raises:
        SystemExit: the arguments are invalid, or request help.
    """
    return options(**vars(make_parser(options, name, **words).parse_args(arguments)))


def _flags(name: str, hint: Any) -> list[str]:
    if any(isinstance(mark, Word) for mark in getattr(hint, "__metadata__", ())):
        return [name]
    return [*(["-o"] if name == "output" else []), f"--{name.replace('_', '-')}"]


def _how(entry: Any, hint: Any, text: str) -> dict[str, Any]:
    """Arguments of ``argparse`` for a field."""
    marks = getattr(hint, "__metadata__", ())
    hint = get_args(hint)[0] if marks else hint
    if hint is bool:
        return {"action": "store_true", "help": text}
    kind = next((each for each in get_args(hint) or [hint] if each is not type(None)), None)
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    told = f"{text}; default: {default}" if default not in (None, MISSING, []) else text
    how: dict[str, Any] = {"help": told, "type": kind}
    for mark in marks:
        how |= (
            {"choices": mark} if type(mark) is tuple else {"metavar": getattr(mark, "shown", mark)}
        )
    is_word, is_list = any(isinstance(mark, Word) for mark in marks), get_origin(hint) is list
    if is_list and not is_word:
        how["action"] = "append"
    elif is_word and (is_list or default is not MISSING):
        how["nargs"] = "?" if not is_list else "+" if default is MISSING else "*"
    return how if default is MISSING else how | {"default": default}

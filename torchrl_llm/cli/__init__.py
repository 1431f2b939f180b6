"""Command line ``torchrl-llm``, also ``python -m torchrl_llm``: trains, evaluates, lists.

Each command is a module of this package. It has a summary (the first line of its docstring) and
``main(arguments)``; it is imported only when it is called, so that ``--help`` is fast.

Next: ``torchrl_llm.recipes.launch`` starts a recipe's page.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrl_llm._registry import did_you_mean
from torchrl_llm.cli._options import listing, summary
from torchrl_llm.recipes.launch import tells_errors

_WRONG_USE = 2
_INTERRUPTED = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: arguments of the command line; by default the arguments of this process.

    Returns:
        The exit status.
    """
    # No builtin `list` here: after its import, the module `list` of this package has that name.
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    known = commands()
    if name in ("-h", "--help"):
        usage = "usage: torchrl-llm COMMAND [...]"
        more = "torchrl-llm COMMAND --help tells more of each."
        sys.stdout.write(f"{usage}\n\n{listing(known)}\n{more}\n")
        return 0
    if name not in known:
        hint = did_you_mean(name, known) or "."
        sys.stderr.write(
            f"torchrl-llm has no command {name!r}{hint} There are {', '.join(known)}\n"
        )
        return _WRONG_USE
    try:
        command = importlib.import_module(f"torchrl_llm.cli.{name}")
        status = tells_errors(command.main)(rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        status = _INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    return status or 0


def commands() -> dict[str, str]:
    """Each command with its summary."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    return {file.stem: summary(file) for file in files}

"""Runs every program of ``programs/`` in this process, by one import root, and says what came out.

``python run_programs.py torchrl out.json`` runs the programs as they are written, with
``torchrl.*.llm``; ``python run_programs.py torchrl_llm out.json`` runs the same text after "paths
lose ``.llm``". A program is a public function without arguments, or an entry of ``PROGRAMS``, whose
name says what it shows; what it prints is its result. The signatures and attributes of the public
classes are written, too.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import logging
import os
import re
import signal
import sys
import textwrap
import time
import traceback
import types
import warnings
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 30.0  # far above what any takes: a busy machine must not change a result
sys.path[:0] = [str(HERE), str(HERE / "programs")]


def after_the_rename(source: str) -> str:
    """The text with ``torchrl.<room>.llm`` written as ``torchrl_llm.<room>``."""
    return re.sub(r"\btorchrl\.(\w+)\.llm\b", r"torchrl_llm.\1", source)


def programs(root: str):
    """Yield (name, function) of every program, compiled for ``root``."""
    for path in sorted((HERE / "programs").glob("[a-z]*.py")):
        source = path.read_text()
        if root == "torchrl_llm":
            source = after_the_rename(source)
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[path.stem] = module
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        for name, function in list(vars(module).items()):  # a warning adds a name
            ours = inspect.isfunction(function) and function.__module__ == path.stem
            # a helper of a file takes arguments or returns something
            if ours and not function.__code__.co_argcount and not _returns(function):
                yield f"{path.stem}.{name}", function
        for name, program in vars(module).get("PROGRAMS", {}).items():
            yield f"{path.stem}.{name}", program


def _returns(function) -> bool:
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    return any(isinstance(node, ast.Return) for node in body)


@contextlib.contextmanager
def watched(limit_s: float):
    """Give what is printed inside, without warnings and standard error; too long is an error."""

    def too_long(*_):
        raise TimeoutError(f"more than {limit_s} s")

    printed = io.StringIO()
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield printed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(function) -> dict:
    """What a program printed, and the error that ended it, if one did."""
    import torch

    torch.manual_seed(0)
    error, frames = None, []
    begun = time.perf_counter()
    try:
        with watched(LIMIT_S) as printed:
            function()
    except Exception as caught:  # that a program fails is a result
        error = f"{type(caught).__name__}: {caught}"
        frames = [frame.filename for frame in traceback.extract_tb(caught.__traceback__)]
    return {
        "printed": printed.getvalue(),
        "error": error,
        "raised_in": frames[-1] if frames else None,
        "seconds": round(time.perf_counter() - begun, 3),
    }


def main(root: str, out: str) -> None:
    """Run everything and write the results as JSON."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from describe_api import describe, rooms
    from tensordict import set_list_to_stack

    torch.set_num_threads(1)
    set_list_to_stack(True).set()
    logging.disable(logging.WARNING)
    try:
        list(rooms(root))
    except ImportError as error:
        if root == "torchrl_llm":
            raise
        Path(out).write_text(json.dumps({"absent": str(error)}))
        return
    results = {name: run(function) for name, function in programs(root)}
    Path(out).write_text(json.dumps({"programs": results, "api": describe(root)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

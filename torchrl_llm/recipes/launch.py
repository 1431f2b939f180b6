"""Start of a recipe's page: check keys and answer ``--help`` before imports that take seconds.

A page calls :func:`begin` above its imports and puts :func:`tells_errors` around its main function.
:func:`load_page` imports a page, wherever the package is installed, for programs that run it.

Next: :mod:`torchrl_llm.recipes.command_keys` checks the keys.
"""

from __future__ import annotations

import argparse
import ast
import errno
import functools
import importlib.util
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from torchrl_llm._masking import masked
from torchrl_llm._parent import end_with_parent
from torchrl_llm._run_log import (
    RunLog,
    display_path,
    say,
    show_traceback,
    show_warning,
    shown,
    shows_record,
    terminal,
)
from torchrl_llm._settings import dotted
from torchrl_llm.errors import ConfigError, TorchRLLLMError
from torchrl_llm.recipes.command_keys import KeyTable, check_overrides, quoted
from torchrl_llm.recipes.introduction import PROGRESS, introduction

PAGES = Path(__file__).parents[1] / "sota"
"""Folder of the recipes: ``sota-implementations``, which is part of the installed package."""

TRACEBACK_VARIABLE = "TORCHRL_LLM_TRACEBACK"
"""Environment variable: ``1`` shows the traceback of this package's errors."""

_FAILED = 1
_SWEEP = ("-m", "--multirun")
# The first line: it is already printed, and run.log gets it when it is open.
_first_line: list[str] = []
# Number of bytes that Hydra and the first step write; errors of a full or read-only disk.
_FIRST_BYTES = 64 << 10
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}

# Streams of loggers that print to standard output by default.
_TO_STDERR = {"TORCHRL_CONSOLE_STREAM": "stderr", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def begin(
    page: str,
    name: str,
    *,
    open_keys: Iterable[str] = (),
    siblings: Mapping[str, str] | None = None,
    check: Callable[[list[str]], None] | None = None,
) -> None:
    """Answer ``--help`` and reject unknown keys; both end the process.

    Args:
        page: ``__file__`` of the page, next to the folder ``config``.
        name: name of the file in it that composes the others.
        open_keys: as for :meth:`~torchrl_llm.recipes.command_keys.KeyTable.read`.
        siblings: other files of the folder that compose recipes, with the page of each: an error
            for one of their keys names that page.
        check: called with the arguments first; it may reject them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    _loggers_to_stderr()
    arguments = sys.argv[1:]
    folder = Path(page).parent / "config"
    if {"--help", "-h"} & set(arguments):
        show_help(Path(page), name)
        raise SystemExit(0)

    @tells_errors
    def checked() -> list[str]:
        if check is not None:
            check(arguments)
        found = check_arguments(arguments, folder, name, open_keys=open_keys, siblings=siblings)
        return _introduced(Path(page), name, [*found, *_of_other_ranks(arguments)])

    sys.argv[1:] = checked()


def _introduced(page: Path, name: str, arguments: list[str]) -> list[str]:
    """Print the first line, unless a flag of Hydra changes the composition.

    Returns:
        The arguments, with the folder that the line names; Hydra's folder would have a later time.
    """
    from omegaconf.errors import OmegaConfBaseException

    overrides = [each for each in arguments if each not in _SWEEP]
    is_sweep = overrides != arguments
    if not _is_main() or any(each.startswith(("-", "hydra.mode=")) for each in overrides):
        return arguments
    own = [each for each in overrides if each.startswith("hydra") or not is_sweep]
    config = compose_files(page.parent / "config", name, own, page=page.stem)
    key = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    try:
        folder = str((config.hydra.sweep if is_sweep else config.hydra.run).dir)
    except OmegaConfBaseException:  # it depends on values that only Hydra has
        return arguments
    settings = _flat(config)
    if is_sweep and f"{PROGRESS}=false" not in overrides:
        over = " ".join(masked(each) for each in overrides if not each.startswith("hydra"))
        say(f"{name}: sweep over {over}, folder {display_path(folder)}")
    elif not is_sweep and settings.get(PROGRESS, True):
        _first_line.append(introduction(name, settings, folder))
        say(_first_line[0])
    return [*(a for a in arguments if not a.startswith(f"{key}=")), f"{key}={quoted(folder)}"]


def _introduce(config: Any) -> None:
    """Print the first line of a run started by Hydra, or log the line that was printed before."""
    hydra, settings = _hydra(), _flat(config)
    if hydra.mode is not None and hydra.mode.name == "MULTIRUN":  # the command of only this job
        sys.argv[1:] = hydra.overrides.task
    if _first_line:
        terminal.log_only(_first_line.pop())
    elif _is_main() and settings.get(PROGRESS, True):
        say(introduction(hydra.job.config_name, settings, hydra.runtime.output_dir))


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _flat(config: Any) -> dict[str, Any]:
    """Hydra's composed configuration as dotted key to value."""
    from omegaconf import OmegaConf

    return dotted(OmegaConf.to_container(config, resolve=False))


def _of_other_ranks(arguments: Iterable[str]) -> list[str]:
    """Arguments that keep Hydra from making a folder for each process started by torchrun."""
    if _is_main():
        return []
    given = any(argument.startswith("hydra.run.dir=") for argument in arguments)
    return ["hydra.output_subdir=null", *(() if given else ("hydra.run.dir=.",))]


def _loggers_to_stderr() -> None:
    """Redirect loggers, because standard output is for results."""
    for name, value in _TO_STDERR.items():
        os.environ.setdefault(name, value)
    handler = logging.StreamHandler()
    handler.addFilter(shows_record)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    if not sys.warnoptions:
        warnings.showwarning = show_warning


def check_arguments(
    arguments: list[str],
    folder: Path,
    name: str,
    *,
    open_keys: Iterable[str] = (),
    siblings: Mapping[str, str] | None = None,
) -> list[str]:
    """Reject unknown keys and group values among overrides.

    Args:
        arguments: arguments of the command line.
        folder: the recipe's ``config``.
        name: as for :func:`begin`.
        open_keys: as for :func:`begin`.
        siblings: as for :func:`begin`.

    Returns:
        The arguments for Hydra.

    Raises:
        ConfigError: as :func:`~torchrl_llm.recipes.command_keys.check_overrides`.
    """
    more, listed = _further_folders(arguments)
    table = KeyTable.read(folder, name, more=more, open_keys=open_keys)
    table.open_options = not listed
    elsewhere = {
        key: f"a key of {whose}"
        for other, whose in (siblings or {}).items()
        for key in KeyTable.read(folder, other).keys
    }
    checked = check_overrides(arguments, table, elsewhere=elsewhere)
    _check_syntax(checked)
    return checked


def compose_files(
    folder: Path, name: str, overrides: Iterable[str], *, page: str | None = None
) -> Any:
    """Compose a recipe's files with these overrides, like Hydra.

    Hydra's global state is restored, so a program that uses Hydra itself is not affected.

    Args:
        folder: the recipe's ``config``.
        name: as for :func:`begin`.
        overrides: overrides of Hydra.
        page: name of the recipe's page, to include Hydra's own settings, under ``hydra``.

    Returns:
        An ``omegaconf.DictConfig``.

    Raises:
        ConfigError: Hydra rejects an override.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        where = {"version_base": "1.3", "job_name": page or "app"}
        with initialize_config_dir(str(folder.resolve()), **where):
            return compose(name, list(overrides), return_hydra_config=page is not None)
    except HydraException as error:
        raise ConfigError(str(error)) from error
    finally:
        GlobalHydra.instance().hydra = before


def _check_syntax(arguments: Iterable[str]) -> None:
    """Reject overrides that Hydra cannot read, and several values without a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    arguments = list(arguments)
    sweeps = bool({*_SWEEP} & {*arguments})
    if not any(each.startswith(("-", "hydra.run.dir=")) for each in arguments):
        check_folder(Path("outputs"), "hydra.run.dir")
    parser = OverridesParser.create()
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if argument.startswith("-") or not separator:
            continue
        if key == "hydra.run.dir":
            check_folder(Path(value.strip("'\"")), key)
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"{argument!r} cannot be read ({why}); a text with signs is quoted: \"{key}='...'\""
            ) from error
        if override.is_sweep_override() and not sweeps:
            raise ConfigError(
                f"{argument!r} has several values: a list is written '{key}=[{value}]', and a "
                "sweep over them needs the flag -m"
            )


def check_folder(folder: Path, key: str) -> None:
    """Reject a folder of a run that cannot be made.

    Args:
        folder: folder of the run.
        key: key or argument that set it.

    Raises:
        ConfigError: it is a file, or it is not writable.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    why = None if there.is_dir() else f"{there} is no folder"
    if why is None:
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(_FIRST_BYTES))
        except OSError as error:
            why = f"nothing can be written there ({error.strerror})"
    if why is not None:
        raise ConfigError(f"{key}={folder} cannot be the folder of a run: {why}")


def _further_folders(arguments: Iterable[str]) -> tuple[list[Path], bool]:
    """Folders of settings that the command line adds, and whether this list is complete."""
    found, listed, last = [], True, ""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "hydra.searchpath":
            for each in value.strip("[]'\" ").split(","):
                kind, _, path = each.strip("'\" ").rpartition("://")
                listed &= kind in ("", "file")
                found.append(Path(path))
        elif key in ("--config-dir", "-cd") and value:
            found.append(Path(value))
        elif last in ("--config-dir", "-cd"):
            found.append(Path(argument))
        last = argument
    return found, listed


def show_help(page: Path, name: str) -> None:
    """Print the description of a recipe, its command, and all of its keys with their meaning.

    Args:
        page: file of the page.
        name: as for :func:`begin`.
    """
    folder = page.parent / "config"
    table = KeyTable.read(folder, name)
    about = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or ""
    shown = [about.replace("``", ""), ""]
    shown += [f"{group}=NAME, one of: {', '.join(each)}" for group, each in table.groups.items()]
    if table.groups:
        shown.append("The files are in " + ", ".join(str(folder / g) for g in table.groups))
    files = [f"{name}.yaml", *(f"{e}.yaml" for e in ("common",) if (folder / f"{e}.yaml").exists())]
    for file in reversed(files):
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
        shown += ["", *_without_hydra(lines)]
    for group, option in table.defaults.items():
        lines = (folder / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
        shown += ["", f"# {group}={option}", *_without_hydra(lines)]
    shown += [
        "",
        "Flags of Hydra: -m (sweep over a=1,2), --cfg job (show the settings), -cd FOLDER.",
    ]
    sys.stdout.write("\n".join(shown) + "\n")


def _without_hydra(lines: Iterable[str]) -> list[str]:
    """The lines of a file with keys of the recipe and their comments."""
    kept, ours = [], True
    for line in lines:
        if line and not line.startswith((" ", "#")):
            ours = line.partition(":")[0] not in ("hydra", "defaults")
        if ours and "@package" not in line and not line.startswith("# Written by"):
            kept.append(line)
    return kept


def tells_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show errors that this package raises on purpose as a message without a traceback.

    The process ends with exit code 1, even if user code would end it with 0. With
    ``TORCHRL_LLM_TRACEBACK=1`` the error is raised unchanged. Unexpected errors keep their
    traceback. If Hydra has made a folder for the run, its ``run.log`` contains the full error and
    the output of the terminal until then.

    Args:
        function: main function of a command.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = show_traceback
        with _run_log():
            try:
                if args and isinstance(args[0], Mapping) and _hydra() is not None:
                    _introduce(args[0])
                result = function(*args, **kwargs)
                _end_ranks()
                return result
            except Exception as error:
                if os.environ.get(TRACEBACK_VARIABLE) == "1":
                    raise
                words, is_foreseen = _last_words(error)
                if not is_foreseen and _hydra() is None:
                    raise
                if not is_foreseen:  # Hydra would also print the whole command
                    words = "".join(traceback.format_exception(error)).rstrip()
                if words is not None:
                    sys.stdout.flush()
                    sys.stderr.write(f"{shown(words)}\n")
                raise SystemExit(_FAILED) from None
            except SystemExit as ended:
                *_, (last, _) = traceback.walk_tb(ended.__traceback__)
                if last.f_code.co_filename.startswith((str(PAGES.parent), argparse.__file__)):
                    _end_ranks(is_last_word=True)
                    raise  # after --help, or a run stopped by a signal
                from torchrl_llm.data.failures import place_of

                sys.stdout.flush()
                told = shown(f"SystemExit: {ended.code} at {place_of(ended)}")
                sys.stderr.write(f"{told}: it ended the program before its end\n")
                raise SystemExit(ended.code or _FAILED) from None

    return call


def _last_words(error: Exception) -> tuple[str | None, bool]:
    """The message of an error (``None`` if another rank prints it); whether it is complete."""
    is_full = isinstance(error, OSError) and error.errno in _NO_ROOM
    is_ours = isinstance(error, TorchRLLLMError) or is_full
    if os.environ.get("WORLD_SIZE", "1") == "1":
        advice = ". What is written so far stays; make room there, or choose another folder "
        advice = f"{advice}(hydra.run.dir)" if is_full else ""
        return f"{type(error).__name__}: {error}{advice}", is_ours
    from torchrl_llm.trainers.ranks import last_words, speaks_of_others

    words = last_words(error)
    return words, is_ours or words is None or speaks_of_others(error)


def _end_ranks(*, is_last_word: bool = False) -> None:
    """Leave the other ranks; does not repeat their error if this rank has printed why it ends."""
    if "torchrl_llm.trainers.ranks" in sys.modules:
        from torchrl_llm.trainers.ranks import end_ranks, speaks_of_others

        try:
            end_ranks()
        except Exception as error:
            if not (is_last_word and speaks_of_others(error)):
                raise


def _run_log() -> AbstractContextManager[Any]:
    """The log in the folder that Hydra has made, unless Hydra is set to write nothing there."""
    config = _hydra()
    if config is None:
        return nullcontext()
    _mask_saved(config)
    return nullcontext() if config.output_subdir is None else RunLog.of(config.runtime.output_dir)


def _hydra() -> Any:
    """Hydra's configuration of the run that it has started; ``None`` without Hydra."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    started = hydra is not None and hydra.HydraConfig.initialized()
    return hydra.HydraConfig.get() if started else None


def _mask_saved(config: Any) -> None:
    """Remove passwords from the overrides that Hydra has already written."""
    folder = Path(config.runtime.output_dir, config.output_subdir or "")
    for file in (*folder.glob("*.yaml"), Path(config.sweep.dir or "", "multirun.yaml")):
        with suppress(OSError, yaml.YAMLError):
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
            if config.output_subdir is not None and masked(values) != values:
                text = yaml.safe_dump(masked(values), sort_keys=False, allow_unicode=True)
                file.write_text(text, encoding="utf-8")


def load_page(path: str) -> ModuleType:
    """Import a recipe's page, and make the modules in its folder importable.

    Args:
        path: below ``sota-implementations``, as ``"grpo/grpo-sync.py"``.

    Raises:
        ConfigError: this installation lacks the page.
    """
    file = PAGES / path
    name = f"torchrl_llm_page_{file.stem.replace('-', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError(f"this installation has no recipe {path}: {PAGES} lacks it")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

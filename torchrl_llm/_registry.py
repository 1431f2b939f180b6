"""Registry of everything that a recipe can select by name, grouped by kind.

A class (or a function that creates an instance) is registered in its own file::

    @register("losses", "my_loss")
    class MyLoss(PolicyGradientLoss): ...

Other packages register by an entry point of the group ``torchrl_llm.<kind>``. Unregistered objects
are found by path: ``"module:name"``, or ``"path/to/file.py:name"``.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from torchrl_llm.errors import ConfigError

# If a module defines more names than this, an error does not list them.
_MOST_SHOWN = 12

KINDS: dict[str, tuple[str, ...]] = {
    "losses": ("torchrl_llm.objectives",),
    "preference_losses": ("torchrl_llm.objectives",),
    "advantages": ("torchrl_llm.objectives.credit",),
    "tasks": ("torchrl_llm.envs.datasets", "torchrl_llm.envs.games"),
    "rewards": ("torchrl_llm.rewards",),
    "tools": ("torchrl_llm.tools",),
    "agents": ("torchrl_llm.agents",),
    "loggers": ("torchrl_llm.trainers",),
    "weights": ("torchrl_llm.weights",),
    "backends": ("torchrl_llm.modules.backends",),
    "environments": ("torchrl_llm.langmarl",),
    "figures": ("torchrl_llm.evaluation",),
}
"""Each kind, and the packages whose files register it."""

T = TypeVar("T")
# Names that may be imported, the origin of all others, and the rejected names; None for no limit.
_closed: tuple[frozenset[str | None], str, list[str]] | None = None
_entries: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Register a class or function under a name.

    Args:
        kind: one of :data:`KINDS`.
        name: what a recipe calls it.

    Returns:
        A decorator that returns its argument unchanged.

    Raises:
        ConfigError: the kind is unknown, or the name is already used.

    Example:
        >>> @register("losses", "nothing_example")
        ... class Nothing:
        ...     '''A loss that is always zero.'''
        >>> find("losses", "nothing_example").__name__
        'Nothing'
        >>> del _entries["losses"]["nothing_example"]
    """
    _check_kind(kind)

    def enter(target: T) -> T:
        known = _entries[kind].setdefault(name, target)
        same = known is target or (
            getattr(known, "__qualname__", known) == getattr(target, "__qualname__", target)
            and getattr(known, "__module__", None) == getattr(target, "__module__", None)
        )
        if not same:
            raise ConfigError(f"there is {name!r} among the {kind} already: {known!r}")
        _entries[kind][name] = target  # the newer one, if a module was reloaded
        return target

    return enter


def names(kind: str) -> list[str]:
    """All names of a kind, sorted, including those of other packages.

    Args:
        kind: one of :data:`KINDS`.

    Raises:
        ConfigError: an unknown kind.

    Example:
        >>> "grpo" in names("losses")
        True
    """
    _load(kind)
    return sorted({*_entries[kind], *_installed(kind)})


def find(kind: str, name: str) -> Any:
    """Find the object with a name.

    Args:
        kind: one of :data:`KINDS`.
        name: a registered name, or a path as in :func:`import_named`.

    Raises:
        ConfigError: the name is unknown, or the object cannot be imported.

    Example:
        >>> find("advantages", "group").__name__
        'MCAdvantage'
        >>> find("losses", "grop")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: 'grop' is not among the losses; did you mean 'grpo'? ...
    """
    _check_kind(kind)
    if not isinstance(name, str):
        raise ConfigError(f"a name among the {kind} is a text, got {name!r}")
    if ":" in name:
        return import_named(name)
    if name not in _entries[kind]:
        _load(kind)
    if name in _entries[kind]:
        return _entries[kind][name]
    if (entry := _installed(kind).get(name)) is not None:
        try:
            return _entries[kind].setdefault(name, entry.load())
        except (Exception, SystemExit) as error:  # other packages may raise anything
            raise ConfigError(
                f"{name!r} of {entry.value} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    hint = did_you_mean(name, names(kind)) or "."
    if name.endswith(".py"):
        hint = f": name what is in the file, {name}:NAME."
    raise ConfigError(
        f"{name!r} is not among the {kind}{hint} There are {', '.join(names(kind))}, or give "
        "'module:name' of your own"
    )


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """End of an error message for an unknown name: suggests the nearest known name.

    Args:
        name: the unknown name.
        known: the known names.

    Returns:
        Empty if no name is near.

    Example:
        >>> did_you_mean("langage", ["language", "pistonball"]), did_you_mean("x", ["language"])
        ("; did you mean 'language'?", '')
    """
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def summaries(kind: str) -> dict[str, str]:
    """First docstring line of each name of a kind.

    Args:
        kind: one of :data:`KINDS`.

    Example:
        >>> summaries("tools")["calculator"]
        'Computes an expression of whole numbers, + - * / and parentheses.'
    """
    _check_kind(kind)
    found = _docstrings(kind)
    for name in {*_entries[kind], *_installed(kind)} - set(found):
        try:
            found[name] = inspect.getdoc(find(kind, name)) or ""
        except ConfigError as error:
            found[name] = str(error)
    return {name: _plain(found[name].partition("\n")[0]) for name in sorted(found)}


def _docstrings(kind: str) -> dict[str, str]:
    """Docstrings of the objects that our files register, read without slow imports."""
    found = {}
    for room in KINDS[kind]:
        for file in Path(__file__).parent.joinpath(*room.split(".")[1:]).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for node in ast.parse(text).body if "@register(" in text else ():
                for call in getattr(node, "decorator_list", ()):
                    match call:
                        case ast.Call(
                            func=ast.Name("register"),
                            args=[ast.Constant(value), ast.Constant(name)],
                        ) if value == kind:
                            found[name] = ast.get_docstring(node) or ""
    return found


def _plain(line: str) -> str:
    """A line of reStructuredText as plain text for a terminal."""
    line = re.sub(r":math:`([^`]*)`", lambda found: _plain_formula(found[1]), line)
    line = re.sub(r":\w+:`~?(?:[\w.]*\.)?([^`]*)`", r"\1", line)
    return line.replace("``", "")


def _plain_formula(formula: str) -> str:
    formula = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/(\2)", formula)
    return re.sub(r"\\mathrm|\\,|[\\{}]", "", formula)


def constructor_arguments(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Named arguments of a constructor, with their type hints resolved.

    If a class passes ``**kwargs`` to its base class, the arguments of the base class are included.

    Args:
        target: a class, or a function that creates an instance.

    Returns:
        Name to parameter, without ``self``; ``annotation`` is a type, not a string.
    """
    layers = target.__mro__ if inspect.isclass(target) else (target,)
    found: dict[str, inspect.Parameter] = {}
    for layer in layers:
        function = vars(layer).get("__init__") if inspect.isclass(layer) else layer
        if function is None:
            continue
        # Type hints of dataclass fields are resolved in the module that defines each field.
        hints = get_type_hints(layer if is_dataclass(layer) else function)
        parameters = list(inspect.signature(function).parameters.values())
        for parameter in parameters[1:] if inspect.isclass(layer) else parameters:
            hint = hints.get(parameter.name, Any)
            found.setdefault(parameter.name, parameter.replace(annotation=hint))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    kinds = inspect.Parameter
    nameless = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY)
    return {name: p for name, p in found.items() if p.kind not in nameless}


class FullSignature:
    """Signature of a class, including the arguments that ``**kwargs`` passes to its base classes.

    ``inspect.signature``, ``help`` and the reference pages read it from ``__signature__``.

    Args:
        of: the class that receives the arguments, if it is not a base class.

    Example:
        >>> class Shape:
        ...     __signature__ = FullSignature()
        ...     def __init__(self, *, colour: str = "red") -> None: ...
        >>> class Disc(Shape):
        ...     def __init__(self, radius: float, **options: Any) -> None: ...
        >>> list(inspect.signature(Disc).parameters)
        ['radius', 'colour']
    """

    def __init__(self, of: type | None = None) -> None:
        self.of = of

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        """The signature of the class; not available on instances."""
        if instance is not None:
            raise AttributeError("__signature__ belongs to the class")
        found = constructor_arguments(owner if self.of is None else owner.__init__)
        found.pop("self", None)
        if self.of is not None:
            handed = constructor_arguments(self.of).items()
            found |= {
                name: p for name, p in handed if name not in found and p.default is not p.empty
            }
        return inspect.Signature(sorted(found.values(), key=lambda p: p.kind))


def import_named(path: str) -> Any:
    """Import the object at a path given by the user.

    Args:
        path: ``"package.module:name"``, ``"package.module.name"``, or ``"path/to/file.py:name"``. A
            file is imported as a module that other processes can also import by name.

    Raises:
        ConfigError: the path is not a string, the file, module or name does not exist, or the
            module raises.

    Example:
        >>> import_named("fractions:Fraction").__name__
        'Fraction'
    """
    if not isinstance(path, str) or not path.strip(":. "):
        raise ConfigError(f"{path!r} names nothing to import; write 'module:name'")
    refuse_foreign(path)
    where, separator, name = path.rpartition(":" if ":" in path else ".")
    if not separator or not where or not name:
        raise ConfigError(f"{path!r} names no module: write 'module:name' or 'file.py:name'")
    try:
        module = _module_of(Path(where)) if is_file(path) else import_module(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise any exception
        last = traceback.extract_tb(error.__traceback__)[-1]
        hint = f" ({last.filename}, line {last.lineno})"
        if isinstance(error, ImportError):
            hint = "; a module is found in the working folder and in the folders of PYTHONPATH"
        elif isinstance(error, SyntaxError):  # its message includes the location
            hint = ""
        raise ConfigError(
            f"{path!r} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"{path!r}: there is no {name!r} in {module.__name__}{_suggestion(module, name)}"
        )
    return getattr(module, name)


@contextmanager
def importing_only(typed: Iterable[str], *, whose: str) -> Iterator[list[str]]:
    """Allow, in all threads, only imports that the user typed: foreign files run no code.

    Requests to servers named in such files are not allowed either, since they would reveal keys and
    data of this machine.

    Args:
        typed: words of a command, including ``key=value``.
        whose: origin of all other names, for the error message.

    Yields:
        The names rejected so far.

    Example:
        >>> with importing_only(["reward=fractions:Fraction"], whose="their.yaml") as refused:
        ...     _ = import_named("fractions:Fraction")
        ...     import_named("decimal:Decimal")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: their.yaml names 'decimal:Decimal', whose code is not run: \
add --trust if you trust it
    """
    global _closed
    words = {word for text in typed for word in re.split(r"[\s,=\[\]{}'\"]+", text)}
    known = frozenset(words | {absolute_path(word) for word in words})
    before, _closed = _closed, (known, whose, [])
    try:
        yield _closed[2]
    finally:
        _closed = before


def refuse_foreign(path: str, fate: str = "whose code is not run") -> None:
    """Raise for imports or requests that :func:`importing_only` does not allow.

    Args:
        path: the path to import, or the address of a server.
        fate: the action that is not done, for the message.

    Raises:
        ConfigError: the user did not type the path.
    """
    if _closed is None or path in _closed[0]:
        return
    told = f"{_closed[1]} names {path!r}, {fate}: add --trust if you trust it"
    _closed[2].append(told)
    raise ConfigError(told)


def _suggestion(module: Any, name: str) -> str:
    """Names that a module defines, if they are few, or the nearest name."""
    own = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    own = own if len(own) <= _MOST_SHOWN else difflib.get_close_matches(name, own, 1)
    return f"; it has {', '.join(own)}" if own else ""


def is_file(path: str) -> bool:
    """Whether a path of :func:`import_named` names a file.

    Args:
        path: a path as in :func:`import_named`.

    Example:
        >>> is_file("rewards.py:short"), is_file("rewards:short")
        (True, False)
    """
    where, separator, _ = path.rpartition(":")
    return bool(separator) and (where.endswith(".py") or "/" in where)


def absolute_path(path: str | None) -> str | None:
    """Make the path of ``file.py:name`` independent of the working folder.

    Args:
        path: the typed path; anything except a file is returned unchanged.
    """
    if path is None or not is_file(path):
        return path
    file, _, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def _module_of(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    file = file.resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = import_module(file.stem)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != file:
        raise ConfigError(f"another module is called {file.stem!r} ({found}); rename {file.name}")
    return module


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")


@cache
def _load(kind: str) -> None:
    """Import the files of the kind's packages, which register their contents."""
    _check_kind(kind)
    for room in KINDS[kind]:
        package = import_module(room)
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            import_module(found.name)


@cache
def _installed(kind: str) -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=f"torchrl_llm.{kind}")}

"""Declarations of settings: each field has a type, bounds, a default and a description.

A :class:`Group` is a dataclass. The meaning of a field is documented under ``Attributes`` of its
class; its bounds are part of its type, ``Annotated[int, Ge(1)]``. They are always checked, for
values from a file, the command line or Python.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache, partial
from inspect import cleandoc, get_annotations, getmro
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from torchrl_llm._checked import Ge, Gt, In, check, fits, marks_of
from torchrl_llm._masking import masked
from torchrl_llm.errors import ConfigError

Bound = In | Ge | Gt

Count = Annotated[int, Ge(1)]
"""A count of at least 1."""


@dataclass_transform(kw_only_default=True)
class Group:
    """Base of a group of settings; each subclass automatically becomes a dataclass.

    A field that is a group itself needs no default: the group's own defaults apply. :func:`own`
    overrides some of them for a recipe. :func:`several` is the default of a list.

    Example:
        >>> class Optimizer(Group, key="optimizer"):
        ...     lr: Annotated[float, Ge(0)] = 1e-5
        ...     betas: list[float] = several(0.9, 0.98)
        >>> Optimizer(lr=0.1).flat()
        {'lr': 0.1, 'betas': [0.9, 0.98]}
        >>> Optimizer(lr=-1)
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: optimizer.lr must be at least 0, got -1
    """

    _key = ""  # without a type, so it is not a field

    def __init_subclass__(cls, key: str | None = None, kw_only: bool = True) -> None:
        """Make the subclass a dataclass.

        Args:
            key: dotted key of the group, for errors; by default the key of its base.
            kw_only: its fields are keyword-only.
        """
        if key is not None:
            cls._key = key
        hints = get_type_hints(cls)
        for name in get_annotations(cls):
            default, hint = vars(cls).get(name, MISSING), hints[name]
            if is_dataclass(hint) and (default is MISSING or isinstance(default, dict)):
                given = {} if default is MISSING else default
                make = partial(getattr(hint, "of", hint), **given)
                setattr(cls, name, field(default_factory=make))
            elif isinstance(default, (list, dict)):
                setattr(cls, name, field(default_factory=partial(copy.deepcopy, default)))
        declared = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        dataclass(kw_only=kw_only)(cls)
        for name, each in declared.items():
            setattr(cls, name, each)  # decorated subclasses are processed twice

    def __post_init__(self) -> None:
        for name, hint in bounded(type(self)).items():
            check(f"{self._key}.{name}".lstrip("."), getattr(self, name), hint, none="null")

    def only(self, name: str, has_effect: bool, where: str) -> None:
        """Raise for a key that was changed but has no effect.

        Args:
            name: name of the field.
            has_effect: whether the field may differ from its default.
            where: end of the message: with or without which setting.

        Raises:
            ConfigError: the field has no effect and differs from its default.
        """
        entry = type(self).__dataclass_fields__[name]
        default = entry.default_factory() if entry.default is MISSING else entry.default
        ensure(
            has_effect or getattr(self, name) == default,
            f"{self._key}.{name} has no effect {where}",
        )

    def flat(self) -> dict[str, Any]:
        """Dotted key to value, for the record of a run."""
        return dotted(asdict(self))


def own(**values: Any) -> Any:
    """Default of a group field with other values for some of its keys; or of a mapping.

    Args:
        **values: key to value.
    """
    return values


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping; each key is prefixed by the names of its groups.

    Args:
        values: mappings within mappings.
        prefix: prefix of every key.

    Example:
        >>> dotted({"seed": 0, "optimizer": {"lr": 0.1}})
        {'seed': 0, 'optimizer.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def several(*values: Any) -> Any:
    """The default of a field that is a list.

    Args:
        *values: its entries.
    """
    return list(values)


def sentences(declared: type) -> dict[str, str]:
    """Description of each field or argument in the docstrings of a class and its bases.

    Args:
        declared: the class.

    Example:
        >>> sentences(Ge)
        {'least': 'the smallest allowed number.'}
    """
    found: dict[str, str] = {}
    for base in reversed(getmro(declared)):
        text = cleandoc(vars(base).get("__doc__") or "") + "\n\n"
        for block in re.findall(r"^(?:Attributes|Args):\n(.*?)\n(?=\S|\Z)", text, re.M | re.S):
            entries = re.findall(r"^    \*{0,2}(\w+): (.*?)(?=\n    \S|\Z)", block, re.M | re.S)
            found |= {name: " ".join(about.split()) for name, about in entries}
    return found


@cache
def bounded(group: type) -> dict[str, Any]:
    """The annotations of fields that have bounds.

    Args:
        group: a dataclass.
    """
    hints = get_type_hints(group, include_extras=True).items()
    return {name: hint for name, hint in hints if any(isinstance(m, Bound) for m in marks_of(hint))}


def ensure(condition: bool, message: str) -> None:
    """Raise a ``ConfigError`` unless a condition holds.

    Args:
        condition: the condition.
        message: the problem and what to do.

    Raises:
        ConfigError: the condition does not hold.
    """
    if not condition:
        raise ConfigError(message)


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Prefix errors with the key of a setting.

    Args:
        key: dotted key of the setting.

    Raises:
        ConfigError: the body raised one; the key is added.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_types(group: Any) -> None:
    """Check the types of a dataclass that may come from Python code, and convert its values.

    Args:
        group: an instance.

    Raises:
        ConfigError: a field has the wrong type.
    """
    hints = get_type_hints(type(group))
    for entry in fields(group):
        setattr(
            group, entry.name, convert(getattr(group, entry.name), hints[entry.name], entry.name)
        )


def convert(value: Any, hint: Any, path: str) -> Any:
    """Convert a value to a type hint.

    Args:
        value: the value.
        hint: a plain type, a union, a ``Literal``, or a list, tuple or dict of these.
        path: dotted key of the value.

    Raises:
        ConfigError: the value does not fit; the message reports the expected type.

    Example:
        >>> convert([1, 2], tuple[float, float], "train.betas")
        (1.0, 2.0)
        >>> convert("meen", Literal["mean", "sum"], "train.reduction")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: train.reduction must be one of 'mean', 'sum', got 'meen'; \
did you mean 'mean'?
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        # Choose the first member that fits; a bool is not a number, and a number is not a text.
        for option in options:
            try:
                return convert(value, option, path)
            except ConfigError:
                if get_origin(option) in (list, tuple) and _is_list(value):
                    raise
    elif origin is Literal:
        if not fits(value, hint):
            check(path, _shown(value), hint)
        return value
    elif origin in (list, tuple):
        if _is_list(value):
            inner = options[0] if options else Any
            if origin is tuple and Ellipsis not in options and len(value) != len(options):
                raise ConfigError(f"{path} must have {len(options)} entries, got {list(value)!r}")
            return origin(convert(item, inner, f"{path}[{i}]") for i, item in enumerate(value))
    elif origin is dict:
        keys, inner = options or (Any, Any)
        if hasattr(value, "items"):
            return {
                convert(name, keys, path): convert(item, inner, f"{path}.{name}")
                for name, item in value.items()
            }
    elif isinstance(origin, type):  # a set or a callable: the contents are not checked
        if isinstance(value, origin):
            return value
    elif hint is Any:
        return _as_plain(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is float and isinstance(value, str):
        # YAML 1.1 reads "1e-5" as a string; the user meant the number.
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(hint, type) and (
        type(value) is hint or (isinstance(value, hint) and hint not in (bool, int, float))
    ):
        return value
    shown = _shown(value)
    how = f"; write {path}=[{shown}]" if get_origin(hint) is list and shown is value else ""
    raise ConfigError(f"{path} must be {_name(hint)}, got {shown!r}{how}")


def _shown(value: Any) -> Any:
    """A value for an error message; only the type of a mapping, which may contain a key."""
    parts = value if _is_list(value) else [value]
    hides = any(hasattr(part, "items") for part in parts)
    return type(value).__name__ if hides else masked(_as_plain(value))


def _as_plain(value: Any) -> Any:
    """Convert lists and dicts of other libraries to Python's."""
    if isinstance(value, tuple):
        return value
    if _is_list(value):
        return [_as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _as_plain(item) for name, item in value.items()}
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, options))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_name(option) for option in options)
    if get_origin(hint) is dict:
        return "a group of keys"
    if get_origin(hint) in (list, tuple):
        return "a list of " + " and ".join(_name(o) for o in dict.fromkeys(options) if o is not ...)
    return getattr(hint, "__name__", str(hint))

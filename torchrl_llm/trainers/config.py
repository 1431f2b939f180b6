"""Strict configuration: a nested mapping becomes dataclasses, or an error that names the right key.

This is not a schema of any recipe (see :mod:`torchrl_llm.trainers.grpo_config`) and knows nothing
of Hydra: any nested mapping will do. An unknown key is refused with the nearest valid one, an old
name with the new one, and a value of the wrong type with the type that was expected.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchrl_llm.errors import ConfigError

__all__ = ["check_override_keys", "from_mapping", "valid_keys"]

T = TypeVar("T")


def from_mapping(
    schema: type[T], values: Mapping[str, Any], *, renamed: Mapping[str, str] | None = None
) -> T:
    """Build a (nested) dataclass from a (nested) mapping, strictly.

    Args:
        schema: a dataclass type whose fields are plain values, lists or other dataclasses.
        values: any nested mapping, a ``DictConfig`` too.
        renamed: old dotted key -> what to use instead, a key or a sentence.

    Returns:
        An instance of ``schema``; keys that ``values`` lacks keep their defaults.

    Raises:
        ConfigError: an unknown or renamed key, a value of the wrong type, or whatever a
            ``__post_init__`` of the schema refuses.

    Example:
        >>> from dataclasses import field, make_dataclass
        >>> Optimizer = make_dataclass("Optimizer", [("lr", float, 1e-5)])
        >>> group = ("optimizer", Optimizer, field(default_factory=Optimizer))
        >>> Config = make_dataclass("Config", [group])
        >>> from_mapping(Config, {"optimizer": {"lr": 1}}).optimizer.lr
        1.0
        >>> from_mapping(Config, {"optimizer": {"rl": 1}})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: unknown key 'optimizer.rl'; the nearest valid key is \
'optimizer.lr'
    """
    return _build(schema, values, "", list(valid_keys(schema)), renamed or {})


def valid_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested dataclass, groups included, in the order of declaration.

    Args:
        schema: a dataclass type.
        prefix: put before each key, with its trailing dot.
    """
    hints = get_type_hints(schema)
    for entry in fields(schema):
        yield prefix + entry.name
        if is_dataclass(hints[entry.name]):
            yield from valid_keys(hints[entry.name], f"{prefix}{entry.name}.")


def check_override_keys(
    arguments: Iterable[str], schema: type, *, renamed: Mapping[str, str] | None = None
) -> None:
    """Refuse command-line overrides ``key=value`` whose key a schema does not have.

    Hydra rejects unknown keys itself, before the program runs and without naming the right one;
    call this first. Flags (``--cfg``, ``-m``) and Hydra's own keys (``hydra.run.dir``) pass.

    Args:
        arguments: the arguments of the command line, ``sys.argv[1:]``.
        schema: a dataclass type.
        renamed: old dotted key -> what to use instead.

    Raises:
        ConfigError: a key is unknown or was renamed.
    """
    keys = list(valid_keys(schema))
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~").partition("@")[0]
        own = key == "hydra" or key.startswith(("-", "hydra.", "hydra/"))
        if "=" not in argument or own:
            continue
        if key not in keys:
            raise ConfigError(_refusal(key, keys, renamed or {}))


def _build(
    schema: type[T],
    values: Mapping[str, Any],
    prefix: str,
    keys: Sequence[str],
    renamed: Mapping[str, str],
) -> T:
    if not isinstance(values, Mapping) and not hasattr(values, "items"):
        raise ConfigError(f"{prefix.rstrip('.')!r} is a group of keys, got {values!r}")
    hints = get_type_hints(schema)
    names = {entry.name for entry in fields(schema)}
    arguments = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in names:
            raise ConfigError(_refusal(path, keys, renamed))
        if is_dataclass(hints[name]):
            arguments[name] = _build(hints[name], value, f"{path}.", keys, renamed)
        else:
            arguments[name] = _convert(value, hints[name], path)
    return schema(**arguments)


def _refusal(key: str, keys: Sequence[str], renamed: Mapping[str, str]) -> str:
    if key in renamed:
        target = renamed[key]
        return f"{key!r} was renamed to {target!r}" if target in keys else f"{key!r}: {target}"
    group, _, leaf = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == group]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    # A key is most often mistyped within its own group, else put into the wrong group; only then
    # is the whole path compared.
    nearest = (
        difflib.get_close_matches(key, siblings, 1, 0.8)
        or same_leaf[:1]
        or difflib.get_close_matches(key, keys, 1, 0.0)
    )
    return f"unknown key {key!r}; the nearest valid key is {nearest[0]!r}"


def _convert(value: Any, hint: Any, path: str) -> Any:
    """The value as ``hint`` asks for, or an error that says what was expected."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        # A bool is not taken for a number, nor a number for a text: the first member that fits.
        for option in options:
            try:
                return _convert(value, option, path)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in options and not isinstance(value, bool):
            return value
        choices = ", ".join(repr(option) for option in options)
        raise ConfigError(f"{path} must be one of {choices}, got {value!r}")
    elif origin in (list, tuple):
        if isinstance(value, Sequence) and not isinstance(value, str):
            inner = options[0] if options else Any
            if origin is tuple and Ellipsis not in options and len(value) != len(options):
                raise ConfigError(f"{path} must have {len(options)} entries, got {list(value)!r}")
            return origin(_convert(item, inner, f"{path}[{i}]") for i, item in enumerate(value))
    elif hint is Any:
        return value
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is float and isinstance(value, str):
        # YAML 1.1 reads "1e-5" as a text; the user meant the number.
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ConfigError(f"{path} must be {_name(hint)}, got {value!r}")


def _name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    options = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_name(option) for option in options)
    if get_origin(hint) in (list, tuple):
        return "a list of " + " and ".join(_name(o) for o in dict.fromkeys(options) if o is not ...)
    return getattr(hint, "__name__", str(hint))

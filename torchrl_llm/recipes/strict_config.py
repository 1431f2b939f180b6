"""Strict configuration: turns a nested mapping into dataclasses; errors name the correct key.

It is not the schema of a recipe (see :mod:`torchrl_llm.recipes`) and does not depend on Hydra: any
nested mapping is valid. The error for an unknown key names the nearest valid key, the error for an
old name the new one, and the error for a value of the wrong type the expected type.

A group such as ``loss`` is a :class:`Component`: its ``type`` names a class, and the arguments of
that class are its keys. Each class that the group offers is a *variant*: a dataclass derived from
the signature, so that a key exists exactly if the constructor has an argument of that name, with
the same default. For a key of a different variant the error names that variant.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchrl_llm._registry import constructor_arguments, names
from torchrl_llm._settings import convert
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.command_keys import refusal

_PLAIN = (bool, int, float, str, type(None))


@dataclass(kw_only=True)
class Component:
    """Base of the groups whose keys depend on their ``type``.

    A group is a subclass with ``variants`` (filled by :func:`variant`) and a ``default``; its
    instances are instances of its variants.

    Attributes:
        type: name of the variant.

    Example:
        >>> class Shape(Component):
        ...     '''A group of shapes.'''
        ...     variants, default = {}, "square"
        >>> class Square:
        ...     def __init__(self, canvas, *, side: float = 1.0):
        ...         self.area = side**2
        >>> Shape.variants["square"] = variant(Shape, "square", Square, given={"canvas"})
        >>> Shape.of("square", side=3.0)
        Shape_square(type='square', side=3.0)
        >>> Shape.of("square", side=3.0).build(None).area
        9.0
    """

    variants: ClassVar[Mapping[str, type[Component]]]
    default: ClassVar[str]
    target: ClassVar[Callable[..., Any]]
    type: str

    @classmethod
    def of(cls, type: str | None = None, **options: Any) -> Component:
        """An instance of a variant.

        Args:
            type: name of the variant; the group's default if left out.
            **options: arguments of its constructor.
        """
        return cls.variants[cls.default if type is None else type](**options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Variants are made at runtime, not imported: a different process makes its own.
        group = next(each for each in type(self).__mro__ if "variants" in vars(each))
        return _remade, (group, self.type, self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are configured, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}

    def build(self, *args: Any, **given: Any) -> Any:
        """Construct the configured object.

        Args:
            *args: positional arguments without a key.
            **given: further arguments; they replace configured arguments of the same name.
        """
        return type(self).target(*args, **{**self.options, **given})


def _remade(group: type[Component], type_: str, options: Mapping[str, Any]) -> Component:
    return group.of(type_, **options)


class Variants(Mapping[str, type[Component]]):
    """The variants of a group: all registered objects of a kind, each made on first use.

    Args:
        kind: as for ``register``.
        make: makes the variant of a name; a user-defined ``"module:name"`` is valid, too.
    """

    def __init__(self, kind: str, make: Callable[[str], type[Component]]) -> None:
        self._kind, self._make = kind, make
        self._made: dict[str, type[Component]] = {}

    def __getitem__(self, name: str) -> type[Component]:
        if not isinstance(name, str) or (":" not in name and name not in names(self._kind)):
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(names(self._kind))

    def __len__(self) -> int:
        return len(names(self._kind))


def variant(
    group: type[Component], name: str, target: Callable[..., Any], *, given: Collection[str] = ()
) -> type[Component]:
    """Derive a variant of a group from the signature of the class that it builds.

    Args:
        group: the group.
        name: the variant's ``type``.
        target: a class, or a function that makes an instance.
        given: arguments that are not keys: the caller of ``build`` may pass them.

    Returns:
        A keyword-only dataclass. Of arguments that take plain values as well as objects, only plain
        values can be configured; arguments that take only objects are not keys.

    Raises:
        TypeError: an argument is neither given nor has a default.
    """
    entries: list[tuple[str, Any, Any]] = [("type", Literal[name], field(default=name))]
    for key, parameter in constructor_arguments(target).items():
        if key in given:
            continue
        default = parameter.default
        if default is inspect.Parameter.empty:
            raise TypeError(f"{target.__name__} needs {key}, which must be given or have a default")
        hint = _plain(parameter.annotation)
        if hint is None:
            continue  # takes only objects, which a file cannot contain
        value = field(default_factory=default.copy) if isinstance(default, list) else default
        entries.append((key, hint, value))
    made = make_dataclass(
        f"{group.__name__}_{name.rpartition(':')[2]}",
        entries,
        bases=(group,),
        namespace={"target": staticmethod(target)},
        kw_only=True,
    )
    made.__module__, made.__doc__ = group.__module__, target.__doc__
    return made


def _plain(hint: Any) -> Any:
    """The part of a type hint that a configuration file can contain; ``None`` if there is none."""
    origin, options = get_origin(hint), get_args(hint)
    if hint in _PLAIN or origin is Literal:
        return hint
    if origin in (list, tuple):
        return hint if all(o is Ellipsis or _plain(o) is not None for o in options) else None
    if origin in (Union, types.UnionType):
        kept = [plain for option in options if (plain := _plain(option)) is not None]
        kept = [option for option in kept if option is not type(None)] and kept
        return Union[tuple(kept)] if kept else None  # noqa: UP007 (of a computed tuple)
    return None


T = TypeVar("T")


def from_mapping(
    schema: type[T], values: Mapping[str, Any], *, renamed: Mapping[str, str] | None = None
) -> T:
    """Build a (nested) dataclass from a (nested) mapping, strictly.

    Args:
        schema: a dataclass type whose fields are plain values, lists, other dataclasses, or dicts
            with user-defined keys.
        values: any nested mapping, a ``DictConfig`` too.
        renamed: old dotted key -> what to use instead, a key or a sentence.

    Returns:
        An instance of ``schema``; keys that ``values`` lacks keep their defaults.

    Raises:
        ConfigError: an unknown or renamed key, a value of the wrong type, or values that a
            ``__post_init__`` of the schema rejects.

    Example:
        >>> from dataclasses import field, make_dataclass
        >>> Optimizer = make_dataclass("Optimizer", [("lr", float, 1e-5)])
        >>> group = ("optimizer", Optimizer, field(default_factory=Optimizer))
        >>> Config = make_dataclass("Config", [group])
        >>> from_mapping(Config, {"optimizer": {"lr": 1}}).optimizer.lr
        1.0
        >>> from_mapping(Config, {"optimizer": {"lrr": 1}})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?
    """
    return _build(schema, values, "", list(valid_keys(schema)), renamed or {})


def valid_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested dataclass, groups included, in the order of declaration.

    Args:
        schema: a dataclass type; for a :class:`Component`, the keys of all its variants, each once.
        prefix: put before each key, with its trailing dot.
    """
    made = schema.variants.values() if _is_component(schema) else [schema]
    for name, hint in {name: hint for each in made for name, hint in _hints(each)}.items():
        yield prefix + name
        if is_dataclass(hint):
            yield from valid_keys(hint, f"{prefix}{name}.")


@cache
def _hints(schema: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(schema)
    return [(entry.name, hints[entry.name]) for entry in fields(schema)]


def _is_component(schema: Any) -> bool:
    """Whether a type is a group of variants, and not a variant."""
    is_group = isinstance(schema, type) and issubclass(schema, Component)
    return is_group and "target" not in vars(schema)


def _check_effect(group: type[Component], chosen: type[Component], name: str, path: str) -> None:
    """Reject a key of a different variant; the error names that variant."""
    if name in {entry.name for entry in fields(chosen)}:
        return
    owners = [
        type_
        for type_, made in group.variants.items()
        if name in {entry.name for entry in fields(made)}
    ]
    if owners:
        type_ = next(type_ for type_, made in group.variants.items() if made is chosen)
        raise ConfigError(
            f"{path}.{name} has no effect with {path}={type_}; it is a key of {', '.join(owners)}"
        )


def _variant(group: type[Component], values: Mapping[str, Any], path: str) -> type[Component]:
    type_ = values.get("type", group.default)
    if type_ not in group.variants:
        choices = ", ".join(map(repr, group.variants))
        raise ConfigError(f"{path}.type must be one of {choices}, got {type_!r}")
    chosen = group.variants[type_]
    for name in values:
        _check_effect(group, chosen, name, path)
    return chosen


def _build(
    schema: type[T],
    values: Mapping[str, Any],
    prefix: str,
    keys: Sequence[str],
    renamed: Mapping[str, str],
    own: Mapping[str, Any] | None = None,
) -> T:
    if not isinstance(values, Mapping) and not hasattr(values, "items"):
        raise ConfigError(f"{prefix.rstrip('.')!r} is a group of keys, got {values!r}")
    if _is_component(schema):
        schema = _variant(schema, values, prefix.rstrip("."))
    hints = get_type_hints(schema)
    made = {entry.name: entry.default_factory for entry in fields(schema)}
    arguments = dict(own or {})
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in made:
            raise ConfigError(refusal(path, keys, renamed))
        if is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            given = getattr(made[name], "keywords", None)
            arguments[name] = _build(hints[name], value, f"{path}.", keys, renamed, given)
        else:
            arguments[name] = convert(value, hints[name], path)
    return schema(**arguments)

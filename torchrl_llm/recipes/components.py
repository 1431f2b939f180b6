"""Groups of keys that name a class: ``type`` chooses it, its constructor's arguments are the keys.

A configuration group such as ``loss`` is a :class:`Component`. Each class that the group offers is
a *variant*: a dataclass read off the signature of the class, so that a key exists exactly where the
constructor has an argument of that name, with the default that is written there. A key of another
variant is an error that says whose it is.

Next: :mod:`torchrl_llm.recipes` registers the losses and the advantage estimators.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from torchrl_llm._registry import constructor_arguments, names

__all__ = ["Component", "Variants", "constructor_arguments", "variant"]

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
            type: its name; the group's default when left out.
            **options: arguments of its constructor.
        """
        return cls.variants[cls.default if type is None else type](**options)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are configured, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}

    def takes(self, name: str) -> bool:
        """Whether the constructor has an argument of that name.

        Args:
            name: of an argument, one that is configured or one that is given.
        """
        return name in constructor_arguments(self.target)

    def build(self, *args: Any, **given: Any) -> Any:
        """Construct what is configured.

        Args:
            *args: positional arguments that no key stands for.
            **given: further ones; they replace what is configured under the same name.
        """
        return type(self).target(*args, **{**self.options, **given})


class Variants(Mapping[str, type[Component]]):
    """The variants of a group: whatever is registered of a kind, each made when it is asked for.

    Args:
        kind: as of :func:`~torchrl_llm._registry.register`.
        make: makes the variant of a name; ``"module:name"`` of the user's own is one, too.
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
    group: type[Component],
    name: str,
    target: Callable[..., Any],
    *,
    given: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> type[Component]:
    """Derive a variant of a group from the signature of what it builds.

    Args:
        group: the group.
        name: the variant's ``type``.
        target: a class, or a function that makes an instance.
        given: arguments that are no keys: whoever calls ``build`` passes them, or nobody does.
        defaults: defaults that differ from those of the signature.

    Returns:
        A keyword-only dataclass. Of arguments that take plain values as well as objects, only the
        plain ones can be configured; those that take objects only are no keys.

    Raises:
        TypeError: an argument that is neither given nor has a default.
    """
    defaults = dict(defaults or {})
    entries: list[tuple[str, Any, Any]] = [("type", Literal[name], field(default=name))]
    for key, parameter in constructor_arguments(target).items():
        if key in given:
            continue
        default = defaults.pop(key, parameter.default)
        if default is inspect.Parameter.empty:
            raise TypeError(
                f"{target.__name__} needs {key}, which must be given or have a default here"
            )
        hint = _plain(parameter.annotation)
        if hint is None:
            continue  # takes objects only, which no file can write
        value = field(default_factory=default.copy) if isinstance(default, list) else default
        entries.append((key, hint, value))
    if defaults:
        raise TypeError(f"{target.__name__} has no arguments {sorted(defaults)}")
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
    """The part of a type hint that a configuration file can write; ``None`` for nothing of it."""
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

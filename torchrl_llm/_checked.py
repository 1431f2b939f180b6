"""Checks of arguments by their annotations, before a constructor runs.

Only the annotations have to be written::

    @checked
    def __init__(self, size: Annotated[int, Ge(1)], mode: Literal["mean", "sum"] = "mean"): ...

Only annotations with a bound or a ``Literal`` are checked. A text next to a bound is appended to
the message: ``Annotated[int, Ge(2), "a group of one has nobody to compare with"]``. The constructor
itself checks combinations of arguments. ``test/test_checked.py`` tries wrong values for each
argument.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from torchrl_llm._registry import did_you_mean
from torchrl_llm.errors import ConfigError

T = TypeVar("T")
CHECKED: list[Callable[..., Any]] = []
"""Every function whose arguments are checked, in the order of import."""

_INTERVAL = re.compile(r"([\[(])(.+),(.+)([\])])")


@dataclass(frozen=True)
class In:
    """A number within an interval.

    Attributes:
        interval: the interval in mathematical notation, ``"[0, 1)"``; a side that is ``inf`` is
            open.

    Example:
        >>> In("[0, 1)").holds(0.0), In("[0, 1)").holds(1.0), In("(0, inf)").holds(float("inf"))
        (True, False, False)
    """

    interval: str

    def holds(self, value: Any) -> bool:
        """Whether a number is within; NaN never is.

        Args:
            value: the number.
        """
        left, least, most, right = _INTERVAL.fullmatch(self.interval).groups()
        above = value > float(least) if left == "(" else value >= float(least)
        below = value < float(most) if right == ")" else value <= float(most)
        return bool(above and below)

    def __str__(self) -> str:
        return f"in {self.interval}"


@dataclass(frozen=True)
class Ge:
    """A number with a minimum.

    Attributes:
        least: the smallest allowed number.
    """

    least: float

    def holds(self, value: Any) -> bool:
        """Whether a number is large enough; NaN never is.

        Args:
            value: the number.
        """
        return bool(value >= self.least)

    def __str__(self) -> str:
        return f"at least {self.least}"


@dataclass(frozen=True)
class Gt:
    """A number above a limit.

    Attributes:
        limit: the number must be greater than this.
        finite: whether infinity is too large.
    """

    limit: float
    finite: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a number is large enough; NaN never is.

        Args:
            value: the number.
        """
        return bool(value > self.limit and not (self.finite and value == float("inf")))

    def __str__(self) -> str:
        return f"above {self.limit}" + " and finite" * self.finite


@dataclass(frozen=True)
class Pair:
    """Two numbers ``(low, high)``, the first below the second, within an interval.

    Attributes:
        interval: interval of both numbers, written as in :class:`In`.
        equal: whether the two may be equal.

    Example:
        >>> Pair("[0, inf]").holds((0, 2.0)), Pair("[0, 1]").holds([2.0, 0.5])
        (True, False)
    """

    interval: str = "[-inf, inf]"
    equal: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value is such a pair: a tuple, a list, an array, or a library's sequence.

        Args:
            value: any value.
        """
        pair = value.tolist() if hasattr(value, "tolist") else value  # NumPy and torch
        if not isinstance(pair, Sequence) or len(pair) != 2:
            return False
        if not all(_fits(each, Annotated[float, In(self.interval)]) for each in pair):
            return False
        return bool(pair[0] < pair[1] or (self.equal and pair[0] == pair[1]))

    def __str__(self) -> str:
        where = "" if self.interval == "[-inf, inf]" else f" in {self.interval}"
        return f"(low, high) with low {'<=' if self.equal else '<'} high{where}"


def checked(target: T) -> T:
    """Check the arguments of a function, or of the constructor of a class (a dataclass too).

    The error is raised before the function runs. Defaults of omitted arguments are not checked.

    Args:
        target: the function or class.

    Returns:
        The same class, or a function with the same signature.

    Raises:
        ConfigError: at the call, with the argument's name, the requirement and the value.

    Example:
        >>> @checked
        ... def pad(width: Annotated[int, Ge(1)], side: Literal["left", "right"] = "left"):
        ...     return width, side
        >>> pad(2, side="right")
        (2, 'right')
        >>> pad(0)
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: width must be at least 1, got 0
        >>> pad(1, "rigth")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: side must be one of 'left', 'right', got 'rigth'; did you \
mean 'right'?
    """
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)
        return target
    rules: list[tuple[str, int | None, Any]] = []
    known = False

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if not known:  # annotations may name objects defined later in the file
            rules.extend(rules_of(target))
            known = True
        for name, position, hint in rules:
            if name in kwargs:
                check(name, kwargs[name], hint)
            elif position is not None and position < len(args):
                check(name, args[position], hint)
        return target(*args, **kwargs)

    CHECKED.append(call)
    return call


def rules_of(target: Callable[..., Any]) -> list[tuple[str, int | None, Any]]:
    """Read the checked annotations of a function.

    Returns:
        Name, position (``None``: keyword-only) and annotation of each checked argument.

    Args:
        target: the function.
    """
    rules = []
    for index, (name, parameter) in enumerate(signature(target).parameters.items()):
        hint = parameter.annotation
        if isinstance(hint, str):
            try:
                hint = eval(hint, target.__globals__)
            except NameError:
                if "Annotated[" in hint or "Literal[" in hint:
                    raise
                continue  # a name that only type checkers import
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if any(map(_is_rule, _options(hint))):
            rules.append((name, None if parameter.kind is parameter.KEYWORD_ONLY else index, hint))
    return rules


def check(name: str, value: Any, hint: Any, *, none: str = "None") -> None:
    """Raise for a value that an annotation does not allow.

    Args:
        name: name of the argument.
        value: its value.
        hint: the annotation: bounds, a ``Literal``, or a union of these and of classes.
        none: how ``None`` is written in the source of the value.

    Raises:
        ConfigError: the annotation does not allow the value.
    """
    if fits(value, hint):
        return
    options = _options(hint)
    choices = [each for option in options for each in _choices(option)]
    near = did_you_mean(value, map(str, choices)) if isinstance(value, str) and choices else ""
    wanted = " or ".join(_wanted(option, value, none) for option in options)
    why = [f": {mark}" for mark in marks_of(hint) if isinstance(mark, str)]
    raise ConfigError(f"{name} must be {wanted}, got {value!r}{''.join(why)}{near}")


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value.

    Args:
        value: the value.
        hint: as in :func:`check`.
    """
    return any(_fits(value, option) for option in _options(hint))


def marks_of(hint: Any) -> list[Any]:
    """Bounds and texts next to the types of an annotation.

    Args:
        hint: a type, or a union of types.
    """
    annotated = (option for option in _options(hint) if get_origin(option) is Annotated)
    return [mark for option in annotated for mark in option.__metadata__]


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_rule(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal)


def _choices(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) is Literal else ()


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        kind = str if isinstance(value, str) else type(value)  # True is not 1, a string enum is
        return any(kind is type(each) and value == each for each in get_args(hint))
    if origin is Annotated:
        kind, *marks = get_args(hint)
        if kind in (int, float):
            is_number = not isinstance(value, bool | str) and hasattr(value, "__float__")
            if not is_number or (kind is int and not _is_whole(value)):
                return False
        elif get_origin(kind) is Literal:
            return _fits(value, kind)
        return all(isinstance(mark, str) or mark.holds(value) for mark in marks)
    if hint is None:
        return value is None
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _is_whole(value: Any) -> bool:
    """Whether Python accepts it as an index, including integers of NumPy and torch."""
    try:
        operator.index(value)
    except (TypeError, RuntimeError):  # torch raises both for non-indices
        return False
    return True


def _wanted(hint: Any, value: Any, none: str) -> str:
    origin = get_origin(hint)
    if choices := _choices(hint):
        return "one of " + ", ".join(map(repr, choices))
    if origin is Annotated:
        kind, *marks = get_args(hint)
        whole = "a whole number " * (kind is int and not _is_whole(value))
        return whole + " and ".join(str(mark) for mark in marks if not isinstance(mark, str))
    return none if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))

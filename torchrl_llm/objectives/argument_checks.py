"""Checks of arguments that losses and advantage estimators share.

Each raises a :class:`~torchrl_llm.errors.ConfigError` that names the argument.
"""

from __future__ import annotations

from collections.abc import Collection

from torchrl_llm.errors import ConfigError


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Refuse a value that is not among the allowed ones.

    Args:
        name: of the argument.
        value: what was given.
        allowed: what may be given, two values at least.

    Example:
        >>> check_choice("level", "row", ("token", "sequence", "none"))
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: level must be token, sequence or none, got 'row'
    """
    if value not in allowed:
        *most, last = map(str, allowed)
        listed = f"{', '.join(most)} or {last}"
        kind = "one of " if len(allowed) > 4 else ""
        raise ConfigError(f"{name} must be {kind}{listed}, got {value!r}")


def check_positive(**values: float | None) -> None:
    """Refuse numbers that are not above 0.

    Args:
        **values: name of the argument to its value; ``None`` passes.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive, got {value}")


def check_not_negative(**values: float | None) -> None:
    """Refuse numbers below 0.

    Args:
        **values: name of the argument to its value; ``None`` passes.
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} must not be negative, got {value}")


def check_share(**values: float) -> None:
    """Refuse numbers outside [0, 1].

    Args:
        **values: name of the argument to its value.
    """
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} must be in [0, 1], got {value}")

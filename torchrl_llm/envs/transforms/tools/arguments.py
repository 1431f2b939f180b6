"""Arguments of a call against the tool's JSON schema, with a little forgiveness for types.

Models write ``"3"`` for 3 and ``"[1, 2]"`` for a list. What can only be meant in one way is taken
that way; everything else is an :class:`ArgumentError` that says what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ArgumentError", "argument_checker", "describe_parameters"]

_LONGEST = 300


class ArgumentError(ValueError):
    """Arguments do not fit the schema of a tool."""


def argument_checker(
    schema: Mapping[str, Any],
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that checks the arguments of one tool.

    These are taken for what the schema asks for, at any depth:

    - a string that spells an integer, a number, a boolean, a list or an object, in JSON;
    - a number without fraction where an integer is asked for (``3.0``);
    - a number or boolean where a string is asked for.

    A schema that is none is not checked against; references to other documents are never fetched.

    Args:
        schema: JSON schema of an object of arguments.

    Returns:
        Takes the arguments and returns them with these conversions; raises :class:`ArgumentError`.

    Example:
        >>> check = argument_checker({
        ...     "type": "object",
        ...     "properties": {"n": {"type": "integer"}},
        ...     "required": ["n"],
        ... })
        >>> check({"n": "3"})
        {'n': 3}
        >>> check({})
        Traceback (most recent call last):
            ...
        torchrl_llm.envs.transforms.tools.arguments.ArgumentError: 'n' is a required property
    """
    import referencing
    from jsonschema import exceptions, validators

    schema = dict(schema)
    cls = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except exceptions.SchemaError:
        return dict
    # An empty registry of our own: the default one would fetch what a schema refers to.
    validator = cls(schema, registry=referencing.Registry())

    def check(args: Mapping[str, Any]) -> dict[str, Any]:
        taken = _taken(dict(args), schema)
        try:
            error = exceptions.best_match(validator.iter_errors(taken))
        except (referencing.exceptions.Unresolvable, RecursionError) as failure:
            raise ArgumentError(f"they cannot be checked: {_short(str(failure))}") from failure
        if error is None:
            return taken
        place = error.json_path.removeprefix("$").lstrip(".")
        raise ArgumentError(_short(error.message) + (f" (at {_short(place)})" if place else ""))

    return check


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """The arguments of a tool in one line, for a model that got them wrong.

    Example:
        >>> describe_parameters({
        ...     "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        ...     "required": ["a"],
        ... })
        '{"a": integer, "b": string (optional)}'
    """
    required = schema.get("required", ())
    parts = []
    for name, one in (schema.get("properties") or {}).items():
        kind = one.get("type", "any") if isinstance(one, Mapping) else "any"
        kind = " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)
        if isinstance(one, Mapping) and isinstance(one.get("enum"), list):
            kind = " or ".join(json.dumps(value, default=str) for value in one["enum"])
        parts.append(f'"{name}": {kind}' + ("" if name in required else " (optional)"))
    return _short("{" + ", ".join(parts) + "}", 2 * _LONGEST)


def _taken(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return value
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if kinds and not any(_is(value, kind) for kind in kinds):
        value = next((v for kind in kinds if _is(v := _as(value, kind), kind)), value)
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping) and isinstance(known := schema.get("properties"), Mapping):
        return {key: _taken(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_taken(item, schema["items"]) for item in value]
    return value


def _as(value: Any, kind: str) -> Any:
    if kind == "string":
        return json.dumps(value) if isinstance(value, (bool, int, float)) else value
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.strip().lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return value


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return _is(value, "number") and (isinstance(value, int) or value.is_integer())
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    types = {"string": str, "boolean": bool, "array": list, "object": Mapping, "null": type(None)}
    return isinstance(value, types.get(kind, object))


def _short(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

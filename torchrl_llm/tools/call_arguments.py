"""Checks a call's arguments against the JSON schema of the tool, and converts types.

Models write ``"3"`` for 3 and ``"[1, 2]"`` for a list. The checker converts unambiguous values. For
all other values it raises an :class:`ArgumentError` with the expected type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 300
# Nested branches could take time that doubles with every level.
_MOST_VALUES = 10_000
_MOST_REFERENCES = 32


class ArgumentError(ValueError):
    """Raised when arguments do not match the schema of a tool."""


def argument_checker(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Make a function that checks the arguments of one tool.

    These values are converted to the type of the schema, at any depth:

    - a string that spells an integer, a number, a boolean, a list or an object, in JSON;
    - a number without a fraction to an integer (``3.0``);
    - a number or boolean to a string.

    The same applies inside ``anyOf``, ``oneOf``, ``allOf`` and references. ``null`` is valid for
    ``nullable`` arguments. If the schema itself is invalid, arguments are not checked; referenced
    documents are never downloaded.

    Args:
        schema: JSON schema of an object of arguments.

    Returns:
        A function that takes the arguments and returns the converted arguments; it raises
        :class:`ArgumentError`.

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
        torchrl_llm.tools.call_arguments.ArgumentError: 'n' is a required property
    """
    import referencing.jsonschema
    from jsonschema import exceptions, validators

    schema = _nullable(dict(schema))
    cls = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except exceptions.SchemaError:
        return dict
    # An empty registry, because the default registry would download referenced documents.
    validator = cls(schema, registry=referencing.Registry())
    root = referencing.Resource.from_contents(schema, referencing.jsonschema.DRAFT202012)
    resolver = referencing.Registry().resolver_with_root(root)

    def check(args: Mapping[str, Any]) -> dict[str, Any]:
        try:
            taken = _Taker(validator, resolver).take(dict(args), schema)
            error = exceptions.best_match(validator.iter_errors(taken))
        except (referencing.exceptions.Unresolvable, RecursionError) as failure:
            raise ArgumentError(f"they cannot be checked: {_short(str(failure))}") from failure
        if error is None:
            return taken
        place = error.json_path.removeprefix("$").lstrip(".")
        raise ArgumentError(_short(error.message) + (f" (at {_short(place)})" if place else ""))

    return check


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """Describe the arguments of a tool in one line, for a model that used wrong arguments.

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
        parts.append(f'"{name}": {_kind(one)}' + ("" if name in required else " (optional)"))
    return _short("{" + ", ".join(parts) + "}", 2 * _LONGEST)


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(schema.get("enum"), list):
        return " or ".join(json.dumps(value, default=str) for value in schema["enum"])
    branches = schema.get("anyOf") or schema.get("oneOf")
    if "type" not in schema and isinstance(branches, list):
        return " or ".join(dict.fromkeys(map(_kind, branches)))
    kinds = schema.get("type", "any")
    kinds = [*kinds] if isinstance(kinds, list) else [kinds]
    return " or ".join(map(str, kinds + ["null"] * (schema.get("nullable") is True)))


def _nullable(schema: Any) -> Any:
    """Express ``nullable``, which is not part of JSON schema, in the type."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    schema = {key: _nullable(item) for key, item in schema.items()}
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
        if isinstance(schema.get("enum"), list):
            schema["enum"] = [*schema["enum"], None]
    return schema


class _Taker:
    """Converts values to the types of a schema; other values are left unchanged."""

    def __init__(self, validator: Any, resolver: Any) -> None:
        self._validator, self._resolver = validator, resolver
        self._left = _MOST_VALUES

    def take(self, value: Any, schema: Any) -> Any:
        schema = self._resolved(schema)
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return value
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if kinds and not any(_is(value, kind) for kind in kinds):
            value = next((v for kind in kinds if _is(v := _as(value, kind), kind)), value)
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        for branches in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(branches, list) and not any(self._fits(value, b) for b in branches):
                taken = ((self.take(value, branch), branch) for branch in branches)
                value = next((v for v, branch in taken if self._fits(v, branch)), value)
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            value = self.take(value, part)
        if isinstance(value, Mapping):
            known = schema.get("properties")
            known = known if isinstance(known, Mapping) else {}
            others = schema.get("additionalProperties")
            return {key: self.take(item, known.get(key, others)) for key, item in value.items()}
        if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
            return [self.take(item, schema["items"]) for item in value]
        return value

    def _resolved(self, schema: Any) -> Any:
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._resolver.lookup(schema["$ref"]).contents
        return schema

    def _fits(self, value: Any, schema: Any) -> bool:
        return self._validator.evolve(schema=schema).is_valid(value)


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

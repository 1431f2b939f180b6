"""Tables of request fields: each protocol lists its fields, and one reader validates them all.

A table maps the name of a field to its kind; other fields are rejected. A kind is one of these:

- an annotation such as ``str | list`` or ``Annotated[int, In("[1, 128]")]``: the value is checked;
- a table, for an object, or a kind in a list, for a list: ``[{"name": str}]``;
- a function of the value and its path that returns the converted value;
- ``Only(False)``: the only accepted value, which has no effect;
- ``Any``: the value does not affect tokens and is ignored;
- a :class:`Field`, for further properties.

Next: :mod:`torchrl_llm.gateway.protocols.chat_completions` reads a request with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import isfunction
from typing import Annotated, Any, NamedTuple, get_type_hints

from torchrl_llm._checked import In, check
from torchrl_llm._registry import did_you_mean
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.gateway.calls import RefusedCallError
from torchrl_llm.modules.backends.backend_port import SamplingParams

Table = Mapping[str, Any]
LARGEST = 2**31 - 1
SAMPLING_HINTS = get_type_hints(SamplingParams, include_extras=True)
_LONGEST_MESSAGE = 500


class Field(NamedTuple):
    """A kind with further properties of a field.

    Attributes:
        kind: type of its value.
        name: internal name, if different. Fields with the same name must have the same value.
        needed: whether it is required.
        unused: whether its value is only checked, and not used.
    """

    kind: Any
    name: str | None = None
    needed: bool = False
    unused: bool = False


class Only:
    """The kind of a field whose only accepted values have no effect.

    Args:
        *values: accepted values.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values


def need(kind: Any, name: str | None = None) -> Field:
    """A required field.

    Args:
        kind: type of its value.
        name: internal name, if different.
    """
    return Field(kind, name, needed=True)


# -- the reader ------------------------------------------------------------------------------------


def refused(path: str, why: str) -> RefusedCallError:
    """The error of a field.

    Args:
        path: its name, with the names of the enclosing objects.
        why: the problem.
    """
    path = path[:_LONGEST_MESSAGE]
    return RefusedCallError(f"{path} {why}"[: 2 * _LONGEST_MESSAGE], field=path)


def read(kind: Any, value: Any, path: str) -> Any:
    """Convert a value; ``None`` if it has no effect.

    Args:
        kind: kind of the value, see the top of this file.
        value: value in the body.
        path: its place in the body, for example ``"messages.0.content"``.

    Raises:
        RefusedCallError: the value does not have this kind.
    """
    if isinstance(kind, Field):
        if value is not None:
            return read(kind.kind, value, path)
        if kind.needed:
            raise refused(path, "is missing")
    elif isinstance(kind, Only):
        if value not in kind.values:
            only = " or ".join(map(repr, kind.values))
            raise refused(path, f"can only be {only} here, got {value!r:.100}")
    elif isinstance(kind, dict):
        return read_object(kind, value, path)
    elif isinstance(kind, list):
        items = read(list, value, path)
        return [read(kind[0], item, f"{path}.{i}") for i, item in enumerate(items)]
    elif isfunction(kind):
        return kind(value, path)
    elif kind is not Any:
        return _checked(kind, value, path)
    return None


def _checked(hint: Any, value: Any, path: str) -> Any:
    # Infinity, and whole numbers too large for a tensor; NaN is not JSON.
    if isinstance(value, (int, float)) and abs(value) >= 2**64:
        raise refused(path, "must be a number below 2**64")
    short = value[:_LONGEST_MESSAGE] if isinstance(value, str) else value
    try:
        check(path, short, hint, none="null")
    except ConfigError as error:
        raise refused(path, str(error).removeprefix(f"{path} ")) from None
    return value


def read_some(table: Table, given: Any, path: str = "") -> dict[str, Any]:
    """The fields of an object that a table lists, by internal names; other fields are allowed.

    A ``null`` field counts as missing.

    Args:
        table: name to kind.
        given: the object.
        path: its place in the body; empty for the body itself.

    Raises:
        RefusedCallError: it is not an object, or a field has a wrong kind.
    """
    if not isinstance(given, dict):
        raise refused(path, f"must be an object, got {given!r:.100}")
    found: dict[str, Any] = {}
    for name, kind in table.items():
        field = kind if isinstance(kind, Field) else Field(kind)
        value = read(field, given.get(name), _within(path, name))
        if value is None or field.unused:
            continue
        if found.setdefault(field.name or name, value) != value:
            same = [each for each, other in table.items() if other == kind]
            raise refused(name, f"is {value}, and {' and '.join(same)} mean the same")
    return found


def read_object(table: Table, given: Any, path: str = "") -> dict[str, Any]:
    """Like :func:`read_some`, but other fields are rejected.

    Example:
        >>> table = {"n": Field(Annotated[int, In("[1, 8]")], "num_samples"), "best_of": Only(1)}
        >>> read_object(table, {"n": 2, "best_of": 1, "user": None})
        {'num_samples': 2}
        >>> read_object(table, {"n": 0})
        Traceback (most recent call last):
        ...
        torchrl_llm.gateway.calls.RefusedCallError: n must be in [1, 8], got 0
    """
    found = read_some(table, given, path)
    for name, value in given.items():
        if name not in table and value is not None:
            known = [each for each, kind in table.items() if isinstance(kind, Only)]
            near = did_you_mean(name[:_LONGEST_MESSAGE], [*SAMPLING_HINTS, *known])
            why = f"is no field that this gateway can honour{near}"
            raise refused(_within(path, name), why)
    return found


def _within(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def read_typed(
    tables: Mapping[str, Table], given: Any, path: str, unknown: str, default: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The type of an object and its fields, which depend on the type.

    Args:
        tables: the fields of each type.
        given: the object.
        path: its place in the body.
        unknown: error message for an unknown type, a format string.
        default: type of an object without one.
    """
    kind = read_some({"type": str}, given, path).get("type", default)
    if kind not in tables:
        raise refused(path, unknown.format(kind))
    return kind, read_object({"type": Any, **tables[kind]}, given, path)


# -- kinds that several protocols have -------------------------------------------------------------


def one_or_more(kind: Any) -> Callable[[Any, str], tuple[Any, ...] | None]:
    """The kind of a list; a single value is also accepted, and an empty list has no effect.

    Args:
        kind: type of each value.
    """

    def read_items(value: Any, path: str) -> tuple[Any, ...] | None:
        if not isinstance(value, list):
            return (read(kind, value, path),)
        return tuple(read([need(kind)], value, path)) or None

    return read_items


def texts(*types: str) -> Callable[[Any, str], str]:
    """The kind of a text, or of a list of parts whose texts are joined.

    Args:
        *types: types of text parts; parts of other types, such as images, are rejected.
    """
    tables, unknown = dict.fromkeys(types, PART), "may hold texts only, got a part of type {!r:.50}"

    def read_texts(value: Any, path: str) -> str:
        if isinstance(read(str | list, value, path), str):
            return value
        parts = [read_typed(tables, part, path, unknown, default="text") for part in value]
        return "".join(part["content"] for _, part in parts)

    return read_texts


def _stop(value: Any, path: str) -> tuple[str, ...] | None:
    strings = one_or_more(str)(value, path)
    if not all(strings or ()):
        raise refused(path, "must be without empty strings")
    return strings


def _top_k(value: Any, path: str) -> int:
    return max(0, read(Annotated[int, In(f"[-1, {LARGEST}]")], value, path))


PART: Table = {
    "text": need(str, "content"),
    # Notes of clients and of servers.
    **dict.fromkeys(("cache_control", "annotations", "citations"), Any),
    **dict.fromkeys(("logprobs", "parsed", "parsed_output"), Any),
}
LENGTH = Field(Annotated[int, In(f"[1, {LARGEST}]")], "max_new_tokens")
STOP = Field(_stop, "stop")
FUNCTION: Table = {
    "name": need(str),
    "description": str,
    "strict": Field(bool, unused=True),  # sampling is not constrained; parsers check the calls
    "cache_control": Any,
}
_OWN_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")
_FALSE = ("add_special_tokens", "background", "continue_final_message", "echo")
_FALSE += ("include_stop_str_in_output", "use_beam_search")
_TRUE = ("add_generation_prompt", "parallel_tool_calls", "skip_special_tokens")
_TRUE += ("spaces_between_special_tokens",)
BODY: Table = {
    **{name: SAMPLING_HINTS[name] for name in _OWN_NAMES},
    "top_k": _top_k,
    "stop_token_ids": one_or_more(Annotated[int, In(f"[0, {LARGEST}]")]),
    "model": str,
    "stream": bool,
    **dict.fromkeys(_FALSE, Only(False)),
    **dict.fromkeys(_TRUE, Only(True)),
    **dict.fromkeys(("frequency_penalty", "min_tokens", "presence_penalty"), Only(0)),
    **dict.fromkeys(("best_of", "length_penalty"), Only(1)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), Only({})),
    "functions": Only([]),
    "modalities": Only(["text"]),
    "response_format": Only({"type": "text"}),
    "service_tier": Only("auto", "default", "standard_only"),
    "suffix": Only(""),
}
"""The fields of a body in all protocols."""


# -- messages --------------------------------------------------------------------------------------


def canonical(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a message to canonical form.

    Args:
        message: input of :func:`~torchrl_llm.data.messages.canonical_message`.
        path: where it is in the body.
    """
    if message["role"] == "developer":
        message = {**message, "role": "system"}
    try:
        return canonical_message(message, path)
    except (DataError, RecursionError) as error:  # the latter for arguments with too many levels
        raise refused(path, str(error).removeprefix(f"{path} ")) from None


def joined(turn: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Join two messages of one turn; texts, reasoning and calls of the second are appended.

    Args:
        turn: the first.
        message: the second.
    """
    both = {name: turn[name] + message[name] for name in turn.keys() & message if name != "role"}
    return {**turn, **message, **both}

"""Fields of a request's body: each is checked as it is taken, and what nobody took is refused.

Next: :mod:`torchrl_llm.gateway.protocols.chat_completions` reads a request with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from torchrl_llm._checked import In, check
from torchrl_llm._registry import did_you_mean
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.gateway.calls import RefusedCallError
from torchrl_llm.modules.backends.backend_port import SamplingParams

LARGEST = 2**31 - 1
COUNT = Annotated[int, In(f"[1, {LARGEST}]")]
TOKEN = Annotated[int, In(f"[0, {LARGEST}]")]
TEXT_PARTS = ("text",)
# Notes of clients and of servers on a part of a message, which change no token.
PART_NOTES = ("cache_control", "annotations", "citations", "logprobs", "parsed", "parsed_output")
CALL_NOTES = ("parsed_arguments",)
# Each has one value, or a few, that asks for nothing; no other can be honoured.
_FALSE = ("add_special_tokens", "background", "continue_final_message", "echo")
_FALSE += ("include_stop_str_in_output", "use_beam_search")
_TRUE = ("add_generation_prompt", "parallel_tool_calls", "skip_special_tokens")
_TRUE += ("spaces_between_special_tokens",)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FALSE, (False,)),
    **dict.fromkeys(_TRUE, (True,)),
    **dict.fromkeys(("frequency_penalty", "min_tokens", "presence_penalty"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "suffix": ("",),
}
# Whatever they hold, the answer is the same.
IGNORED = ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
IGNORED += ("safety_identifier", "user")
_HINTS = get_type_hints(SamplingParams, include_extras=True)
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")
_TOP_K = Annotated[int, In(f"[-1, {LARGEST}]")]
_LONGEST_MESSAGE = 500


def refused(path: str, why: str) -> RefusedCallError:
    """The error of a field.

    Args:
        path: its name, with those of the objects that it is in.
        why: what is wrong with it.
    """
    path = path[:_LONGEST_MESSAGE]
    return RefusedCallError(f"{path} {why}"[: 2 * _LONGEST_MESSAGE], field=path)


class Fields:
    """The fields of one JSON object; those that are ``null`` count as left out.

    Args:
        given: the object.
        path: where it is in the body; empty for the body itself.

    Raises:
        RefusedCallError: it is no object.

    Example:
        >>> fields = Fields({"n": 2, "best_of": 1, "user": None})
        >>> fields.take("n", COUNT)
        2
        >>> fields.finish()
        >>> Fields({"n": 0}).take("n", COUNT)
        Traceback (most recent call last):
        ...
        torchrl_llm.gateway.calls.RefusedCallError: n must be in [1, 2147483647], got 0
    """

    def __init__(self, given: Any, path: str = "") -> None:
        if not isinstance(given, dict):
            raise refused(path, f"must be an object, got {given!r:.100}")
        self.path = path
        self._left = {name: value for name, value in given.items() if value is not None}

    def of(self, name: str) -> str:
        """The path of a field, ``"messages.0.content"``."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, hint: Any, default: Any = None) -> Any:
        """The value of a field.

        Args:
            name: of the field.
            hint: what it may be, as for ``torchrl_llm._checked.check``.
            default: where it is left out.

        Raises:
            RefusedCallError: the value is not what it may be.
        """
        value = self._left.pop(name, None)
        if value is None:
            return default
        path = self.of(name)
        # Infinity and whole numbers that no tensor holds; NaN is no JSON.
        if isinstance(value, (int, float)) and abs(value) >= 2**64:
            raise refused(path, "must be a number below 2**64")
        short = value[:_LONGEST_MESSAGE] if isinstance(value, str) else value
        try:
            check(path, short, hint, none="null")
        except ConfigError as error:
            raise refused(path, str(error).removeprefix(f"{path} ")) from None
        return value

    def need(self, name: str, hint: Any) -> Any:
        """As :meth:`take`, for a field that must be there."""
        value = self.take(name, hint)
        if value is None:
            raise refused(self.of(name), "is missing")
        return value

    def objects(self, name: str) -> list[Fields]:
        """The fields of each object in a list, which is empty where it is left out."""
        return objects(self.take(name, list, ()), self.of(name))

    def items(self, name: str, hint: Any) -> tuple[Any, ...]:
        """The values of a list; a single value may stand without one.

        Args:
            name: of the field.
            hint: what each may be.
        """
        given = self._left.pop(name, ())
        if not isinstance(given, (list, tuple)):
            return (Fields({name: given}, self.path).take(name, hint),)
        each = Fields(dict(enumerate(given)), self.of(name))
        return tuple(each.need(i, hint) for i in range(len(given)))

    def finish(
        self, neutral: Mapping[str, Sequence[Any]] = NEUTRAL, ignored: Collection[str] = IGNORED
    ) -> None:
        """Refuse what is left.

        Args:
            neutral: fields that may be there with one of these values.
            ignored: fields that may be there with any value.

        Raises:
            RefusedCallError: for the first other field.
        """
        for name, value in self._left.items():
            if name in ignored:
                continue
            if name not in neutral:
                near = did_you_mean(name[:_LONGEST_MESSAGE], [*_HINTS, *neutral])
                raise refused(self.of(name), f"is no field that this gateway can honour{near}")
            if value not in neutral[name]:
                only = " or ".join(map(repr, neutral[name]))
                raise refused(self.of(name), f"can only be {only} here, got {value!r:.100}")


def objects(values: Sequence[Any], path: str) -> list[Fields]:
    """The fields of each object in a list.

    Args:
        values: the list.
        path: where it is in the body.
    """
    return [Fields(each, f"{path}.{i}") for i, each in enumerate(values)]


def take_sampling(fields: Fields, *lengths: str, stop: str = "stop") -> dict[str, Any]:
    """The fields of :class:`~torchrl_llm.modules.SamplingParams` that a body sets.

    Args:
        fields: of the body.
        lengths: the names that the most tokens of an answer have.
        stop: the name that stop strings have.
    """
    taken = {name: fields.take(name, _HINTS[name]) for name in _SAMPLING}
    top_k = fields.take("top_k", _TOP_K)
    taken["top_k"] = 0 if top_k == -1 else top_k
    for name in lengths:
        length, before = fields.take(name, COUNT), taken.get("max_new_tokens")
        if None not in (length, before) and length != before:
            raise refused(name, f"is {length}, and {' and '.join(lengths)} mean the same")
        taken["max_new_tokens"] = before if length is None else length
    strings = fields.items(stop, str)
    if not all(strings):
        raise refused(stop, "must be without empty strings")
    taken |= {"stop": strings, "stop_token_ids": fields.items("stop_token_ids", TOKEN)}
    return {name: value for name, value in taken.items() if value is not None and value != ()}


def take_text(
    fields: Fields, name: str = "content", kinds: Collection[str] = TEXT_PARTS
) -> str | None:
    """A text, or the joined texts of a list of parts; ``None`` where it is left out.

    Args:
        fields: of what has the text.
        name: of the field that holds it.
        kinds: types of a part that is text.

    Raises:
        RefusedCallError: there is a part of another type, such as an image.
    """
    value = fields.take(name, str | list)
    if value is None or isinstance(value, str):
        return value
    return "".join(part_text(Fields(part, fields.of(name)), kinds) for part in value)


def part_text(part: Fields, kinds: Collection[str] = TEXT_PARTS) -> str:
    """The text of one part of a content.

    Args:
        part: its fields.
        kinds: types of a part that is text.
    """
    kind = part.take("type", str, "text")
    if kind not in kinds:
        raise refused(part.path, f"may hold texts only, got a part of type {kind!r:.50}")
    text = part.need("text", str)
    part.finish({}, PART_NOTES)
    return text


def function_tool(fields: Fields, parameters: str = "parameters") -> dict[str, Any]:
    """A tool in OpenAI's form.

    ``strict`` is left out: calls are sampled freely, and what reads them checks them.

    Args:
        fields: of the function.
        parameters: the name that the schema of its arguments has.
    """
    function = {
        "name": fields.need("name", str),
        "description": fields.take("description", str),
        "parameters": fields.take(parameters, dict),
    }
    fields.take("strict", bool)
    fields.finish({}, ("cache_control",))
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def shown_tools(fields: Fields, tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools that the model sees: none where ``tool_choice`` is ``"none"``.

    Args:
        fields: of the body.
        tools: those of the body.
    """
    choice = fields.take("tool_choice", str | dict, "auto")
    if choice not in ("auto", "none"):
        raise refused("tool_choice", f"can only be 'auto' or 'none' here, got {choice!r:.100}")
    return tuple(tools) if choice == "auto" else ()


def canonical(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A message in the form that this package stores.

    Args:
        message: as :func:`~torchrl_llm.data.messages.canonical_message` reads it.
        path: where it is in the body.
    """
    try:
        return canonical_message(message, path)
    except (DataError, RecursionError) as error:  # the latter of arguments with too many levels
        raise refused(path, str(error).removeprefix(f"{path} ")) from None

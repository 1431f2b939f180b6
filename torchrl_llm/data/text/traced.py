"""Renderings of a chat template from memory, for conversations of a structure it has seen.

A template is run once with :class:`Unknown` in the place of each text of a message. An unknown is
no string: it writes down what the template does with it. Where texts are put together, the result
says of which parts it consists; where the template decides by a text (``'</think>' in content``),
the question and its answer are kept. For other texts that give the same answers, the template takes
the same way, and its text is the same parts with the new texts in them.

What an unknown cannot follow (a loop over characters, JSON of a content) ends the run, and
conversations of that structure are rendered by the template, always. So is what depends on anything
but its arguments. Everything that is not the text of a message is part of the structure, exactly.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import _compile_jinja_template

_MAX_STRUCTURES, _MAX_WAYS = 256, 8
# Renderings of a structure before a template is run to follow it, which costs some of them.
_RARE = 8
_TEXTS = frozenset(
    {"strip", "lstrip", "rstrip", "lower", "upper", "replace", "removeprefix", "removesuffix"}
)
_LISTS = frozenset({"split", "rsplit", "partition", "rpartition"})
_ANSWERS = frozenset({"startswith", "endswith"})
# Filters and tests that do with an unknown what they do with a string; others must not meet one.
_FILTERS = frozenset({"default", "d", "length", "count"})
_TRUE_TESTS = frozenset({"string", "iterable", "sequence"})
_TESTS = frozenset(
    {"defined", "undefined", "none", "boolean", "true", "false", "number", "integer", "float"}
    | {"mapping", "eq", "==", "equalto", "ne", "!=", "in"}
)
_CHANCE = ("random",)
_GLOBALS = ("strftime_now", "lipsum")


class Untraceable(BaseException):
    """A template does with a text what an unknown cannot follow.

    No ``Exception``, because some of Jinja's tests and filters catch these.
    """


class _Term(NamedTuple):
    """A method of a text with its arguments, and the item of its result that is meant."""

    base: tuple[Any, ...]
    method: str
    args: tuple[Any, ...]
    item: int | None = None

    def value(self, texts: Sequence[str]) -> Any:
        result = getattr(_spelled(self.base, texts), self.method)(*self.args)
        return result if self.item is None else result[self.item]


def _spelled(parts: Sequence[Any], texts: Sequence[str]) -> str:
    """The text of parts: strings, numbers of texts, and terms."""
    return "".join(
        [
            part if type(part) is str else texts[part] if type(part) is int else part.value(texts)
            for part in parts
        ]
    )


class _Way:
    """One run of a template: its texts, and the questions it asked, with the answers."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.asked: list[tuple[_Term, Any]] = []
        self.parts: tuple[Any, ...] = ()

    def ask(self, base: tuple[Any, ...], method: str, *args: Any) -> Any:
        term = _Term(base, method, _plain(args))
        answer = term.value(self.texts)
        self.asked.append((term, answer))
        return answer

    def fits(self, texts: Sequence[str]) -> bool:
        """Whether the template takes this way with other texts."""
        return all(term.value(texts) == answer for term, answer in self.asked)


def _plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    for arg in args:
        if isinstance(arg, tuple):
            _plain(arg)
        elif type(arg) not in (str, int, bool, type(None), slice):
            raise Untraceable
    return args


class Unknown:
    """A text whose characters are not known: strings, numbers of texts, and terms, in a row."""

    def __init__(self, way: _Way, parts: tuple[Any, ...]) -> None:
        self._way, self._parts = way, parts

    def __getattr__(self, name: str) -> Any:
        if name in _TEXTS:
            return partial(self._derive, name)
        if name in _LISTS:
            return partial(self._cut, name)
        if name in _ANSWERS:
            return partial(self._way.ask, self._parts, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable

    def _derive(self, method: str, *args: Any) -> Unknown:
        """What a method makes of it that returns a text."""
        return Unknown(self._way, (_Term(self._parts, method, _plain(args)),))

    def _cut(self, method: str, *args: Any) -> _Pieces:
        return _Pieces(self._way, _Term(self._parts, method, _plain(args)))

    def __getitem__(self, key: Any) -> Unknown:
        if type(key) is not slice:
            raise Untraceable
        _plain((key.start, key.stop, key.step))
        return Unknown(self._way, (_Term(self._parts, "__getitem__", (key,)),))

    def __add__(self, other: Any) -> Unknown:
        return _joined((self, other))

    def __radd__(self, other: Any) -> Unknown:
        return _joined((other, self))

    def __bool__(self) -> bool:
        return self._way.ask(self._parts, "__ne__", "")

    def __len__(self) -> int:
        return self._way.ask(self._parts, "__len__")

    def __contains__(self, part: Any) -> bool:
        return self._way.ask(self._parts, "__contains__", part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (str, Unknown)) and self._way.ask(self._parts, "__eq__", other)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Untraceable

    __str__ = __repr__ = __format__ = __hash__ = __iter__ = __reversed__ = _refuse
    __int__ = __float__ = __complex__ = __index__ = __bytes__ = _refuse
    __mul__ = __rmul__ = __mod__ = __rmod__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


class _Pieces:
    """What a text was split into; only single pieces can be asked for."""

    def __init__(self, way: _Way, term: _Term) -> None:
        self._way, self._term = way, term

    def __getitem__(self, key: Any) -> Unknown:
        if type(key) is not int:
            raise Untraceable
        method, args = self._term.method, self._term.args
        # A partition has three pieces, what is split at a string a first and a last one.
        if method.endswith("partition"):
            there = -3 <= key < 3
        else:
            there = -1 <= key < 1 and bool(args) and type(args[0]) is str
        if not there:
            raise Untraceable
        return Unknown(self._way, (self._term._replace(item=key),))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable

    _refuse = Unknown._refuse
    __str__ = __repr__ = __format__ = __hash__ = __iter__ = __reversed__ = _refuse
    __len__ = __bool__ = __contains__ = __eq__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse
    __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


# -- what a template calls ------------------------------------------------------------------------


def _joined(chunks: Sequence[Any]) -> Any:
    """Strings and unknowns as one text."""
    way = next((chunk._way for chunk in chunks if type(chunk) is Unknown), None)
    if way is None:
        return "".join(chunks)
    parts: list[Any] = []
    for chunk in chunks:
        if type(chunk) is Unknown:
            parts += chunk._parts
        elif type(chunk) is str:
            parts.append(chunk)
        else:
            raise Untraceable
    return Unknown(way, tuple(parts))


def _as_text(value: Any = "") -> Any:
    return value if type(value) is Unknown else str(value)


def _concatenated(values: Sequence[Any]) -> Any:
    return _joined([_as_text(value) for value in values])


def _refused(*_: Any, **__: Any) -> Any:
    raise Untraceable


def _knowing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that must not meet an unknown."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(type(value) in (Unknown, _Pieces) for value in (*args, *kwargs.values())):
            raise Untraceable
        return function(*args, **kwargs)

    # Jinja reads off a function whether it wants the environment.
    vars(checked).update(getattr(function, "__dict__", {}))
    return checked


def _of_text(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is a method of strings."""

    def filtered(value: Any, *args: Any) -> Any:
        return value._derive(method, *args) if type(value) is Unknown else function(value, *args)

    return filtered


def _true_of_text(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test that all strings pass."""
    return lambda value: type(value) is Unknown or function(value)


@lru_cache(maxsize=64)
def _traceable(template: str) -> Callable[..., Any]:
    """A template of its own, which takes and returns unknowns."""
    compiled = _compile_jinja_template.__wrapped__(template)
    env = compiled.environment
    methods = {"trim": "strip", "lower": "lower", "upper": "upper"}
    own = {name: _of_text(method, env.filters[name]) for name, method in methods.items()}
    own |= {"string": _as_text}
    true = {name: _true_of_text(env.tests[name]) for name in _TRUE_TESTS}
    for table, known in ((env.filters, _FILTERS), (env.tests, _TESTS)):
        table.update({name: _knowing(f) for name, f in table.items() if name not in known})
    env.filters.update(own)
    env.tests.update(true)
    env.filters.update(dict.fromkeys(_CHANCE, _refused))
    env.globals.update(dict.fromkeys(_GLOBALS, _refused))
    env.concat = lambda chunks: _joined(list(chunks))
    # What the code that Jinja has written calls to put texts together.
    names = compiled.root_render_func.__globals__
    names.update(str=_as_text, str_join=_concatenated, markup_join=_refused)
    return compiled.render


# -- memory ---------------------------------------------------------------------------------------


class TracedTemplate:
    """A template that remembers ways to its texts.

    Args:
        template: the Jinja template.
        variables: what it may use besides the messages.
        render: renders prepared messages, tools and generation prompt by the template itself.
    """

    def __init__(
        self, template: str, variables: Mapping[str, Any], render: Callable[..., str]
    ) -> None:
        self._template, self._variables, self._slow = template, dict(variables), render
        # Ways by structure, ``None`` where there is none; and how often others were rendered.
        self._ways: dict[bytes, list[_Way] | None] = {}
        self._seen: dict[bytes, int] = {}
        self._fixed = not any(callable(value) for value in self._variables.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ways": {}, "_seen": {}}

    def render(self, prepared: list[dict], tools: list[dict] | None, prompt: bool) -> str:
        """What the template makes of these messages.

        Args:
            prepared: the messages in the template's form.
            tools: JSON schemas.
            prompt: end with the header of the model's turn.

        Raises:
            TemplateError: the template refuses the messages.
        """
        texts: list[str] = []
        try:
            key = marshal.dumps(
                (prompt, _checked(tools), [_structure(m, texts) for m in prepared]), 2
            )
        except ValueError:  # more than JSON
            return self._slow(prepared, tools, prompt)
        ways = self._ways.get(key, [])
        for way in ways or ():
            if way.fits(texts):
                return _spelled(way.parts, texts)
        text = self._slow(prepared, tools, prompt)
        if self._fixed and ways is not None and (ways or self._comes_again(key)):
            if len(self._ways) >= _MAX_STRUCTURES:
                self._ways.clear()
            self._ways[key] = self._learned(ways, prepared, tools, prompt, texts, text)
        return text

    def _comes_again(self, key: bytes) -> bool:
        """Whether a structure was rendered so often that more of its kind will come."""
        if len(self._seen) >= _MAX_STRUCTURES:
            self._seen.clear()
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        return seen > _RARE

    def _learned(
        self,
        ways: list[_Way],
        prepared: list[dict],
        tools: list[dict] | None,
        prompt: bool,
        texts: list[str],
        text: str,
    ) -> list[_Way] | None:
        """The ways with that of these messages; ``None`` where it cannot be followed."""
        way = _Way(texts)
        try:
            numbers = count()
            found = _traceable(self._template)(
                messages=[_with_unknowns(message, way, numbers) for message in prepared],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (Untraceable, Exception):  # whatever the template does with what is no string
            return None
        way.parts = found._parts if type(found) is Unknown else (found,)
        way.texts = ()
        followed = len(ways) < _MAX_WAYS and _spelled(way.parts, texts) == text
        return [*ways, way] if followed else None


def _is_text(name: Any, value: Any) -> bool:
    return type(value) is str and name not in ("role", "type")


def _is_parts(name: Any, value: Any) -> bool:
    return name == "content" and type(value) is list and all(type(part) is dict for part in value)


def _structure(message: dict, texts: list[str]) -> list[tuple]:
    """All of a message but its texts, which are appended to ``texts``."""
    out: list[tuple] = []
    for name, value in message.items():
        if _is_text(name, value):
            texts.append(value)
            out.append((name,))
        elif _is_parts(name, value):
            out.append((name, [_structure(part, texts) for part in value], None))
        else:
            out.append((name, _checked(value)))
    return out


def _checked(value: Any) -> Any:
    """The value itself if it is plain JSON; of other things the structure would not say all."""
    if type(value) is dict:
        for name, item in value.items():
            _checked(name)
            _checked(item)
    elif type(value) is list:
        for item in value:
            _checked(item)
    elif type(value) not in (str, bool, int, float, type(None)):
        raise ValueError(type(value))
    return value


def _with_unknowns(message: dict, way: _Way, numbers: Any) -> dict:
    """A copy of a message with unknowns for its texts, in the order of :func:`_structure`."""
    out = {}
    for name, value in message.items():
        if _is_text(name, value):
            out[name] = Unknown(way, (next(numbers),))
        elif _is_parts(name, value):
            out[name] = [_with_unknowns(part, way, numbers) for part in value]
        else:
            out[name] = value
    return out

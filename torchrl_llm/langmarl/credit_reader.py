"""Parser of a critic's answers: assigns texts to agents.

Four formats are tried in turn: a JSON object, bracket markers, thirds of a row of pistons, and the
whole text. A text goes only to the agents that it names; if it names nobody, it is for everyone.
Parsing never raises and takes linear time in the length of the answer.

Next: :mod:`torchrl_llm.langmarl.critic` asks for such answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from textwrap import indent
from typing import Any

CREDIT_FORMATS = ("json", "markers", "thirds")
"""The formats that an environment may request from its critic."""

_SEPARATOR = r"(?:[^\S\r\n]|[_\-\u2010\u2011])"
_SPLIT = re.compile(r"[\s_\-\u2010\u2011]+")
_RUNS = re.compile(r"\d+|\D+")
_OBJECT = re.compile(r'\{\s*"')
_DECODER = json.JSONDecoder(strict=False)
_MAX_DEPTH = 16
_MARKER = re.compile(
    r"(?:#{1,6}[^\S\n]*)?(?P<bold>\*\*)?\[(?P<label>[^\[\]\n]*+)\]:?(?(bold)\*\*):?"
)
_THIRD = re.compile(
    r"^[ \t#>*_\-\[]{0,12}(?:the )?(?P<third>left|middle|cent(?:er|re)|right)"
    r"(?P<what>(?:[ \t_-]{1,3}(?:third|side|section|part|group|pistons?|evaluation)"
    r"|[ \t]?\([^()\n]{0,60}\)){0,4})"
    r"(?:\](?:\*\*)?:?|(?:\*\*)?:(?:\*\*)?|\*\*|[ \t]{0,9}$)",
    re.IGNORECASE | re.MULTILINE,
)
_THIRDS = {"left": 0, "middle": 1, "center": 1, "centre": 1, "right": 2}


def parse_credit_response(
    response: Any, agent_names: Sequence[str], *, credit_format: str | None = None
) -> dict[str, str]:
    """Split a critic's answer into the texts of the agents.

    Names match regardless of case, spaces, ``_`` and ``-``: ``Agent 1`` is ``agent_1``, and never
    ``agent_10``. Numbers are not shifted to a different base.

    Args:
        response: the answer; anything except a text counts as empty.
        agent_names: names of the agents.
        credit_format: ``json``, ``markers`` or ``thirds`` to try this format first.

    Returns:
        A text for every agent; empty for an agent if the answer addresses only others.

    Example:
        >>> parse_credit_response('Well: {"Agent 1": "Be brief."}', ["agent_1", "agent_2"])
        {'agent_1': 'Be brief.', 'agent_2': ''}
        >>> parse_credit_response("Good work.", ["agent_1", "agent_2"])
        {'agent_1': 'Good work.', 'agent_2': 'Good work.'}
    """
    team = _team(tuple(dict.fromkeys(agent_names)))
    text = response.strip() if isinstance(response, str) else ""
    for name in sorted(_READERS, key=lambda name: name != credit_format):
        found = _READERS[name](text, team)
        if found is not None:
            return {agent: found.get(agent, "") for agent in team.names}
    return team.read_whole(text)


def thirds_of(agent_names: Sequence[str]) -> dict[str, int] | None:
    """The third of the row in which each piston is: 0 left, 1 middle, 2 right.

    Args:
        agent_names: names of the agents.

    Returns:
        A number for each name; ``None`` unless there are at least three, called ``piston_0``,
        ``piston_1`` and so on.

    Example:
        >>> thirds_of(["piston_0", "piston_1", "piston_2"])
        {'piston_0': 0, 'piston_1': 1, 'piston_2': 2}
    """
    total = len(agent_names)
    places = {_key(_parts(f"piston_{place}")): place for place in range(total)}
    keys = [_key(_parts(name)) for name in agent_names]
    if total < 3 or set(keys) != set(places):
        return None
    return {n: places[key] * 3 // total for n, key in zip(agent_names, keys, strict=True)}


class _Team:
    """The names of a team, as they appear in labels and in prose."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.thirds = thirds_of(names)
        self._by_key: dict[str, list[str]] = {}
        for name in names:
            self._by_key.setdefault(_key(_parts(name)), []).append(name)
        self._mention = _mention_pattern(names)

    def who(self, label: str) -> str | None:
        """The agent of a key or a marker; ``None`` if it is not in the team."""
        if label in self.names:
            return label
        parts = _parts(label)
        bare = parts[:-1] if parts[-1:] == ["evaluation"] else parts
        for these in (parts, bare, bare[1:] if bare[:1] == ["agent"] else []):
            found = self._by_key.get(_key(these), []) if these else []
            if len(found) == 1:
                return found[0]
        return None

    def read_whole(self, text: str) -> dict[str, str]:
        """The text for the agents that it names, or for everyone; unknown names also count."""
        named = {self.who(match[0]) for match in self._mention.finditer(text)}
        return {name: text if name in named or not named else "" for name in self.names}


_team = lru_cache(maxsize=64)(_Team)


def _parts(label: str) -> list[str]:
    return [run for word in _SPLIT.split(label.casefold()) for run in _RUNS.findall(word)]


def _joined(parts: Sequence[str], pieces: Sequence[str], number_gap: str, gap: str) -> str:
    gaps = [a.isdecimal() and b.isdecimal() for a, b in pairwise(parts)]
    behind = [*(number_gap if numbers else gap for numbers in gaps), ""]
    return "".join(piece + end for piece, end in zip(pieces, behind, strict=False))


def _key(parts: Sequence[str]) -> str:
    """Join the parts, with a gap only between numbers: ``agent_1_1`` is not ``agent_11``."""
    return _joined(parts, parts, " ", "")


def _mention_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Finds each name as a separate word, and unknown names that differ only in the number."""
    patterns = set()
    for parts in filter(None, map(_parts, names)):
        pieces = [re.escape(part) for part in parts]
        if len(parts) > 1 and parts[-1].isdecimal():
            pieces[-1] = r"\d++"
        patterns.add(_joined(parts, pieces, _SEPARATOR + "+", _SEPARATOR + "*"))
    either = "|".join(sorted(patterns, key=len, reverse=True)) or r"(?!)"
    return re.compile(rf"(?<![^\W_])(?:{either})(?=evaluation|[\W_]|$)", re.IGNORECASE)


def _read_json(text: str, team: _Team) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for value in _objects(text):
        found |= _addressed(value, team)
    return found or None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text.

    A failed attempt may read all remaining text, so the number of attempts is limited.
    """
    budget, end = 10_000_000 + 64 * len(text), 0
    for match in _OBJECT.finditer(text):
        start = match.start()
        if start < end or budget < 0:
            continue
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            budget -= len(text) - start
        else:
            yield value


def _addressed(value: Any, team: _Team) -> dict[str, str]:
    """The texts under agent names, on the outermost level that has such names."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        found: dict[str, list[str]] = {}
        for pairs in (item.items() for item in level if isinstance(item, dict)):
            for key, inner in pairs:
                if (name := team.who(key)) is not None:
                    found.setdefault(name, []).append(_readable(inner))
        if found:
            return {name: "\n".join(filter(None, texts)) for name, texts in found.items()}
        lists = (list(i.values()) if isinstance(i, dict) else i for i in level)
        level = [inner for items in lists if isinstance(items, list) for inner in items]
    return {}


def _readable(value: Any, depth: int = 0) -> str:
    """A JSON value as readable text."""
    if isinstance(value, str):
        return value.strip()
    if value is None or depth > _MAX_DEPTH:
        return ""
    if isinstance(value, dict):
        return "\n".join(_line(f"{key}:", inner, depth + 1) for key, inner in value.items())
    if isinstance(value, list):
        return "\n".join(_line("-", inner, depth + 1) for inner in value)
    return json.dumps(value)


def _line(head: str, value: Any, depth: int) -> str:
    text = _readable(value, depth)
    nested = isinstance(value, dict | list) and text
    return f"{head}\n{indent(text, '  ')}" if nested else f"{head} {text}".rstrip()


def _read_markers(text: str, team: _Team) -> dict[str, str] | None:
    found = []
    for match in _MARKER.finditer(text):
        if match["label"].rstrip().casefold().endswith("evaluation"):
            name = team.who(match["label"])
            before = text[max(0, match.start() - 1) : match.start()]
            if name is not None or before in ("", "\n"):
                found.append((match, name))
    return _sections(text, found)


def _read_thirds(text: str, team: _Team) -> dict[str, str] | None:
    if team.thirds is None:
        return None
    found = [(match, _THIRDS[match["third"].lower()]) for match in _THIRD.finditer(text)]
    if len({third for _, third in found}) < 2 and not any(match["what"] for match, _ in found):
        return None  # a single "Right: ..." is the start of a sentence
    sections = _sections(text, found) or {}
    return {name: sections.get(third, "") for name, third in team.thirds.items()}


def _sections(text: str, found: Sequence[tuple[re.Match[str], Any]]) -> dict[Any, str] | None:
    """The text between each heading and the next; ``None`` if no heading names an agent."""
    ends = [match.start() for match, _ in found[1:]] + [len(text)]
    sections: dict[Any, list[str]] = {}
    for (match, name), end in zip(found, ends, strict=False):
        if name is not None:
            sections.setdefault(name, []).append(text[match.end() : end].strip())
    return {name: "\n\n".join(filter(None, texts)) for name, texts in sections.items()} or None


_READERS: dict[str, Callable[[str, _Team], dict[str, str] | None]] = {
    "json": _read_json,
    "markers": _read_markers,
    "thirds": _read_thirds,
}

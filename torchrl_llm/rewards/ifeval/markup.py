"""Instructions about markup: bullets, highlights, sections, titles, JSON, fixed answers."""

from __future__ import annotations

import json
import re

from torchrl_llm.rewards.ifeval.instructions import instruction

_OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+\S", re.MULTILINE)
# Bold first, or its inner stars would be read as an empty highlight.
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_BULLET_STAR = re.compile(r"^[ \t]*\*[ \t]+", re.MULTILINE)
_FENCE = "```"
_LABEL = re.compile(r"\A[ \t]*json\b", re.IGNORECASE)


@instruction("detectable_format:number_bullet_lists")
def has_number_of_bullets(response: str, *, num_bullets: int) -> bool:
    """Whether there are exactly so many lines that begin with ``*`` or ``-`` and white space."""
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:constrained_response")
def is_constrained(response: str) -> bool:
    """Whether it holds one of *My answer is yes.*, *... is no.* and *... is maybe.* in any case."""
    folded = response.casefold()
    return any(option in folded for option in _OPTIONS)


@instruction("detectable_format:number_highlighted_sections")
def has_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """Whether at least so many pieces of a line stand between stars, ``*so*`` or ``**so**``.

    The star of a bullet begins no such piece.
    """
    text = _BULLET_STAR.sub("", response)
    pieces = (match[1] or match[2] for match in _HIGHLIGHT.finditer(text))
    return sum(bool(piece.strip()) for piece in pieces) >= num_highlights


@instruction("detectable_format:multiple_sections")
def has_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """Whether at least so many sections begin with a mark and a number, ``Section 1`` for example.

    The mark is compared as it is written; ``section_spliter`` is its name in the data.
    """
    mark = re.escape(section_spliter.strip())
    return len(re.findall(rf"(?<!\w){mark}\s?\d+", response)) >= num_sections


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    """Whether the whole response is JSON, in a Markdown fence or not."""
    text = response.strip()
    if len(text) > 6 and text.startswith(_FENCE) and text.endswith(_FENCE):
        text = _LABEL.sub("", text[3:-3])
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    # Python's parser takes NaN and Infinity, which are not JSON.
    raise ValueError(name)


@instruction("detectable_format:title")
def has_title(response: str) -> bool:
    """Whether a title stands on one line between double angular brackets, ``<<title>>``."""
    for line in response.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if begin >= 0 and line[begin:end].strip("<> \t"):
            return True
    return False

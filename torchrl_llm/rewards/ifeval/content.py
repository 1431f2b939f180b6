"""Instructions about what stands where: placeholders, a postscript, beginning, end, commas."""

from __future__ import annotations

import re

from torchrl_llm.rewards.ifeval.instructions import instruction
from torchrl_llm.rewards.ifeval.text import split_parts

_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
# Other scripts have commas too: Arabic, Chinese and Japanese ones, and their wide and small forms.
_COMMA = re.compile(r"[,\u060c\u3001\uff0c\ufe50\ufe51\uff64]")


@instruction("detectable_content:number_placeholders")
def has_placeholders(response: str, *, num_placeholders: int) -> bool:
    """Whether there are at least so many placeholders in square brackets, ``[name]``."""
    count = sum(bool(name.strip()) for name in _PLACEHOLDER.findall(response))
    return count >= num_placeholders


@instruction("detectable_content:postscript")
def has_postscript(response: str, *, postscript_marker: str) -> bool:
    """Whether a postscript begins with the marker, ``P.S.`` for example.

    Case, white space between the letters and the dot behind ``P.P.S`` do not matter; the marker
    does not count inside a word, nor ``P.S.`` inside ``P.P.S.``
    """
    marker = "".join(postscript_marker.split())
    spaced = r"\s?".join(re.escape(c) for c in marker)
    behind = r"(?!\w)" if marker[-1].isalnum() else ""
    return bool(re.search(rf"(?<![\w.]){spaced}{behind}", response, re.IGNORECASE))


@instruction("startend:end_checker")
def ends_with(response: str, *, end_phrase: str) -> bool:
    """Whether the response ends with a phrase, in any case; a closing quote may follow it."""
    text = response.strip().strip('"').rstrip()
    return text.casefold().endswith(end_phrase.strip().casefold())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """Whether the whole response stands between double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("punctuation:no_comma")
def lacks_commas(response: str) -> bool:
    """Whether there is no comma, of whatever script."""
    return not _COMMA.search(response)


@instruction("combination:repeat_prompt")
def repeats_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """Whether the response begins with the request, word for word, in any case."""
    return response.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


@instruction("combination:two_responses")
def has_two_responses(response: str) -> bool:
    """Whether there are two different answers with ``******`` between them.

    A divider at the very beginning or end divides nothing.
    """
    parts = split_parts(response, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]

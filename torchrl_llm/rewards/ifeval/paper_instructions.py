"""The 25 instructions of the paper: markup, contents, keywords, lengths, language and case.

The language is that which ``langdetect`` finds.
"""

from __future__ import annotations

import json
import re
import threading
from functools import lru_cache
from itertools import islice
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval.instructions import Relation, holds, instruction
from torchrl_llm.rewards.ifeval.text import (
    count_lettered_words,
    each_sentence,
    split_paragraphs,
    split_parts,
    split_words,
)

# An option is a sentence of its own: what precedes it ends a line or a sentence, markup aside.
_OPTION = re.compile(r"my answer is (?:yes|no|maybe)\.(?!\w)", re.IGNORECASE)
_BEFORE_OPTION = re.compile(r"[^\w\n.!?:\u2026]*(?:[\n.!?:\u2026]|\Z)")
_WINDOW = 16
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
    """Whether a sentence is *My answer is yes.*, *... is no.* or *... is maybe.*, in any case.

    *I doubt that my answer is yes.* is none of them.
    """
    for option in _OPTION.finditer(response):
        before = response[max(0, option.start() - _WINDOW) : option.start()]
        if _BEFORE_OPTION.match(before[::-1]):
            return True
    return False


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
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


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


@instruction("keywords:existence")
def contains_keywords(response: str, *, keywords: list[str]) -> bool:
    """Whether every keyword occurs, in any case, also as a part of a longer word."""
    folded = response.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


@instruction("keywords:forbidden_words")
def lacks_words(response: str, *, forbidden_words: list[str]) -> bool:
    """Whether no forbidden word occurs as a word of its own, in any case."""
    words = "|".join(re.escape(word) for word in forbidden_words)
    return not re.search(rf"(?<!\w)(?:{words})(?!\w)", response, re.IGNORECASE)


@instruction("keywords:frequency")
def has_keyword_frequency(
    response: str, *, keyword: str, frequency: int, relation: Relation
) -> bool:
    """Whether a keyword occurs often, or rarely, enough; parts of longer words count."""
    return holds(response.casefold().count(keyword.strip().casefold()), relation, frequency)


@instruction("keywords:letter_frequency")
def has_letter_frequency(
    response: str, *, letter: str, let_frequency: int, let_relation: Relation
) -> bool:
    """Whether a letter (or another character, ``!`` for example) occurs often enough, in any case.

    Raises:
        RewardError: for more than one character.
    """
    if len(letter) != 1:
        raise RewardError(f"letter must be one character, got {letter!r}")
    return holds(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("length_constraints:number_words")
def has_number_of_words(response: str, *, relation: Relation, num_words: int) -> bool:
    """Whether there are at least, or less than, so many words."""
    return holds(len(split_words(response)), relation, num_words)


@instruction("length_constraints:number_sentences")
def has_number_of_sentences(response: str, *, relation: Relation, num_sentences: int) -> bool:
    """Whether there are at least, or less than, so many sentences."""
    counted = sum(1 for _ in islice(each_sentence(response), num_sentences))
    return holds(counted, relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def has_number_of_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Whether there are exactly so many paragraphs with the divider ``***`` between them.

    A divider at the very beginning or end divides nothing; two dividers with nothing between them
    are an empty paragraph, and no answer.
    """
    parts = split_parts(response, "***")
    return all(parts) and len(parts) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def begins_nth_paragraph(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Whether there are exactly so many paragraphs, and one of them begins with a word.

    Paragraphs stand between blank lines. The word counts in any case, behind an opening quote or
    markup and before punctuation.
    """
    paragraphs = split_paragraphs(response)
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = re.match(
        r"[\"'\u201c\u2018*_#>\s]*([^\s.,?!;:\"'\u201d\u2019*_]*)", paragraphs[nth_paragraph - 1]
    )
    return first[1].casefold() == first_word.strip().casefold()


# The detector guesses at random below this ("yes." is Turkish to it).
_FEWEST_WORDS = 6
# Part of a word: letters and digits, with apostrophes, dots and hyphens between them.
_TOKEN = re.compile(r"[^\W_]+(?:['’.\-][^\W_]+)*")
_LOCK = threading.Lock()


@lru_cache(maxsize=1)
def _detectors() -> Any:
    """A factory of detectors of our own: the package's own one is shared and has no seed."""
    module = require(
        "langdetect.detector_factory",
        extra="ifeval",
        feature="detecting the language of a response",
    )
    factory = module.DetectorFactory()
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


def detect_language(text: str) -> str | None:
    """The most probable language, always the same one for the same text.

    Args:
        text: any text; of what is no address, only the first 10,000 characters are looked at.

    Returns:
        A code such as ``"en"`` or ``"zh-cn"``, ``None`` for a text without letters.

    Raises:
        MissingExtraError: without ``langdetect``.

    Example:
        >>> detect_language("The weather is fine today."), detect_language("1 + 1 = 2")
        ('en', None)
    """
    found = most_probable_language(text)
    return found if found in known_languages() else None


def most_probable_language(text: str) -> str | None:
    """What the detector says: a code, ``"unknown"``, or ``None`` where it finds no letters.

    Args:
        text: as of :func:`detect_language`.
    """
    with _LOCK:  # the profiles are loaded once, whoever comes first
        detector = _detectors().create()
    # The detector does the same, and composes two characters to one, before it cuts the text.
    text = detector.MAIL_RE.sub(" ", detector.URL_RE.sub(" ", text))
    return _detect(text[: 2 * detector.max_text_length])


@lru_cache(maxsize=1024)
def _detect(text: str) -> str | None:
    detector = _detectors().create()
    detector.append(text)
    try:
        return detector.detect()
    except require(
        "langdetect", extra="ifeval", feature="detecting a language"
    ).LangDetectException:
        return None  # no letters of any script


def known_languages() -> list[str]:
    """The codes that the detector knows."""
    with _LOCK:
        return _detectors().get_lang_list()


@instruction("language:response_language")
def is_in_language(response: str, *, language: str) -> bool:
    """Whether the response is written in a language.

    Raises:
        RewardError: for a code that the detector does not know, which no response could satisfy.
    """
    known = known_languages()
    if not any(code.partition("-")[0] == language or code == language for code in known):
        raise RewardError(f"language {language!r} cannot be detected, only {sorted(known)}")
    found = detect_language(response)
    return found is not None and language in (found, found.partition("-")[0])


def _is_english(text: str) -> bool:
    if count_lettered_words(text, _FEWEST_WORDS) < _FEWEST_WORDS:
        return text.isascii()
    # Words in capitals are invisible to the detector.
    return detect_language(text.lower()) == "en"


@instruction("change_case:english_capital")
def is_upper_case_english(response: str) -> bool:
    """Whether the response is English without a lower-case letter.

    Fewer than six words are too few to tell a language: then plain ASCII counts as English.
    """
    return response.isupper() and _is_english(response)


@instruction("change_case:english_lowercase")
def is_lower_case_english(response: str) -> bool:
    """Whether the response is English without a capital letter; short ones as for capitals."""
    return response.islower() and _is_english(response)


@instruction("change_case:capital_word_frequency")
def has_capital_words(response: str, *, capital_frequency: int, capital_relation: Relation) -> bool:
    """Whether at least, or less than, so many words are written in capitals, ``A`` and ``I`` too.

    ``WELL-KNOWN``, ``DON'T`` and ``U.S.`` are one word each.
    """
    count = sum(word.isupper() for word in _TOKEN.findall(response))
    return holds(count, capital_relation, capital_frequency)

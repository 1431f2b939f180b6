"""Instructions about language and case; the language is that which ``langdetect`` finds."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval.instructions import Relation, holds, instruction
from torchrl_llm.rewards.ifeval.text import split_words

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
        text: any text; no more than its first 10,000 characters are looked at.

    Returns:
        A code such as ``"en"`` or ``"zh-cn"``, ``None`` for a text without letters.

    Raises:
        MissingExtraError: without ``langdetect``.

    Example:
        >>> detect_language("The weather is fine today."), detect_language("1 + 1 = 2")
        ('en', None)
    """
    # The detector cuts the text itself, but first looks for addresses in all of it.
    return _detect(text[:12_000])


@lru_cache(maxsize=1024)
def _detect(text: str) -> str | None:
    with _LOCK:  # the profiles are loaded once, whoever comes first
        factory = _detectors()
    detector = factory.create()
    detector.append(text)
    try:
        found = detector.detect()
    except require(
        "langdetect", extra="ifeval", feature="detecting a language"
    ).LangDetectException:
        return None  # no letters of any script
    return None if found == detector.UNKNOWN_LANG else found


@instruction("language:response_language")
def is_in_language(response: str, *, language: str) -> bool:
    """Whether the response is written in a language.

    Raises:
        RewardError: for a code that the detector does not know, which no response could satisfy.
    """
    with _LOCK:
        known = _detectors().get_lang_list()
    if not any(code.partition("-")[0] == language or code == language for code in known):
        raise RewardError(f"language {language!r} cannot be detected, only {sorted(known)}")
    found = detect_language(response)
    return found is not None and language in (found, found.partition("-")[0])


def _is_english(text: str) -> bool:
    if len(split_words(text)) < _FEWEST_WORDS:
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

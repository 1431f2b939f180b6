"""Instructions about words and letters that must or must not occur."""

from __future__ import annotations

import re

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval.instructions import Relation, holds, instruction


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

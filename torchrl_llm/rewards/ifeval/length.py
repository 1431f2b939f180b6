"""Instructions about numbers of words, sentences and paragraphs."""

from __future__ import annotations

import re

from torchrl_llm.rewards.ifeval.instructions import Relation, holds, instruction
from torchrl_llm.rewards.ifeval.text import (
    split_paragraphs,
    split_parts,
    split_sentences,
    split_words,
)


@instruction("length_constraints:number_words")
def has_number_of_words(response: str, *, relation: Relation, num_words: int) -> bool:
    """Whether there are at least, or less than, so many words."""
    return holds(len(split_words(response)), relation, num_words)


@instruction("length_constraints:number_sentences")
def has_number_of_sentences(response: str, *, relation: Relation, num_sentences: int) -> bool:
    """Whether there are at least, or less than, so many sentences."""
    return holds(len(split_sentences(response)), relation, num_sentences)


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

"""Words, sentences and paragraphs of a response, without language data.

The counts are rules that fit in a page, so they are the same on every machine: a word is a run of
letters and digits, a sentence ends with its mark and white space. English abbreviations, initials
and the numbers of a list end no sentence.

Next: :mod:`torchrl_llm.rewards.ifeval.paper_instructions` asks for numbers of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORD = re.compile(r"\w+")
_MARKS = r".!?\u2026\u061f\u06d4\u0964\u0965"
# A mark that ends a sentence may be followed by closing quotes and brackets. Chinese and Japanese
# marks need no white space behind them. Each run of marks is tried once, from its beginning.
_END = re.compile(
    rf"(?<![{_MARKS}])(?P<mark>[{_MARKS}]++)[\"'\u201d\u2019\u00bb)\]}}*_]*+(?=\s|$)"
    r"|[\u3002\uff01\uff1f]++[\u300d\u300f\u201d\u2019\uff09]*+"
)
# Both are read from the mark backwards.
_LINE_START = re.compile(r"[ \t]*(?:\n|\Z)")
_LAST_WORD = re.compile(r"[^\s(\[{\"'\u201c\u2018*_]*")
_LETTER = re.compile(r"[^\W\d_]")
_WINDOW = 16
_NEXT_WORD = re.compile(r"[\s\"'\u201c\u2018(\[*_]*(\w*)")
# They stand before a name or a number and end no sentence.
_NEVER_LAST = _set(
    "mr mrs ms messrs mx dr prof st sen rep gov gen col lt capt sgt cpl rev hon pres vs e.g i.e cf "
    "fig figs eq vol approx viz"
)
# They end a sentence where a word follows that begins one.
_MAYBE_LAST = _set(
    "al etc inc ltd co corp llc jr sr u.s u.s.a u.k u.n e.u a.m p.m b.c a.d b.c.e c.e d.c ph.d m.d "
    "b.a m.a b.s m.s jan feb mar apr jun jul aug sept sep oct nov dec dept est ave blvd rd p.s "
    "p.p.s"
)
_STARTERS = _set(
    "the a an this that these those it he she we they i you my his her our their its there here in "
    "on at for from with as if when while after before but and so or yet however then what who "
    "why how where which is are do does did can will would should please"
)


def split_words(text: str) -> list[str]:
    """The words: runs of letters, digits and underscores, so that *don't* is two.

    Combining marks and invisible joiners belong to the word in which they stand, which matters for
    Hindi or Persian; they are left out of what is returned.

    Example:
        >>> split_words("Don't panic, it's 4.5 km!")
        ['Don', 't', 'panic', 'it', 's', '4', '5', 'km']
    """
    if not text.isascii():
        text = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Mc", "Me", "Cf"))
    return _WORD.findall(text)


def split_sentences(text: str) -> list[str]:
    """The sentences, stripped; a piece without letters is none.

    A sentence ends with ``. ! ?`` or their like in other scripts, before white space or the end of
    the text. The end of a line ends no sentence: a heading belongs to what follows it.

    Args:
        text: any text; time is linear in its length.

    Example:
        >>> split_sentences("Dr. No paid 4.50 dollars. 1. Did he? Yes!")
        ['Dr. No paid 4.50 dollars.', '1. Did he?', 'Yes!']
    """
    return list(each_sentence(text))


def each_sentence(text: str) -> Iterator[str]:
    """The sentences of :func:`split_sentences` one by one, for who needs only the first few."""
    start, seen, lettered = 0, 0, False
    # A text in lower case throughout begins its sentences in lower case too.
    lower = text.islower()
    for match in _END.finditer(text):
        begin, end = match.span()
        lettered = lettered or _has_letter(text, seen, end)
        seen = end
        # Without a letter, it is the number of a list and belongs to what follows.
        if not lettered:
            continue
        before, behind = text[max(0, begin - 2 * _WINDOW) : begin], text[end : end + 4 * _WINDOW]
        if match["mark"] != "." or _ends(before, behind, lower):
            yield text[start:end].strip()
            start, lettered = end, False
    rest = text[start:].strip()
    if _has_letter(rest, 0, len(rest)):
        yield rest


def _has_letter(text: str, start: int, end: int) -> bool:
    """Whether a letter stands between two places; fractions and raised digits are none."""
    found = _LETTER.search(text, start, end)
    while found is not None and not found[0].isalpha():
        found = _LETTER.search(text, found.end(), end)
    return found is not None


@lru_cache(maxsize=4096)
def _ends(before: str, behind: str, lower: bool) -> bool:
    """Whether a full stop ends a sentence, by what stands around it; asked often of one mark.

    A text in lower case has no other hint than words.
    """
    # No abbreviation is longer; the bound keeps the time linear in a text without spaces.
    last = _LAST_WORD.match(before[: -_WINDOW - 1 : -1])[0][::-1]
    word = last.lower()
    if word in _NEVER_LAST:
        return False
    rest = before[: len(before) - len(last)]
    if last.isdigit() and _LINE_START.match(rest[: -_WINDOW - 1 : -1]):
        return False  # the number of a list
    # "I" is a pronoun more often than an initial.
    initial = len(last) == 1 and last.isalpha() and last.isupper() and last != "I"
    if not initial and word not in _MAYBE_LAST:
        return True
    following = _NEXT_WORD.match(behind)[1]
    starts = following.lower() in _STARTERS and (lower or following[0].isupper())
    return not following or starts


def count_lettered_words(text: str, enough: int) -> int:
    """How many words have a letter, so that the numbers of a list are none; no more than enough.

    Example:
        >>> count_lettered_words("1. uno 2. dos 3. tres", 2), count_lettered_words("1. uno", 2)
        (2, 1)
    """
    words = (word for word in split_words(text) if _has_letter(word, 0, len(word)))
    return sum(1 for _ in islice(words, enough))


def split_paragraphs(text: str) -> list[str]:
    r"""Parts between blank lines, stripped; empty ones are left out.

    Example:
        >>> split_paragraphs("One.\n\n\n \nTwo,\nstill two.")
        ['One.', 'Two,\nstill two.']
    """
    return [part.strip() for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()]


def split_parts(text: str, divider: str) -> list[str]:
    """Parts between dividers, stripped; a divider at the very beginning or end divides nothing.

    Example:
        >>> split_parts("*** a *** b ******", "***")
        ['a', 'b', '']
    """
    parts = [part.strip() for part in text.split(divider)]
    if not parts[0]:
        parts = parts[1:]
    return parts[:-1] if parts and not parts[-1] else parts

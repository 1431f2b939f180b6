"""Special-token strings inside contents, carried through a template as private codes.

A user who types ``<|im_end|>`` must not end a turn. Before rendering, each special-token string of
a content is replaced by a code of two private-use characters, which no template looks at; after
rendering, the code is turned back and its place is remembered as *literal*. The tokenizer
(:mod:`torchrl_llm.data.formatter.codec`) encodes literal places as plain characters.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from torchrl_llm.errors import TokenizerError

ESCAPE = "\uf8ff"
_FIRST = 0xE000
_CAPACITY = 0xF8FF - _FIRST


class Shield:
    """Replace marker strings by codes and turn the codes back.

    Args:
        markers: the strings that must not be read as special tokens. Markers of a single character
            or of white space only cannot be told from text and are left alone.

    Example:
        >>> shield = Shield(["<|im_end|>"])
        >>> covered = shield.cover("say <|im_end|> aloud")
        >>> "<|im_end|>" in covered
        False
        >>> shield.uncover(covered)
        ('say <|im_end|> aloud', [(4, 14)])
    """

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted(
            {m for m in markers if len(m) > 1 and m.strip()}, key=lambda m: (-len(m), m)
        )
        if len(ordered) > _CAPACITY:
            raise TokenizerError(
                f"the tokenizer has {len(ordered)} special tokens, at most {_CAPACITY} can be "
                "shielded"
            )
        self.markers = tuple(ordered)
        # The escape character itself is doubled, so that a content that holds it stays readable.
        self._codes = {ESCAPE: ESCAPE * 2}
        self._codes.update((m, ESCAPE + chr(_FIRST + k)) for k, m in enumerate(ordered))
        self._strings = {code: marker for marker, code in self._codes.items()}
        self._pattern = re.compile("|".join(re.escape(m) for m in (*ordered, ESCAPE)))
        self._structure = re.compile("|".join(re.escape(m) for m in ordered)) if ordered else None

    def cover(self, text: str) -> str:
        """The text with each marker replaced by its code; the same object if it has none."""
        if self._pattern.search(text) is None:
            return text
        return self._pattern.sub(lambda match: self._codes[match.group()], text)

    def cover_tree(self, value: Any) -> Any:
        """Cover every string inside nested lists and mappings (tool schemas, arguments)."""
        if isinstance(value, str):
            return self.cover(value)
        if isinstance(value, Mapping):
            return {self.cover_tree(k): self.cover_tree(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cover_tree(item) for item in value]
        return value

    def uncover(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Turn codes back.

        Returns:
            The text, and the half-open character ranges in it that were codes.
        """
        if ESCAPE not in text:
            return text, []
        pieces, literals, length, start = [], [], 0, 0
        while (at := text.find(ESCAPE, start)) >= 0:
            marker = self._strings.get(text[at : at + 2])
            pieces.append(text[start:at])
            length += at - start
            if marker is None:  # the template cut a code in two: what is left of it is text
                marker, start = ESCAPE, at + 1
            else:
                start = at + 2
            pieces.append(marker)
            literals.append((length, length + len(marker)))
            length += len(marker)
        pieces.append(text[start:])
        return "".join(pieces), literals

    def markers_in(
        self, text: str, start: int = 0, end: int | None = None
    ) -> list[tuple[int, int, str]]:
        """Every marker spelled in ``text[start:end]``: (start, end, marker)."""
        if self._structure is None:
            return []
        stop = len(text) if end is None else end
        return [(*m.span(), m.group()) for m in self._structure.finditer(text, start, stop)]


def covers(literals: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether any of the half-open ranges, in order and apart, overlaps ``[start, end)``."""
    before = bisect_left(literals, (end,))
    return before > 0 and literals[before - 1][1] > start

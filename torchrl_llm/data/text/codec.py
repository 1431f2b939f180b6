"""All access to the tokenizer: text with literal ranges to ids and offsets, ids to text.

Every call uses the fast backend under one lock per tokenizer, without the tokenizer's automatic
special tokens, padding or truncation (a chat template writes its own ``bos``).

A user who types ``<|im_end|>`` must not end a turn. Before rendering, a :class:`Shield` replaces
each special-token string in a content by a code of two private-use characters, which templates
ignore. After rendering it restores the string and records its range as *literal*, which
:class:`Codec` encodes as plain characters.
"""

from __future__ import annotations

import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from torchrl_llm.errors import TokenizerError

ESCAPE = "\uf8ff"
_FIRST = 0xE000
_CAPACITY = 0xF8FF - _FIRST
# One of these replaces a literal while the text around it is encoded: a character that does not
# merge with its neighbours, so that they are tokenized as next to any rare symbol.
_ANCHORS = ("\ue000", "\uf8fe", "\U000fabcd")

_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()


def _lock_of(tokenizer: Any) -> threading.RLock:
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(tokenizer, threading.RLock())


def whole_characters(text: str) -> str:
    """The text with ``?`` for each lone surrogate (half a character), which has no bytes.

    Example:
        >>> whole_characters("a" + chr(0xD83D)), whole_characters("ä")
        ('a?', 'ä')
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


class Shield:
    """Replace marker strings by codes and turn the codes back.

    Args:
        markers: the strings that must not be read as special tokens. Markers of a single character
            or of white space only cannot be distinguished from text and are ignored.

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
        # The escape character itself is doubled, so that a content that contains it can be
        # restored.
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
        """Replace the codes by their markers.

        Returns:
            The text, and the half-open character ranges of the former codes.
        """
        if ESCAPE not in text:
            return text, []
        pieces, literals, length, start = [], [], 0, 0
        while (at := text.find(ESCAPE, start)) >= 0:
            marker = self._strings.get(text[at : at + 2])
            pieces.append(text[start:at])
            length += at - start
            if marker is None:  # the template cut a code in two: the remainder is text
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
        """Every marker that occurs in ``text[start:end]``: (start, end, marker)."""
        if self._structure is None:
            return []
        stop = len(text) if end is None else end
        return [(*m.span(), m.group()) for m in self._structure.finditer(text, start, stop)]


def covers(literals: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether any of the half-open ranges, sorted and disjoint, overlaps ``[start, end)``."""
    before = bisect_left(literals, (end,))
    return before > 0 and literals[before - 1][1] > start


class Piece(NamedTuple):
    """Text to encode; its ``literals`` are plain characters, even if they spell a special token.

    ``continues``: other text precedes it, so the tokenizer must not treat its beginning as the
    beginning of a text (no prefix space).
    """

    text: str
    literals: Sequence[tuple[int, int]] = ()
    continues: bool = False


class Encoding(NamedTuple):
    """Token ids with the half-open character range of each: int64 arrays of equal length."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Codec:
    """Encode and decode with one fast tokenizer, from any thread.

    Args:
        tokenizer: a fast Hugging Face tokenizer.

    Attributes:
        bytewise: each token has fixed bytes, independent of its neighbours. The text is the
            decoding of the tokens' bytes, with U+FFFD for invalid bytes.

    Raises:
        TokenizerError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"ChatFormatter needs a fast tokenizer (one with a backend_tokenizer), got "
                f"{type(tokenizer).__name__}; load it with AutoTokenizer or convert it"
            )
        self.tokenizer = tokenizer
        self.lock = _lock_of(tokenizer)
        self._backend = backend
        self.bytewise = type(backend.decoder).__name__ == "ByteLevel"
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if str(t.content).strip()}
        self.special = {t.content: i for i, t in added.items() if t.special}
        for text in tokenizer.all_special_tokens:
            self.special.setdefault(text, tokenizer.convert_tokens_to_ids(text))
        self.special_ids = frozenset(self.special.values())
        # Every token that is matched before the model runs: special tokens and markers like
        # <think>.
        self.added = {t.content: i for i, t in added.items()} | self.special
        self.added_by_id = {i: text for text, i in self.added.items()}
        self.shield = Shield(self.special)
        eos = tokenizer.eos_token_id
        self.eos_ids = frozenset(() if eos is None else (eos,))
        self._plain: dict[str, tuple[int, ...]] = {}
        self._anchor = self._find_anchor()
        # Some tokenizers decode a space after every added token that the text did not contain.
        probe = next((m for m in self.special if m.strip() == m), None)
        self._spaced = probe is not None and self.decode(self.ids(probe + "a")) == probe + " a"

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        del state["lock"], state["_backend"]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.lock = _lock_of(self.tokenizer)
        self._backend = self.tokenizer.backend_tokenizer

    # -- encoding ---------------------------------------------------------------------------------

    def encode(self, piece: Piece) -> Encoding:
        """Encode one piece."""
        return self.encode_batch([piece])[0]

    def encode_batch(self, pieces: Sequence[Piece]) -> list[Encoding]:
        """Encode many pieces with one call of the tokenizer."""
        plain = [i for i, p in enumerate(pieces) if not p.literals and not p.continues]
        out: list[Encoding | None] = [None] * len(pieces)
        with self.lock:
            for i, raw in zip(plain, self._raw_batch([pieces[i].text for i in plain]), strict=True):
                out[i] = _encoding(raw)
            for i, piece in enumerate(pieces):
                if out[i] is None:
                    out[i] = self._encode_with_holes(piece)
        return out  # type: ignore[return-value]

    def ids(self, text: str) -> list[int]:
        """Ids of a text in which special-token strings are special tokens."""
        return self.encode(Piece(text)).ids.tolist()

    def _raw_batch(self, texts: list[str]) -> list[Any]:
        backend = self._backend
        # An earlier call of the tokenizer may have left these on; it sets them when it needs them.
        if backend.padding is not None:
            backend.no_padding()
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.encode_special_tokens:
            backend.encode_special_tokens = False
        texts = [whole_characters(text) for text in texts]
        if len(texts) == 1:
            return [backend.encode(texts[0], add_special_tokens=False)]
        return backend.encode_batch(texts, add_special_tokens=False)

    def _encode_with_holes(self, piece: Piece) -> Encoding:
        text, anchor = piece.text, self._anchor
        holes = [(0, 0), *piece.literals] if piece.continues else list(piece.literals)
        coded, positions, last = [], [], 0
        length = 0
        for start, end in holes:
            coded += [text[last:start], anchor]
            length += start - last
            positions.append(length)
            length += 1
            last = end
        coded.append(text[last:])
        raw = _encoding(self._raw_batch(["".join(coded)])[0])
        groups = _anchored(raw, positions)
        if groups is None:
            return self._encode_apart(piece)
        ids, starts, ends = [], [], []
        cursor = shift = 0
        for (start, end), (first, stop), at in zip(holes, groups, positions, strict=True):
            ids += raw.ids[cursor:first].tolist()
            starts += (raw.starts[cursor:first] + shift).tolist()
            ends += (raw.ends[cursor:first] + shift).tolist()
            if end > start:
                literal = self.plain(text[start:end])
                ids += literal
                starts += [start] * len(literal)
                ends += [end] * len(literal)
            cursor, shift = stop, end - (at + 1)
        ids += raw.ids[cursor:].tolist()
        starts += (raw.starts[cursor:] + shift).tolist()
        ends += (raw.ends[cursor:] + shift).tolist()
        return Encoding(*(np.asarray(x, dtype=np.int64) for x in (ids, starts, ends)))

    def _encode_apart(self, piece: Piece) -> Encoding:
        # The anchor merged with its neighbours (the tokenizer has no such symbol): encode the parts
        # separately, each literal cut after its first character.
        cuts = sorted({0, len(piece.text), *(c for s, e in piece.literals for c in (s, s + 1, e))})
        parts: list[Encoding] = []
        for start, end in pairwise(cuts):
            raw = _encoding(self._raw_batch([piece.text[start:end]])[0])
            parts.append(Encoding(raw.ids, raw.starts + start, raw.ends + start))
        if not parts:
            return Encoding(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        return Encoding(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def plain(self, marker: str) -> tuple[int, ...]:
        """Ids of a special-token string, encoded as plain characters inside a text."""
        if marker not in self._plain:
            with self.lock:
                self._plain[marker] = self._plain_ids(marker)
        return self._plain[marker]

    def _plain_ids(self, marker: str) -> tuple[int, ...]:
        for parts in ([marker[:1], marker[1:]], list(marker)):
            # Each part is between anchors, so that none is the beginning of a text.
            coded = self._anchor + self._anchor.join(parts)
            positions = list(accumulate((1 + len(part) for part in parts[:-1]), initial=0))
            raw = _encoding(self._raw_batch([coded])[0])
            groups = _anchored(raw, positions)
            if groups is None:
                ids = [i for part in parts for i in _encoding(self._raw_batch([part])[0]).ids]
            else:
                ends = [first for first, _ in groups[1:]] + [len(raw.ids)]
                ids = [
                    i for (_, a), b in zip(groups, ends, strict=True) for i in raw.ids[a:b].tolist()
                ]
            if not self.special_ids.intersection(ids):
                break
        return tuple(int(i) for i in ids)

    def _find_anchor(self) -> str:
        with self.lock:
            for anchor in _ANCHORS:
                text = f"{anchor}a {anchor}\n{anchor}.{anchor}a"
                positions = [i for i, c in enumerate(text) if c == anchor]
                if _anchored(_encoding(self._raw_batch([text])[0]), positions) is not None:
                    return anchor
        return _ANCHORS[0]

    # -- decoding ---------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Exact text of ids, special tokens included."""
        with self.lock:
            return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_behind(self, token: int, ids: Sequence[int]) -> str:
        """Text of ids that follow an added token: a decoder may strip the first space."""
        if not ids:
            return ""
        text = self.decode([token, *ids]).removeprefix(self.decode([token]))
        return text[1:] if self._spaced and text.startswith(" ") else text


def _encoding(raw: Any) -> Encoding:
    ids = np.asarray(raw.ids, dtype=np.int64)
    # Twice as fast as an array of tuples.
    flat = np.fromiter(chain.from_iterable(raw.offsets), dtype=np.int64, count=2 * len(ids))
    offsets = flat.reshape(-1, 2)
    return Encoding(ids, offsets[:, 0], offsets[:, 1])


def _anchored(raw: Encoding, positions: Sequence[int]) -> list[tuple[int, int]] | None:
    """Token range of the anchor at each character position; None if one was merged."""
    groups = []
    for at in positions:
        hit = np.flatnonzero((raw.starts < at + 1) & (raw.ends > at))
        if hit.size == 0 or (raw.starts[hit] != at).any() or (raw.ends[hit] != at + 1).any():
            return None
        first, stop = int(hit[0]), int(hit[-1]) + 1
        if stop - first != hit.size:
            return None
        # A prefix space before a leading anchor belongs to the anchor.
        groups.append((0 if at == 0 else first, stop))
    return groups

r"""Decodes single tokens of a row, id by id, for display.

A byte-level tokenizer splits characters such as ``é`` or an emoji into several tokens, none of
which is valid text. The first token then shows the whole character, and the other tokens show a
mark. Bytes that form no character are shown as ``\xe2``. Invisible characters (control characters,
direction marks, half characters) are shown as escapes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from torchrl_llm.data.text.codec import Codec

CONTINUED = "‥"
"""Shown for a token that has the remaining bytes of the character before it."""

_BROKEN = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# A character has at most four bytes.
_LONGEST = 4
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
# How byte-level vocabularies spell each byte (GPT-2's table).
_SPELLED = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PLAIN)))
}


def visible(text: str) -> str:
    r"""Replace invisible characters and direction marks by escapes.

    Args:
        text: any text, for example from a model. Line breaks and tabs are kept.

    Example:
        >>> print(visible("a\x1b[2J" + chr(0x202E) + "b" + chr(0xD83D)))
        a\x1b[2J\u202eb\ud83d
    """
    return text if text.isprintable() else "".join(map(_seen, text))


def _seen(char: str) -> str:
    if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode()


class TokenTexts:
    """Texts of token ids, for display.

    Args:
        tokenizer: a fast Hugging Face tokenizer; ``None`` shows ids instead.

    Raises:
        TokenizerError: when the tokenizer is not a fast tokenizer.

    Example:
        >>> from torchrl_llm.modules import load_tokenizer
        >>> tokenizer = load_tokenizer()
        >>> TokenTexts(tokenizer).of(tokenizer.encode("1+2?<|im_end|>"))
        ['1', '+', '2', '?', '<|im_end|>']
        >>> TokenTexts(None).of([7, 8])
        ['⟨7⟩', '⟨8⟩']
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._codec = None if tokenizer is None else Codec(tokenizer)
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token in its context.

        Args:
            token_ids: all ids of a row.

        Returns:
            One text per id.
        """
        if self._codec is None:
            return [f"⟨{token}⟩" for token in token_ids]
        for token in {*token_ids} - self._known.keys():
            self._known[token] = self._read(token)
        read = [self._known[token] for token in token_ids]
        texts: list[str] = []
        while len(texts) < len(read):
            text, part = read[len(texts)]
            texts += [text] if part is None else _joined(read[len(texts) :][:_LONGEST])
        return texts

    def _read(self, token: int) -> tuple[str, bytes | None]:
        """Return the text of a token, and its bytes if they are not whole characters."""
        codec = self._codec
        piece = codec.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"⟨{token}⟩", None
        text = self._decoded([token])
        if _BROKEN in text and (data := _bytes_of(piece)) is not None:
            try:
                text = data.decode()  # the replacement character, written as an escape
            except UnicodeDecodeError:
                return visible(data.decode(errors="backslashreplace")), data
        return visible(text or piece), None

    def _decoded(self, token_ids: Sequence[int]) -> str:
        # Decoded after a special token, because a decoder may strip the space at the beginning of a
        # text.
        first = min(self._codec.special_ids, default=None)
        if first is None or first in token_ids:
            return self._codec.decode(token_ids)
        return self._codec.decode_behind(first, list(token_ids))


def _joined(read: Sequence[tuple[str, bytes | None]]) -> list[str]:
    """Return the texts of several tokens that together hold one character."""
    held = b""
    for count, (_, part) in enumerate(read, start=1):
        if part is None:
            break
        held += part
        try:
            return [visible(held.decode()), *[CONTINUED] * (count - 1)]
        except UnicodeDecodeError:
            pass
    return [read[0][0]]


def _bytes_of(piece: str) -> bytes | None:
    """Return the bytes that an entry of a vocabulary stands for; ``None`` if unknown."""
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    known = [_SPELLED.get(char) for char in piece]
    return None if None in known else bytes(known)

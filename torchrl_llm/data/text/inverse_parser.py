"""Grammar that reads the text of a chat template back into messages.

The grammar of each family is in :mod:`torchrl_llm.data.text.families`. A turn ends where its end
mark is followed by another turn's header or by the end of the text. A mark anywhere else is part of
the content, so a role header inside an answer never opens a turn. Contents are returned exactly;
nothing is stripped.

Parsing text is for inspection, data files and tests. Sampled responses are parsed from their token
ids (:mod:`torchrl_llm.data.text.respond`), in which a marker spelled as text and a real special
token differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torchrl_llm.errors import AmbiguousTextError, TemplateError

Message = dict[str, Any]
Hook = Callable[[list[Message]], list[Message]]

# Used if no tokenizer defines the end-of-sequence or beginning-of-sequence token.
_KNOWN_EOS = ("<|endoftext|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>", "<|eot_id|>", "<eos>")
# Ends of turns of models of any family; each begins with <.
_ENDS = (*_KNOWN_EOS, "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<|eot|>", "<|end|>")
KNOWN_BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>", "<|endoftext|>")


@dataclass(frozen=True)
class InverseParser:
    r"""The grammar of one family's text.

    Args:
        family: name of the family.
        header: pattern of a turn's opening with one group ``role``; empty if turns have none.
        ends: by role as the text spells it (``None``: any other), the pattern of its end mark and
            the pattern between that mark and the next header; ``EOS`` stands for the
            end-of-sequence token.
        headless: role of a text before the first header (``None``: no such text).
        eos: the end-of-sequence token if no tokenizer defines it.
        bos: whether the text may begin with a beginning-of-sequence token.
        own_bos: the beginning-of-sequence token if no tokenizer defines it, for a family whose text
            may begin with a content.
        roles: spelling of a role in the text to its name in a message.
        hook: turns raw messages into final ones (tool calls, tool results, declared tools).
        marks: strings by which a content can be parsed as a turn.
        tags: strings by which a content can be parsed as a call, a tool result or declared tools. A
            rendering whose contents have no mark and no tag always parses back.
        doubts: by role (``None``: all), a pattern; if a *parsed* content matches it, the text is
            ambiguous.

    Example:
        >>> from torchrl_llm.data.text.families import BUILTIN_PARSERS
        >>> text = "User: Hi\n\nAssistant: Hello<|endoftext|>\n\n"
        >>> [m["content"] for m in BUILTIN_PARSERS["falcon"].parse(text)]
        ['Hi', 'Hello']
    """

    family: str
    header: str
    ends: dict[str | None, tuple[str, str]]
    headless: str | None = None
    eos: str = "<|endoftext|>"
    bos: bool = False
    own_bos: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    hook: Hook | None = None
    marks: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    doubts: dict[str | None, str] = field(default_factory=dict)

    def parse(
        self,
        text: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        strict: bool = False,
    ) -> list[Message]:
        """The messages of a text; a trailing generation prompt adds none.

        A last turn without its end mark has ``is_complete=False``. A turn of the assistant may end
        with a different end-of-sequence token than the family's, or with both, as models may write.

        Args:
            text: a rendering by the family's template, or the text of a model trained on it.
            bos_token: the tokenizer's beginning-of-sequence token, skipped at the start.
            eos_token: the tokenizer's end-of-sequence token, for families that end turns with it;
                by default the family's own, or a well-known one at the end of the text.
            strict: raise if a different conversation could have the same text.

        Raises:
            TemplateError: the text does not begin with a turn of this family.
            AmbiguousTextError: ``strict``, and a content contains a mark of the family.
        """
        eos = self._eos(text, eos_token)
        text = self._without_bos(text, bos_token)
        turns = list(self._turns(text, eos, strict))
        if turns and turns[-1][1:] == ("", False):
            turns.pop()  # a generation prompt
        messages = []
        for role, content, closed in turns:
            message = {"role": self.roles.get(role, role), "content": content}
            messages.append(message if closed else message | {"is_complete": False})
        if self.hook is not None:
            messages = self.hook(messages)
        if strict:
            self._refuse_doubts(messages, eos)
        return messages

    def risks(self, eos_token: str | None = None) -> tuple[str, ...]:
        """Marks, tags and the end mark: a text without them in its contents always parses back."""
        return (*self.marks, *self.tags, eos_token or self.eos, *_ENDS)

    def turn_marks(self, eos_token: str | None = None) -> tuple[str, ...]:
        """Marks and the end mark: without them in the contents, the parsed turns are correct."""
        return (*self.marks, eos_token or self.eos)

    def _eos(self, text: str, eos_token: str | None) -> str:
        if eos_token or self.eos in text:
            return eos_token or self.eos
        return next((known for known in _KNOWN_EOS if known in text), self.eos)

    def _without_bos(self, text: str, bos_token: str | None) -> str:
        # Without a tokenizer, any other mark before a text without header is its content.
        known = (
            (bos_token,) if bos_token else KNOWN_BOS if self.headless is None else (self.own_bos,)
        )
        for bos in known:
            if self.bos and bos and text.startswith(bos):
                return text[len(bos) :]
        return text

    def _turns(self, text: str, eos: str, strict: bool = False) -> Iterator[tuple[str, str, bool]]:
        """Yield (role, content, closed); a turn ends at the first mark that a header follows.

        A turn of the assistant may also end with a different end mark of the model before a header.
        """
        head = re.compile(self.header).match(text)
        place = head.end() if head else 0
        role = head["role"] if head else self.headless
        escaped = re.escape(eos)
        while True:
            mark, gap = self.ends.get(role, self.ends.get(None, ("", "")))
            mark = mark.replace("EOS", escaped)
            found = re.compile(f"{mark}(?:\\Z|{gap}(?:\\Z|{self.header}))").search(text, place)
            if head is None and place == 0 and (found is None or self.headless is None):
                raise TemplateError(f"not a text of {self.family}: no turn begins at {text[:60]!r}")
            end = found and (found.start(), found.end(), found["role"])
            content = text[place : end[0] if end else len(text)]
            if not strict and self.roles.get(role, role) == "assistant":
                other = self._other_end(text, place, content, mark, eos)
                if other is not None:
                    end, content = other, text[place : other[0]]
            yield role, content, end is not None
            _, place, role = end or (0, 0, None)
            if role is None:
                return

    def _other_end(
        self, text: str, place: int, content: str, mark: str, eos: str
    ) -> tuple[int, int, str | None] | None:
        """A different end mark before a header in a content: both positions and the role."""
        if "<" not in content and eos not in content:
            return None
        found = tuple(end for end in (eos, *_ENDS) if end in content)
        either, behind = _ends_and_header(mark, found, self.header)
        for other in either.finditer(text, place, place + len(content)) if either else ():
            if header := behind.match(text, other.end()):
                return other.start(), header.end(), header["role"]
        return None

    def _refuse_doubts(self, messages: list[Message], eos: str) -> None:
        doubts = {
            role: re.compile(pattern.replace("EOS", re.escape(eos)))
            for role, pattern in self.doubts.items()
        }
        for index, message in enumerate(messages):
            role = message["role"]
            roles = (None, role) if message.get("is_complete", True) else (None,)
            for pattern in (doubts[r] for r in roles if r in doubts):  # tags: in finished turns
                found = pattern.search(message["content"])
                if found is not None:
                    raise AmbiguousTextError(
                        f"the text can be read in more than one way: {found[0]!r} in message "
                        f"{index} ({role}) is either its content or a mark of {self.family}; parse "
                        "with strict=False to take it as content, or keep the token ids instead"
                    )


@lru_cache
def _ends_and_header(
    mark: str, ends: tuple[str, ...], header: str
) -> tuple[re.Pattern[str] | None, re.Pattern[str]]:
    """Patterns of other ends than the mark, also after it (None without any), and the header."""
    others = "|".join(re.escape(end) for end in ends if not re.fullmatch(mark, end))
    either = re.compile(f"(?:(?:{mark})\\s*)?(?:{others})") if others else None
    return either, re.compile(f"\\s*(?:\\Z|{header})")


@dataclass(frozen=True)
class AlternatingParser(InverseParser):
    """A family whose text has no roles: user and assistant alternate, each turn closed by eos."""

    def _turns(self, text: str, eos: str, strict: bool = False) -> Iterator[tuple[str, str, bool]]:
        *closed, rest = text.split(eos)
        for index, content in enumerate([*closed, rest] if rest else closed):
            yield ("assistant" if index % 2 else "user"), content, index < len(closed)

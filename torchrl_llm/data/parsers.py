"""Read the text of a chat template back into messages: one inverse parser a model family.

A parser knows the grammar of its family (:mod:`torchrl_llm.data.families`): a turn ends where its
end mark is followed by another turn's header or by the end of the text. A mark anywhere else is a
part of the content, so a role header inside an answer never opens a turn. Contents are returned to
the character; nothing is stripped.

Parsing text is for people, data files and tests. What a model sampled is read from its token ids
(:mod:`torchrl_llm.data.formatter`), where a marker that was spelled out and a real special token
differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_llm.data.families import BUILTIN_TEMPLATES, CHATML_TOOLS, LLAMA_TOOLS
from torchrl_llm.data.json_at import json_at
from torchrl_llm.errors import AmbiguousTextError, TemplateError

Message = dict[str, Any]
Hook = Callable[[list[Message]], list[Message]]

# Read where no tokenizer says which end-of-sequence or beginning-of-sequence token is meant.
_KNOWN_EOS = ("<|endoftext|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>", "<|eot_id|>", "<eos>")
_KNOWN_BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>", "<|endoftext|>")


@dataclass(frozen=True)
class InverseParser:
    r"""The grammar of one family's text.

    Args:
        family: name of the family.
        header: pattern of a turn's opening with one group ``role``; empty where turns have none.
        ends: by role as the text spells it (``None``: any other), the pattern of its end mark and
            the pattern between that mark and the next header; ``EOS`` stands for the
            end-of-sequence token.
        headless: role of a text before the first header (``None``: there is none).
        eos: the end-of-sequence token where no tokenizer gives one.
        bos: whether the text may begin with a beginning-of-sequence token.
        roles: spelling of a role in the text to its name in a message.
        hook: turns raw messages into final ones (tool calls, tool results, declared tools).
        marks: strings that can make a content read as a turn.
        tags: strings that can make a content read as a call, a tool result or declared tools. A
            rendering whose contents hold no mark and no tag is known to read back.
        doubts: by role (``None``: all), the pattern whose presence in a *parsed* content means that
            the text can be read in another way.

    Example:
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

        A last turn without its end mark has ``is_complete=False``.

        Args:
            text: a rendering by the family's template, or the text of a model trained on it.
            bos_token: the tokenizer's beginning-of-sequence token, skipped at the start.
            eos_token: the tokenizer's end-of-sequence token, for families that end turns with it;
                without it the family's own, or a well-known one that ends the text.
            strict: raise on text that another conversation could have rendered too.

        Raises:
            TemplateError: the text does not begin with a turn of this family.
            AmbiguousTextError: ``strict``, and a content holds a mark of the family.
        """
        eos = self._eos(text, eos_token)
        text = self._without_bos(text, bos_token)
        turns = list(self._turns(text, eos))
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
        """Marks, tags and the end mark: a text without them in its contents surely reads back."""
        ends = (eos_token,) if eos_token else (self.eos, *_KNOWN_EOS)
        return (*self.marks, *self.tags, *ends)

    def _eos(self, text: str, eos_token: str | None) -> str:
        if eos_token or self.eos in text:
            return eos_token or self.eos
        return next((known for known in _KNOWN_EOS if known in text), self.eos)

    def _without_bos(self, text: str, bos_token: str | None) -> str:
        for bos in (bos_token,) if bos_token else _KNOWN_BOS:
            if self.bos and text.startswith(bos):
                return text[len(bos) :]
        return text

    def _turns(self, text: str, eos: str) -> Iterator[tuple[str, str, bool]]:
        """Yield (role, content, closed); a turn ends at the first mark that a header follows."""
        head = re.compile(self.header).match(text)
        place = head.end() if head else 0
        role = head["role"] if head else self.headless
        while True:
            mark, gap = self.ends.get(role, self.ends.get(None, ("", "")))
            mark = mark.replace("EOS", re.escape(eos))
            found = re.compile(f"{mark}(?:\\Z|{gap}(?:\\Z|{self.header}))").search(text, place)
            if head is None and place == 0 and (found is None or self.headless is None):
                raise TemplateError(f"not a text of {self.family}: no turn begins at {text[:60]!r}")
            if found is None:
                yield role, text[place:], False
                return
            yield role, text[place : found.start()], True
            place, role = found.end(), found["role"]
            if role is None:
                return

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
                        "with strict=False to take it as content, or keep token ids, which tell"
                    )


@dataclass(frozen=True)
class _AlternatingParser(InverseParser):
    """A family whose text names no roles: user and assistant in turn, each closed by eos."""

    def _turns(self, text: str, eos: str) -> Iterator[tuple[str, str, bool]]:
        *closed, rest = text.split(eos)
        for index, content in enumerate([*closed, rest] if rest else closed):
            yield ("assistant" if index % 2 else "user"), content, index < len(closed)


def split_tool_calls(content: str) -> tuple[str, list[dict[str, Any]]]:
    r"""Take the ``<tool_call>`` blocks that end an answer off its content.

    Args:
        content: an assistant turn in the Hermes form, calls last.

    Returns:
        The content before the calls (without the newline that joins them) and the calls as
        ``{"type": "function", "function": {"name", "arguments"}}``. A block whose JSON is broken,
        or that other text follows, stays in the content.

    Example:
        >>> call = '{"name": "add", "arguments": {"a": 1}}'
        >>> text = f"One moment.\n<tool_call>\n{call}\n</tool_call>"
        >>> split_tool_calls(text)[0]
        'One moment.'
    """
    # Each block is read once: what does not reach the end from one block does not from its next.
    tried: set[int] = set()
    start = content.find("<tool_call>")
    while start >= 0:
        calls = _calls_to_the_end(content, start, tried)
        if calls:
            before = content[:start]
            return before.removesuffix("\n"), calls
        start = content.find("<tool_call>", start + 1)
    return content, []


_SPACE = re.compile(r"\s*")


def _calls_to_the_end(text: str, place: int, tried: set[int]) -> list[dict[str, Any]]:
    calls = []
    while place < len(text):
        if place in tried or not text.startswith("<tool_call>", place):
            return []
        tried.add(place)
        place = _SPACE.match(text, place + len("<tool_call>")).end()
        try:
            value, place = json_at(text, place, strict=True)
        except (ValueError, RecursionError):
            return []
        call = _as_call(value, "arguments")
        place = _SPACE.match(text, place).end()
        if call is None or not text.startswith("</tool_call>", place):
            return []
        calls.append(call)
        place = _SPACE.match(text, place + len("</tool_call>")).end()
    return calls


def _as_call(value: Any, arguments: str) -> dict[str, Any] | None:
    """The call that a JSON value spells, ``None`` if it is anything else (more keys, say)."""
    if not isinstance(value, dict) or set(value) != {"name", arguments}:
        return None
    if not isinstance(value["name"], str) or not isinstance(value[arguments], (dict, str)):
        return None
    return {
        "type": "function",
        "function": {"name": value["name"], "arguments": value[arguments]},
    }


def _without_tools(content: str, tools: tuple[str, str]) -> str | None:
    """A system content without the declared tools; ``None`` when nothing else was in it."""
    before, after = tools
    start = content.find(before)
    if start < 0 or not content.endswith(after) or len(content) < start + len(before + after):
        return content
    if start == 0:
        return None
    return content[:start].removesuffix("\n\n")


def _first_system(messages: list[Message], tools: tuple[str, str]) -> list[Message]:
    first = messages[0] if messages else {"role": None}
    if first["role"] != "system" or not first.get("is_complete", True):
        return messages
    content = _without_tools(first["content"], tools)
    head = [] if content is None else [first | {"content": content}]
    return head + messages[1:]


def _read_chatml(messages: list[Message]) -> list[Message]:
    read = []
    for message in _first_system(messages, CHATML_TOOLS):
        if message["role"] == "assistant" and message.get("is_complete", True):
            content, calls = split_tool_calls(message["content"])
            if calls:
                message = message | {"content": content, "tool_calls": calls}
        read.append(message)
    return read


_OPEN, _SHUT = "<tool_response>\n", "\n</tool_response>"


def _read_qwen(messages: list[Message]) -> list[Message]:
    read = []
    for message in _read_chatml(messages):
        content = message["content"]
        wrapped = content.startswith(_OPEN) and content.endswith(_SHUT)
        wrapped = wrapped and len(content) >= len(_OPEN) + len(_SHUT)
        if message["role"] != "user" or not wrapped or not message.get("is_complete", True):
            read.append(message)
            continue
        results = content[len(_OPEN) : -len(_SHUT)].split(f"{_SHUT}\n{_OPEN}")
        read += [{"role": "tool", "content": result} for result in results]
    return read


_THINK, _THOUGHT = "<think>\n", "\n</think>\n\n"


def _read_qwen3(messages: list[Message]) -> list[Message]:
    read = []
    for message in messages:
        thought, shut, rest = message["content"].partition(_THOUGHT)
        # "<think>\n" and "\n</think>" share no newline, even around no thought at all.
        if message["role"] == "assistant" and shut and thought.startswith(_THINK):
            message = message | {"content": rest, "reasoning_content": thought[len(_THINK) :]}
        read.append(message)
    return _read_qwen(read)


def _read_llama(messages: list[Message]) -> list[Message]:
    read = []
    for message in _first_system(messages, LLAMA_TOOLS):
        content = message["content"]
        whole = content.startswith("{") and content.endswith("}")
        if message["role"] == "assistant" and whole and message.get("is_complete", True):
            try:
                call = _as_call(json.loads(content), "parameters")
            except (ValueError, RecursionError):
                call = None
            if call is not None:
                message = message | {"content": "", "tool_calls": [call]}
        read.append(message)
    return read


_CHATML = InverseParser(
    family="chatml_format",
    header=r"<\|im_start\|>(?P<role>[^\W\d]\w*)\n",
    ends={None: (r"<\|im_end\|>", r"\n")},
    bos=True,
    hook=_read_chatml,
    marks=("<|im_start|>", "<|im_end|>"),
    tags=("<tool_call>", CHATML_TOOLS[0]),
    doubts={None: r"<\|im_(?:start|end)\|>", "assistant": r"<tool_call>"},
)
_QWEN = replace(
    _CHATML,
    family="qwen",
    hook=_read_qwen,
    tags=(*_CHATML.tags, "<tool_response>", "</tool_response>"),
    doubts={**_CHATML.doubts, "tool": r"</?tool_response>", "user": r"</?tool_response>"},
)
_QWEN3 = replace(
    _QWEN,
    family="qwen3",
    hook=_read_qwen3,
    tags=(*_QWEN.tags, "<think>", "</think>"),
    doubts={**_QWEN.doubts, "assistant": r"<tool_call>|</?think>"},
)
_LLAMA = InverseParser(
    family="llama",
    header=r"<\|start_header_id\|>(?P<role>[^\W\d]\w*)<\|end_header_id\|>\n\n",
    ends={None: (r"<\|eot_id\|>", "")},
    bos=True,
    roles={"ipython": "tool"},
    hook=_read_llama,
    marks=("<|start_header_id|>", "<|eot_id|>"),
    tags=('"name"', LLAMA_TOOLS[0]),
    doubts={None: r"<\|(?:start_header_id|end_header_id|eot_id)\|>"},
)
_DIALOGPT = _AlternatingParser(family="dialogpt", header="", ends={})
_FALCON = InverseParser(
    family="falcon",
    header=r"(?P<role>System(?=: )|User(?=: )|Assistant(?=:)): ?",
    ends={"Assistant": ("EOS", r"\n\n"), None: (r"\n\n", "")},
    roles={"System": "system", "User": "user", "Assistant": "assistant"},
    marks=("System:", "User:", "Assistant:"),
    doubts={None: r"EOS|\n\n(?:System: |User: |Assistant:)"},
)
_DEEPSEEK = InverseParser(
    family="deepseek",
    header=r"(?P<role>User(?=: )|Assistant(?=:)): ?",
    ends={"Assistant": ("EOS", ""), None: (r"\n\n", "")},
    headless="system",
    eos="<｜end▁of▁sentence｜>",
    bos=True,
    roles={"User": "user", "Assistant": "assistant"},
    marks=("User:", "Assistant:", *_KNOWN_BOS),
    doubts={None: r"EOS|\n\n(?:User: |Assistant:)"},
)

BUILTIN_PARSERS: dict[str, InverseParser] = {
    parser.family: parser
    for parser in (_CHATML, _QWEN, _QWEN3, _LLAMA, _DIALOGPT, _FALCON, _DEEPSEEK)
}


def parser_for_template(template: str) -> InverseParser | None:
    """The parser that reads a template's text, told by the marks that the template writes.

    ``None`` for a template of no built-in family.
    """
    for name, text in BUILTIN_TEMPLATES.items():
        if template == text:
            return BUILTIN_PARSERS[name]
    if "<|start_header_id|>" in template and "<|eot_id|>" in template:
        return _LLAMA
    if "<|im_start|>" in template and "<|im_end|>" in template and "<|im_sep|>" not in template:
        return _QWEN if "<tool_response>" in template else _CHATML
    return None

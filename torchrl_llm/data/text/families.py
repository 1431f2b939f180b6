r"""The built-in model families: the chat template of each, and the parser for its text.

Every template writes contents as they are (nothing is stripped), adds no system message that the
conversation does not have, puts the assistant's words *and* its end-of-turn token inside
``{% generation %}``, and raises an error that names the message if the family has no form for it (a
tool call in Falcon, a system message in DialoGPT). Therefore its parser can read every text back.

They are for tokenizers without a chat template; see
``torchrl_llm.data.text.templates.resolve_template``. ``qwen3`` must be selected by name: it writes
the reasoning of every turn, while the published template drops the reasoning of earlier turns and
so rewrites history at each user message. Use it for both training and serving.
``PRESERVING_TEMPLATES`` does the same for more families, without a parser.

To add a family, add a file to ``chat_templates/``. Its head, a comment in JSON, has the fields of
its ``InverseParser`` (the role ``""`` means any other role), the ``keywords`` of model names, the
texts around declared ``tools``, the ``readers`` (functions of this module that turn raw messages
into final ones), and the parts of ``results`` and ``think``. ``like`` takes all other fields, and
the template, from another family. A line ``INCLUDE part`` includes a file of ``parts/``. Users
register their own templates with :func:`~torchrl_llm.data.text.templates.add_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm.data.text.call_syntax import SYNTAXES, behind_blanks
from torchrl_llm.data.text.inverse_parser import (
    KNOWN_BOS,
    AlternatingParser,
    InverseParser,
    Message,
)

_HERMES = SYNTAXES["hermes"]
_FOLDER = Path(__file__).with_name("chat_templates")


@dataclass(frozen=True)
class TemplateSpec:
    """A chat template that was found for a tokenizer.

    Args:
        name: its registered name, ``"tokenizer"`` for the tokenizer's own template, ``"explicit"``
            for a template passed as text.
        template: the Jinja text.
        inverse_parser: reads a rendered text back: an
            ``InverseParser``, a user's function
            ``text -> History`` (or list of messages), or ``None``.
        keywords: models whose names contain one of these use this template.
    """

    name: str
    template: str
    inverse_parser: InverseParser | Callable[[str], Any] | None = None
    keywords: tuple[str, ...] = ()

    @property
    def builtin(self) -> bool:
        """Whether this is one of the package's own families, whose text is known to read back."""
        return BUILTIN_TEMPLATES.get(self.name) == self.template


def _text(path: str) -> str:
    """A file of ``chat_templates/``, with its ``INCLUDE part`` lines replaced."""
    text = (_FOLDER / f"{path}.jinja").read_text(encoding="utf-8")
    return re.sub(
        r"^INCLUDE (\w+)\n", lambda found: _text(f"parts/{found[1]}"), text, flags=re.MULTILINE
    )


def _jinja(text: str) -> str:
    """A Jinja string literal (its escapes are Python's)."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _about(name: str) -> tuple[dict[str, Any], str]:
    """The head of a family's file, and its template before the placeholders are replaced."""
    head, _, text = _text(name).removeprefix("{#").partition("#}\n")
    about = json.loads(head)
    if like := about.pop("like", None):
        base, text = _about(like)
        for old, new in about.pop("respell", {}).items():
            text = text.replace(old, new)
        about = {**base, **about}
    return about, text


def _family(name: str) -> TemplateSpec:
    about, text = _about(name)
    results, think, tools = (about.pop(key, None) for key in ("results", "think", "tools"))
    readers = [_READERS[reader] for reader in about.pop("readers", ())]
    keywords = tuple(about.pop("keywords", ()))
    made = AlternatingParser if about.pop("alternating", False) else InverseParser
    ends = {role or None: tuple(marks) for role, marks in about.pop("ends").items()}
    doubts = {role or None: doubt for role, doubt in about.pop("doubts", {}).items()}
    tags = (*about.pop("tags", ()), *(tools or ())[:1])
    marks = (*about.pop("marks", ()), *(KNOWN_BOS if about.get("own_bos") else ()))
    hook = partial(_read, tools, readers) if tools else None
    parser = made(family=name, ends=ends, doubts=doubts, tags=tags, marks=marks, hook=hook, **about)
    keys = ["reasoning", "thinking"] if think else ["reasoning_content", "reasoning", "thinking"]
    before, after = map(_jinja, tools or ("", ""))
    for word, value in {
        "REASONING_KEYS": " or ".join(f"message['{key}'] is string" for key in keys),
        "THINK\n": _text(f"parts/{think}") if think else "",
        "TOOL_RESULTS\n": _text(f"parts/{results}") if results else "",
        "BEFORE": before,
        "AFTER": after,
        "FAMILY": name,
    }.items():
        text = text.replace(word, value)
    return TemplateSpec(name, text, parser, keywords)


# -- parsing --------------------------------------------------------------------------------------


def _read(
    tools: Sequence[str],
    readers: Sequence[Callable[[Message], list[Message]]],
    messages: list[Message],
) -> list[Message]:
    """Messages without the declared tools, each passed through the readers."""
    first = messages[0] if messages else {"role": None}
    if first["role"] == "system" and first.get("is_complete", True):
        content = _without_tools(first["content"], tools)
        messages = (
            messages[1:] if content is None else [first | {"content": content}, *messages[1:]]
        )
    for reader in readers:
        messages = [read for message in messages for read in reader(message)]
    return messages


def _without_tools(content: str, tools: Sequence[str]) -> str | None:
    """A system content without the declared tools; ``None`` if it had nothing else."""
    before, after = tools
    start = content.find(before)
    if start < 0 or not content.endswith(after) or len(content) < start + len(before + after):
        return content
    return content[:start].removesuffix("\n\n") if start else None


def _calls(message: Message) -> list[Message]:
    if message["role"] == "assistant" and message.get("is_complete", True):
        content, calls = split_tool_calls(message["content"])
        if calls:
            return [message | {"content": content, "tool_calls": calls}]
    return [message]


def _results(message: Message) -> list[Message]:
    opened, shut = "<tool_response>\n", "\n</tool_response>"
    content = message["content"]
    wrapped = content.startswith(opened) and content.endswith(shut)
    wrapped = wrapped and len(content) >= len(opened) + len(shut)
    if message["role"] != "user" or not wrapped or not message.get("is_complete", True):
        return [message]
    results = content[len(opened) : -len(shut)].split(f"{shut}\n{opened}")
    return [{"role": "tool", "content": result} for result in results]


def _thought(message: Message) -> list[Message]:
    thought, shut, rest = message["content"].partition("\n</think>\n\n")
    # "<think>\n" and "\n</think>" never share a newline, even around an empty thought.
    if message["role"] != "assistant" or not shut or not thought.startswith("<think>\n"):
        return [message]
    return [message | {"content": rest, "reasoning_content": thought.removeprefix("<think>\n")}]


def _llama_call(message: Message) -> list[Message]:
    content = message["content"]
    whole = content.startswith("{") and content.endswith("}")
    if message["role"] == "assistant" and whole and message.get("is_complete", True):
        with suppress(ValueError, RecursionError):
            if (call := _exact_call(json.loads(content), "parameters")) is not None:
                return [message | {"content": "", "tool_calls": [call]}]
    return [message]


def split_tool_calls(content: str) -> tuple[str, list[Message]]:
    r"""Split the ``<tool_call>`` blocks at the end of an answer from its content.

    Args:
        content: an assistant turn in the Hermes form, calls last.

    Returns:
        The content before the calls (without the newline that joins them) and the calls as
        ``{"type": "function", "function": {"name", "arguments"}}``. A block with broken JSON, or
        followed by other text, stays in the content.

    Example:
        >>> call = '{"name": "add", "arguments": {"a": 1}}'
        >>> text = f"One moment.\n<tool_call>\n{call}\n</tool_call>"
        >>> split_tool_calls(text)[0]
        'One moment.'
    """
    # Each block is read once: if other text follows the calls from one block on, it also does from
    # the next.
    tried: set[int] = set()
    start = content.find(_HERMES.opening)
    while start >= 0:
        if calls := _calls_to_the_end(content, start, tried):
            return content[:start].removesuffix("\n"), calls
        start = content.find(_HERMES.opening, start + 1)
    return content, []


def _calls_to_the_end(text: str, place: int, tried: set[int]) -> list[Message]:
    calls = []
    while place < len(text):
        if place in tried or not text.startswith(_HERMES.opening, place):
            return []
        tried.add(place)
        try:
            value, end = _HERMES.value_at(text, place, strict=True)
        except ValueError:
            return []
        if (call := _exact_call(value, "arguments")) is None:
            return []
        calls.append(call)
        place = behind_blanks(text, end)
    return calls


def _exact_call(value: Any, arguments: str) -> Message | None:
    """The call for a JSON value, ``None`` if it is anything else (e.g. has more keys)."""
    if not isinstance(value, dict) or set(value) != {"name", arguments}:
        return None
    if not isinstance(value["name"], str) or not isinstance(value[arguments], (dict, str)):
        return None
    return {"type": "function", "function": {"name": value["name"], "arguments": value[arguments]}}


# -- the families ---------------------------------------------------------------------------------

_READERS = {"calls": _calls, "llama_call": _llama_call, "results": _results, "thought": _thought}
# In the files: Qwen joins consecutive results into one user turn. Qwen 3's thoughts are kept in
# every turn, and a turn without a thought gets no block: so new messages only ever append text. The
# leading space of Falcon's and DeepSeek's answers is inside the block: a model continues
# "Assistant:" with " word".
FAMILIES: dict[str, TemplateSpec] = {
    path.stem: _family(path.stem) for path in sorted(_FOLDER.glob("*.jinja"))
}
"""The built-in families by name; the first whose keyword is in a model's name is that model's."""

BUILTIN_TEMPLATES: dict[str, str] = {name: spec.template for name, spec in FAMILIES.items()}
BUILTIN_PARSERS: dict[str, InverseParser] = {
    name: spec.inverse_parser for name, spec in FAMILIES.items()
}


# -- templates that never rewrite history ---------------------------------------------------------

# A turn without a thought is written with an empty block if the generation prompt opens a block
# (deepseek_r1), and otherwise without one (glm4).
PRESERVING_TEMPLATES: dict[str, str] = {
    name: _text(f"preserving/{name}").replace("\n{", "{").replace("}\n", "}").strip()
    for name in ("deepseek_r1", "glm4")
}
"""Templates of common reasoning families that never rewrite history, by family.

The published templates drop earlier thoughts, or write the last turn differently from the turns
before it: a conversation then forks at every user message. With these, one conversation stays one
row of tokens. A model must be trained *and* served with the same template; name it in the recipe::

    ChatFormatter(tokenizer, chat_template=PRESERVING_TEMPLATES["deepseek_r1"])
"""

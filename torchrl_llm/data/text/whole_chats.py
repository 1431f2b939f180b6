"""Rendering of whole conversations to text or ids, and parsing of rendered text.

:meth:`History.apply_chat_template <torchrl_llm.data.history.History>` uses it, for inspection, data
files and supervised training. The ids of *sampled* conversations come from
:class:`~torchrl_llm.data.text.ChatFormatter`, which never encodes a sampled token again. Both share
the renderer, the shield for special-token strings and the codec.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tensordict import is_tensorclass
from torch import Tensor

from torchrl_llm._registry import did_you_mean
from torchrl_llm.data.chat import Chat, chat_of
from torchrl_llm.data.text.codec import Codec, Encoding, Piece, Shield
from torchrl_llm.data.text.compose import assistant_regions, label_tokens
from torchrl_llm.data.text.families import InverseParser
from torchrl_llm.data.text.probe import Probe, probe_template
from torchrl_llm.data.text.renderer import REASONING_KEYS, Form, Rendered, Renderer
from torchrl_llm.data.text.templates import TemplateSpec
from torchrl_llm.errors import AmbiguousTextError, TemplateError


class EncodedChat(NamedTuple):
    """Ids of one conversation.

    Attributes:
        token_ids: int64 ``[T]``.
        assistant: bool ``[T]``, the assistant's words and their end-of-turn tokens; ``None`` if not
            requested.
    """

    token_ids: Tensor
    assistant: Tensor | None


@dataclass(frozen=True)
class _Engine:
    """Renderer, codec and probe of a template and a tokenizer (no ``codec`` without one)."""

    renderer: Renderer
    codec: Codec | None
    probe: Probe | None


# An engine references its tokenizer, so the id in the key stays valid while the entry exists.
_ENGINES: OrderedDict[tuple, _Engine] = OrderedDict()
_ENGINES_LOCK = threading.Lock()
_MAX_ENGINES = 32
# Appended to the content of an open turn during rendering, so that white space before it is kept.
_TAG = "\uf8fe\uf8fd\uf8fe"


@dataclass(frozen=True, kw_only=True)
class WholeChats:
    """Renders conversations of at least one message, as text or as ids.

    Args:
        spec: the template.
        tokenizer: a fast Hugging Face tokenizer, required for ids; it provides ``bos_token``,
            ``eos_token`` and the like to the template.
        add_generation_prompt: end with the header of the model's turn.
        continue_final_message: end with the content of the last message and leave its turn open. A
            last assistant message with ``is_complete=False`` is always left open.
        tools: JSON schemas (or documented functions) of tools.
        variables: further variables of the template.
        strict: reject contents that would be parsed as other messages or, for a template that is
            not built in, as other turns. In ids this can only occur if a mark of the template is
            not a special token of this tokenizer.
    """

    spec: TemplateSpec
    tokenizer: Any = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] | None = None
    strict: bool = True

    def texts(self, chats: Sequence[Chat]) -> list[str]:
        """The text of each conversation.

        Raises:
            TemplateError: the template rejects a message or cannot express it, or (``strict``) a
                content forges a turn, a call or a result.
        """
        engine = self._engine(chats, shielded=False)
        return [item.text for item in self._rendered(engine, chats)]

    def encoded(self, chats: Sequence[Chat], *, assistant_mask: bool) -> list[EncodedChat]:
        """The ids of each conversation, from one call of the tokenizer.

        Special-token strings in contents become plain characters, so no content can end a turn or
        open one. The assistant mask comes from ``{% generation %}`` blocks, each extended over the
        end-of-turn token that follows it or, if a template has no blocks, from the positions of the
        assistant's contents and the closers after them.

        Args:
            chats: the conversations.
            assistant_mask: also return the mask.

        Raises:
            TemplateError: as :meth:`texts`.
            TokenizerError: the tokenizer is not a fast one.
        """
        engine = self._engine(chats, shielded=True)
        located = assistant_mask and not engine.renderer.has_generation
        rendered = self._rendered(engine, chats, spans=located, generation=assistant_mask)
        pieces = [Piece(item.text, item.literals) for item in rendered]
        return [
            EncodedChat(
                torch.from_numpy(encoding.ids.copy()),
                _mask(item, chat, encoding, engine.probe) if assistant_mask else None,
            )
            for item, chat, encoding in zip(
                rendered, chats, engine.codec.encode_batch(pieces), strict=True
            )
        ]

    def _engine(self, chats: Sequence[Chat], *, shielded: bool) -> _Engine:
        spec, variables = self.spec, dict(self.variables or {})
        _refuse_unknown(variables, spec)
        reasoning = _reasoning_at(chats)
        through = Form(parts=True, text=True, reasoning_field=reasoning and reasoning[2])
        if self.tokenizer is None:
            return _Engine(Renderer(spec.template, Shield(()), variables, through), None, None)
        variables = {**self.tokenizer.special_tokens_map, **variables}
        engine = _cached(spec, self.tokenizer, variables)
        form = through if engine.probe is None else engine.probe.form
        if reasoning is not None and form.reasoning_field is None:
            row, index, key = reasoning
            raise TemplateError(
                f"chat {row}, message {index} has {key}, and the chat template writes no "
                "reasoning; put it into the content"
            )
        renderer = engine.renderer.with_form(form)
        if not shielded:
            renderer = Renderer(spec.template, Shield(()), variables, form)
        return replace(engine, renderer=renderer)

    def _rendered(
        self,
        engine: _Engine,
        chats: Sequence[Chat],
        *,
        spans: bool = False,
        generation: bool = False,
    ) -> list[Rendered]:
        rendered = [
            self._render(engine, chat, row, spans, generation) for row, chat in enumerate(chats)
        ]
        if self.strict:
            for row, (chat, item) in enumerate(zip(chats, rendered, strict=True)):
                self._refuse_forgery(engine, chat, row, item.text)
        return rendered

    def _render(
        self, engine: _Engine, chat: Chat, row: int, spans: bool, generation: bool
    ) -> Rendered:
        messages, prompt = chat.messages, self.add_generation_prompt
        open_end = self.continue_final_message
        if not messages:
            raise TemplateError(f"chat {row} has no messages; a chat template needs at least one")
        last = messages[-1]
        if last.get("is_complete") is False and (last["role"] == "assistant" or not prompt):
            prompt, open_end = False, True
        shown = [*messages[:-1], _tagged(last, row, len(chat) - 1)] if open_end else messages
        try:
            rendered = engine.renderer.render(
                shown,
                tools=self.tools,
                add_generation_prompt=prompt,
                spans=spans,
                generation=generation,
            )
        except TemplateError as error:
            told = _named(engine, messages, self.tools, error)
            raise TemplateError(f"chat {row}: {told}") from error
        return _opened(rendered, chat, row) if open_end else rendered

    def _refuse_forgery(self, engine: _Engine, chat: Chat, row: int, text: str) -> None:
        """Raise if the rendering is parsed as messages that differ from the rendered ones.

        The text of a built-in family must be parsed back completely. Otherwise the turns must equal
        the turns that are parsed when the contents have no marks: for the text of any template with
        known marks, and for ids if a mark is not a special token (a call spelled in a content has
        the same ids as a call).
        """
        parser, shielded = self.spec.inverse_parser, engine.renderer.shield.markers
        if not isinstance(parser, InverseParser):
            return
        last = chat.messages[-1]
        if not (shielded or last.get("is_complete", True) or last["content"]):
            raise TemplateError(
                f"chat {row}, message {len(chat) - 1} ({last['role']}): an unfinished message "
                "without content reads as a generation prompt; drop it and ask for a generation "
                "prompt"
            )
        ends = _ends(self.tokenizer)
        whole = self.spec.builtin and not shielded
        marks = parser.risks(ends["eos_token"]) if whole else parser.turn_marks(ends["eos_token"])
        risks = [mark for mark in marks if mark not in shielded]
        risky = (
            index
            for index, message in enumerate(chat.messages)
            if any(mark in part for part in _strings(message) for mark in risks)
        )
        if (index := next(risky, None)) is None:
            return
        if whole:
            wanted = [_expressed(message) for message in chat.messages]
            found = [_expressed(message) for message in parser.parse(text, **ends)]
        else:
            clean = [_without(message, risks) for message in chat.messages]
            clean_text = engine.renderer.render(clean, tools=self.tools).text
            try:
                wanted = [message["role"] for message in parser.parse(clean_text, **ends)]
            except TemplateError:  # the template only resembles the family
                return
            found = [message["role"] for message in parser.parse(text, **ends)]
        if wanted != found:
            raise TemplateError(
                f"chat {row}, message {index} ({chat.messages[index]['role']}): in the text of "
                f"{parser.family} a content reads as another turn, a tool call or a tool result; "
                "put calls into tool_calls, use token ids where the family's marks are special "
                "tokens, or render with strict=False"
            )


def _mask(rendered: Rendered, chat: Chat, encoding: Encoding, probe: Probe | None) -> Tensor:
    if probe is None:  # a built-in template marks everything that a model would have to generate
        regions = rendered.generation or []
    else:
        regions = [(a, b) for a, b, _ in assistant_regions(rendered, chat.messages, probe)]
    chars = torch.zeros(len(rendered.text), dtype=torch.bool)
    for start, end in regions:
        chars[start:end] = True
    return torch.from_numpy(label_tokens(encoding, rendered.text, chars.numpy()))


def read_text(
    text: str, spec: TemplateSpec, tokenizer: Any = None, *, strict: bool = False
) -> Chat:
    """Parse one rendered text into messages.

    Args:
        text: the text of one conversation.
        spec: its template.
        tokenizer: defines the end-of-sequence token.
        strict: raise if the text is ambiguous. This is only checked for built-in templates. For
            other templates, and a user's parser, the check is that the parsed messages render to
            the same text. Anything that the template omits from a text (earlier thoughts, white
            space, the types of untyped arguments) cannot be recovered.

    Raises:
        TemplateError: the template has no inverse parser, or the text is not from this template.
        AmbiguousTextError: ``strict``, and the text is ambiguous.
    """
    parser = spec.inverse_parser
    if parser is None:
        raise TemplateError(
            f"the template {spec.name!r} has no inverse parser; register it with "
            "add_chat_template(..., inverse_parser=...)"
        )
    if isinstance(parser, InverseParser):
        found = parser.parse(text, **_ends(tokenizer), strict=strict)
    else:
        found = parser(text)
    if is_tensorclass(found):
        chats = found.conversations()
        if len(chats) != 1:
            raise TemplateError(f"the parser of {spec.name!r} returned {len(chats)} conversations")
        found = chats[0].messages
    chat = chat_of(found, "message")
    if strict and not (spec.builtin and isinstance(parser, InverseParser)):
        _refuse_other_text(text, chat, spec, tokenizer)
    return chat


def _ends(tokenizer: Any) -> dict[str, str | None]:
    """The tokenizer's tokens that begin and end a text."""
    return {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token")}


def _refuse_other_text(text: str, chat: Chat, spec: TemplateSpec, tokenizer: Any) -> None:
    """Raise if the template does not render the parsed messages to exactly this text."""
    again: list[str] = []
    try:
        how = WholeChats(spec=spec, tokenizer=tokenizer, strict=False)
        for prompt in (False, True):
            again += replace(how, add_generation_prompt=prompt).texts([chat])
    except TemplateError as error:
        again = again or [f"nothing: {error}"]
    if text not in again:
        raise AmbiguousTextError(
            f"the template {spec.name!r} renders the parsed messages to "
            f"{again[0][:200]!r}, not to {text[:200]!r}; parse with strict=False to keep them, or "
            "keep token ids"
        )


# -- one template with one tokenizer --------------------------------------------------------------


def _cached(spec: TemplateSpec, tokenizer: Any, variables: dict[str, Any]) -> _Engine:
    # Added tokens and changed special tokens need a new engine: they change the key.
    key = (id(tokenizer), len(tokenizer), spec.template, spec.builtin, repr(variables))
    with _ENGINES_LOCK:
        if key in _ENGINES:
            _ENGINES.move_to_end(key)
            return _ENGINES[key]
    codec = Codec(tokenizer)
    renderer = Renderer(spec.template, codec.shield, variables, Form())
    probe = None if spec.builtin else probe_template(renderer, codec)
    engine = _Engine(renderer, codec, probe)
    with _ENGINES_LOCK:
        _ENGINES[key] = engine
        while len(_ENGINES) > _MAX_ENGINES:
            _ENGINES.popitem(last=False)
    return engine


def _refuse_unknown(variables: Mapping[str, Any], spec: TemplateSpec) -> None:
    options = ("tokenizer", "chat_template", "padding", "truncation", "tokenize", "max_length")
    options += ("return_tensors", "return_dict", "continue_final_message", "add_generation_prompt")
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", spec.template):
            hint = did_you_mean(name, options)
            raise TemplateError(f"the template {spec.name!r} has no variable {name!r}{hint}")


def _reasoning_at(chats: Sequence[Chat]) -> tuple[int, int, str] | None:
    """Chat, message and key of the first reasoning."""
    for row, chat in enumerate(chats):
        for index, message in enumerate(chat.messages):
            if len(message) > 2:
                for key in REASONING_KEYS:
                    if isinstance(message.get(key), str):
                        return row, index, key
    return None


# -- one conversation -----------------------------------------------------------------------------


def _tagged(message: Mapping[str, Any], row: int, index: int) -> dict[str, Any]:
    """A message with a tag after its content, at which its open turn will be cut."""
    where = f"chat {row}, message {index} ({message['role']})"
    if message.get("tool_calls"):
        raise TemplateError(f"{where}: an unfinished message cannot have tool calls")
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _TAG}
    if not content or content[-1].get("type") != "text":
        raise TemplateError(f"{where}: only text can be continued")
    return {
        **message,
        "content": [*content[:-1], {"type": "text", "text": content[-1]["text"] + _TAG}],
    }


def _named(
    engine: _Engine,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    error: TemplateError,
) -> str:
    """The error, with the index of its message, which few templates report themselves."""
    if re.search(r"\bmessage \d+\b", str(error)):
        return str(error)
    for count in range(1, len(messages)):
        try:
            engine.renderer.render(messages[:count], tools=tools)
        except TemplateError:
            return f"message {count - 1} ({messages[count - 1].get('role')}): {error}"
    return f"message {len(messages) - 1} ({messages[-1].get('role')}): {error}"


def _opened(rendered: Rendered, chat: Chat, row: int) -> Rendered:
    """The text up to the tag."""
    end = rendered.text.rfind(_TAG)
    if end < 0:
        raise TemplateError(
            f"chat {row}, message {len(chat) - 1} ({chat.messages[-1]['role']}): the template does "
            "not write the content that is to be continued"
        )
    blocks = rendered.generation
    if blocks is not None:
        blocks = [(a, min(b, end)) for a, b in blocks if a < end]
    return replace(
        rendered,
        text=rendered.text[:end],
        literals=[x for x in rendered.literals if x[1] <= end],
        spans=[x._replace(end=min(x.end, end)) for x in rendered.spans if x.start < end],
        generation=blocks,
    )


# -- contents that would be parsed as something else ----------------------------------------------


def _without(message: Mapping[str, Any], marks: Sequence[str]) -> dict[str, Any]:
    *texts, reasoning = _strings(message)
    clean = {"content": "".join(texts)}
    if reasoning:
        clean["reasoning_content"] = reasoning
    for mark in marks:
        clean = {key: text.replace(mark, "-") for key, text in clean.items()}
    return {**message, **clean}


def _strings(message: Mapping[str, Any]) -> list[str]:
    reasoning = message.get("reasoning_content") or ""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content, reasoning]
    return [*(part.get("text") or "" for part in content), reasoning]


def _expressed(message: Mapping[str, Any]) -> tuple:
    """The parts of a message that its text contains: no ids, and no names of results."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    named = [(call["name"], call.get("arguments")) for call in calls]
    *texts, _ = _strings(message)
    return message["role"], "".join(texts), message.get("reasoning_content"), named

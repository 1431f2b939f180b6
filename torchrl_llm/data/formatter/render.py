"""Messages to text through a chat template: in its form, shielded, with the place of each content.

:mod:`~torchrl_llm.data.formatter.probe` finds out which form a template wants,
:mod:`~torchrl_llm.data.formatter.locate` finds the contents in the text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from torchrl_llm.data.formatter.fields import REASONING_KEYS, calls_of, reasoning_of
from torchrl_llm.data.formatter.locate import Locator, Mark, Span
from torchrl_llm.data.formatter.shield import Shield
from torchrl_llm.errors import TemplateError

__all__ = ["REASONING_KEYS", "Form", "Rendered", "Renderer", "Span"]

_PRIVATE_KEYS = frozenset({"is_complete", "raw", "flags", "tool_call_errors"})
# The tracker behind {% generation %} lives in the compiled template, which all threads share.
_GENERATION_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a template wants its messages.

    Args:
        parts: contents as ``[{"type": "text", "text": ...}]`` are understood.
        text: contents as strings are understood.
        arguments_as_text: a call's arguments must be a JSON string, not a mapping.
        reasoning_field: the message key that holds reasoning; ``None`` if the template reads none.
        call_ids: calls and results need ids (of nine characters, for Mistral).
    """

    parts: bool = False
    text: bool = True
    arguments_as_text: bool = False
    reasoning_field: str | None = None
    call_ids: bool = False


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Args:
        text: the text, special-token strings of contents included.
        literals: character ranges that spell a special token and are not one.
        spans: where the contents stand, in order of the text.
        generation: character ranges inside ``{% generation %}``; ``None`` if the template has none.
    """

    text: str
    literals: list[tuple[int, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    generation: list[tuple[int, int]] | None = None


class Renderer:
    """Render chats with one template.

    Args:
        template: the Jinja template.
        shield: covers special-token strings in contents.
        variables: what the template may use beside the messages (``bos_token``, options).
        form: how the template wants its messages.
    """

    def __init__(
        self, template: str, shield: Shield, variables: Mapping[str, Any], form: Form
    ) -> None:
        self.template = template
        self.shield = shield
        self.variables = dict(variables)
        self.form = form
        self._locator = Locator(shield)
        self.has_generation = re.search(r"\{\%-?\s*generation\s*-?\%\}", template) is not None

    def with_form(self, form: Form) -> Renderer:
        """The same renderer for another form of messages."""
        return Renderer(self.template, self.shield, self.variables, form)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        spans: bool = False,
        generation: bool = False,
    ) -> Rendered:
        """Render messages.

        Args:
            messages: plain message dicts; none is changed.
            tools: JSON schemas (or documented functions) of the tools.
            add_generation_prompt: end with the header of the model's turn.
            spans: also locate the contents.
            generation: also locate the ``{% generation %}`` blocks, if the template has any.

        Raises:
            TemplateError: the template refuses the messages.
        """
        tools = self._tools(tools)
        prepared = [self._prepare(m, i) for i, m in enumerate(messages)]
        blocks = None
        if generation and self.has_generation:
            covered, blocks = self._generation(prepared, tools, add_generation_prompt)
        else:
            covered = self._jinja(prepared, tools, add_generation_prompt)
        text, literals = self.shield.uncover(covered)
        if blocks is not None and literals:
            lengths = [
                len(self.shield.uncover(covered[:at])[0]) for block in blocks for at in block
            ]
            blocks = list(zip(lengths[::2], lengths[1::2], strict=True))
        found: list[Span] = []
        if spans:

            def marked(mark: Mark) -> str | None:
                again = [self._prepare(m, i, mark) for i, m in enumerate(messages)]
                try:
                    return self._jinja(again, tools, add_generation_prompt)
                except TemplateError:
                    return None

            key = (add_generation_prompt, tools is not None)
            found = self._locator.locate(messages, text, marked, key)
        return Rendered(text, literals, found, blocks)

    # -- one call of the template -----------------------------------------------------------------

    def _jinja(self, prepared: list[dict], tools: list[dict] | None, prompt: bool) -> str:
        try:
            rendered, _ = render_jinja_template(
                conversations=[prepared],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = [m.get("role") for m in prepared]
            raise TemplateError(
                f"the chat template refuses messages with roles {_shortened(roles)}: {error}"
            ) from error
        return rendered[0]

    def _generation(
        self, prepared: list[dict], tools: list[dict] | None, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            with _GENERATION_LOCK:
                rendered, blocks = render_jinja_template(
                    conversations=[prepared],
                    tools=tools,
                    chat_template=self.template,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=True,
                    **self.variables,
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return self._jinja(prepared, tools, prompt), []  # says what is wrong
        return rendered[0], blocks[0]

    def _tools(self, tools: Sequence[Any] | None) -> list[dict] | None:
        if not tools:
            return None
        schemas = [t if isinstance(t, Mapping) else get_json_schema(t) for t in tools]
        return [self.shield.cover_tree(schema) for schema in schemas]

    # -- messages as the template wants them ------------------------------------------------------

    def _prepare(
        self, message: Mapping[str, Any], index: int, mark: Mark | None = None
    ) -> dict[str, Any]:
        """A copy of one message in the template's form, shielded, and marked if asked."""
        if "role" not in message:
            raise TemplateError(f"message {index} has no role: {dict(message)!r:.200}")
        form, cover = self.form, self.shield.cover

        def text(value: str) -> str:
            return mark(cover(value), index) if mark else cover(value)

        out = {
            key: value
            for key, value in message.items()
            if key not in _PRIVATE_KEYS and key not in REASONING_KEYS and value is not None
        }
        out["content"] = self._content(message, index, text)
        reasoning = reasoning_of(message)
        if reasoning is not None and form.reasoning_field is not None:
            out[form.reasoning_field] = text(reasoning)
        if calls := calls_of(message):
            out["tool_calls"] = [self._call(c, index, k, text) for k, c in enumerate(calls)]
        if form.call_ids and message["role"] in ("tool", "ipython"):
            out.setdefault("tool_call_id", "call00000")
        return out

    def _content(self, message: Mapping[str, Any], index: int, text: Any) -> Any:
        content = message.get("content")
        content = "" if content is None else content
        if isinstance(content, str):
            if self.form.text:
                return text(content)
            return [{"type": "text", "text": text(content)}]
        if not isinstance(content, (list, tuple)):
            raise TemplateError(
                f"message {index} ({message['role']}) has a content of type "
                f"{type(content).__name__}; expected a string or a list of parts"
            )
        parts = [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in content]
        if self.form.parts:
            for part in parts:
                if isinstance(part.get("text"), str):
                    part["text"] = text(part["text"])
            return parts
        other = [p.get("type") for p in parts if p.get("type") != "text"]
        if other:
            raise TemplateError(
                f"message {index} ({message['role']}) has parts of type {other}, "
                "and the chat template only takes text"
            )
        return text("".join(p["text"] for p in parts))

    def _call(self, call: Any, index: int, k: int, text: Any) -> dict[str, Any]:
        if not isinstance(call, Mapping):
            raise TemplateError(
                f"message {index} has a tool call that is no mapping: {call!r:.200}"
            )
        function = dict(call.get("function") or call)
        if "name" not in function:
            raise TemplateError(f"message {index} has a tool call without a name: {call!r:.200}")
        arguments = function.get("arguments", {})
        if self.form.arguments_as_text:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _parsed(arguments)
        out = {
            "type": call.get("type", "function"),
            "function": {
                "name": text(str(function["name"])),
                "arguments": self.shield.cover_tree(arguments),
            },
        }
        identity = call.get("id")
        if identity is None and self.form.call_ids:
            identity = f"call{k:05d}"
        if identity is not None:
            out["id"] = identity
        return out


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _shortened(roles: list[Any]) -> str:
    return str(roles) if len(roles) < 12 else f"{roles[:4]} ... {roles[-4:]}"

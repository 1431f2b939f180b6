"""Parser of the texts of published chat templates, recognized by a built-in family's marks.

The form of thoughts and calls is not built in: thoughts are parsed if the template has a field for
them, and the syntax of calls is learnt at the first text, from one call that the template writes.

Next: :mod:`torchrl_llm.data.text.families` has the families,
:mod:`torchrl_llm.data.text.whole_chats` parses texts with the parser found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torchrl_llm.data.messages import REASONING_KEYS
from torchrl_llm.data.text.call_syntax import ANSWER, NAME, VALUE, CallSyntax
from torchrl_llm.data.text.codec import Shield
from torchrl_llm.data.text.families import BUILTIN_PARSERS, BUILTIN_TEMPLATES
from torchrl_llm.data.text.inverse_parser import InverseParser, Message
from torchrl_llm.data.text.learnt_calls import syntax_of
from torchrl_llm.data.text.probe import TOOL, USER, calling
from torchrl_llm.data.text.renderer import Form, Renderer
from torchrl_llm.errors import TemplateError

# The line end between turns may be missing, and a call may have its own end mark.
_IM_ENDS = {None: (r"<\|im_end\|>", r"\n?")}
_ENDS = {
    "chatml_format": _IM_ENDS,
    "qwen": _IM_ENDS,
    "llama3": {None: (r"<\|eo[tm]_id\|>", "")},
    "llama": {None: (r"<\|eo[tm]\|>", r"\n?")},
}
_FORMS = (
    Form(),
    Form(arguments_as_text=True),
    Form(empty_tools=True),
    Form(text=False, parts=True),
)


def parser_for_template(template: str) -> InverseParser | None:
    """The parser for a template's text, selected by the marks that the template writes.

    ``None`` for a template of no built-in family.
    """
    for name, text in BUILTIN_TEMPLATES.items():
        if template == text:
            return BUILTIN_PARSERS[name]
    if "<|start_header_id|>" in template and "<|eot_id|>" in template:
        name = "llama3"
    elif "<|header_start|>" in template and "<|eot|>" in template:
        name = "llama"
    elif "<|im_start|>" in template and "<|im_end|>" in template and "<|im_sep|>" not in template:
        name = "qwen" if "<tool_response>" in template else "chatml_format"
    else:
        return None
    return replace(BUILTIN_PARSERS[name], hook=partial(_read, template, name), ends=_ENDS[name])


def _read(template: str, name: str, messages: list[Message]) -> list[Message]:
    _check_answer(template, name)
    return _fields(template, name, messages)


def _fields(template: str, name: str, messages: list[Message]) -> list[Message]:
    thinks = "</think>" in template and any(key in template for key in REASONING_KEYS)
    if thinks:
        last = messages[-1] if messages else {}
        prompts = ("<think>", "<think></think>")
        if last.get("is_complete") is False and "".join(last["content"].split()) in prompts:
            messages = messages[:-1]  # a generation prompt that opens a thought
        messages = [_thought(message) for message in messages]
    if any(mark in template for mark in ("tool_call", "function")):
        syntax = _call_syntax(template, name)
        if syntax is not None:
            messages = [_calls(syntax, message) for message in messages]
    family = BUILTIN_PARSERS[name]
    return messages if family.hook is None else family.hook(messages)


def _thought(message: Message) -> Message:
    opened = message["content"].lstrip("\n")
    thought, shut, rest = opened.removeprefix("<think>").partition("</think>")
    if message["role"] != "assistant" or not opened.startswith("<think>") or not shut:
        return message
    thought = thought.removeprefix("\n").removesuffix("\n")
    rest = rest.removeprefix("\n").removeprefix("\n")
    return {**message, "content": rest, "reasoning_content": thought}


def _calls(syntax: CallSyntax, message: Message) -> Message:
    if message["role"] != "assistant" or not message.get("is_complete", True):
        return message
    read = syntax.parse(message["content"], {})
    if not read.found:
        return message
    message = {**message, "content": read.content}
    if read.errors:
        message["tool_call_errors"] = read.errors
    if read.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in read.calls
        ]
    return message


@cache
def _check_answer(template: str, name: str) -> None:
    """Raise if the parser does not remove everything that the template adds to an answer."""
    chat = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
    raw = next(_written(template, name, chat), None)
    said = _fields(template, name, raw)[-1]["content"].strip() if raw else ANSWER
    if said != ANSWER and ANSWER in said:
        raise TemplateError(
            f"the chat template writes an answer as {said!r:.200}, which no parser reads; "
            "register it with add_chat_template(..., inverse_parser=...), or keep token ids"
        )


@cache
def _call_syntax(template: str, name: str) -> CallSyntax | None:
    """The syntax of a template's calls; ``None`` if the family parses them, or it has none."""
    chat = [{"role": "user", "content": USER}, calling([(NAME, VALUE)])]
    for raw in _written(template, name, chat, [TOOL]):
        syntax, hook = syntax_of(raw[-1]["content"]), BUILTIN_PARSERS[name].hook
        if syntax is not None:
            return None if hook is not None and hook(raw)[-1].get("tool_calls") else syntax
    return None


def _written(
    template: str, name: str, chat: list[Message], tools: list[Any] | None = None
) -> Iterator[list[Message]]:
    """The turns of a rendered chat, for each form of messages that the template accepts."""
    for form in _FORMS:
        renderer = Renderer(template, Shield(()), {"bos_token": "", "eos_token": ""}, form)
        with suppress(TemplateError):
            text = renderer.render(chat, tools=tools).text
            yield replace(BUILTIN_PARSERS[name], hook=None, ends=_ENDS[name]).parse(text)

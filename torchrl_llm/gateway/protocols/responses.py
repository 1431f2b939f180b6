"""``/v1/responses`` of OpenAI: a conversation as items; nothing is stored between calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torchrl_llm.gateway.calls import Answer
from torchrl_llm.gateway.protocols import fields
from torchrl_llm.gateway.protocols.chat_completions import NO_OTHERS, OPENAI, tool_choice
from torchrl_llm.gateway.protocols.fields import Field, Only, Table, need, read, refused, texts
from torchrl_llm.gateway.protocols.protocol import Protocol, Reply, arguments_text, new_id, pieces

_LOG_PROBS = "message.output_text.logprobs"

# -- requests --------------------------------------------------------------------------------------


def _input(given: Any, path: str) -> list[dict[str, Any]]:
    """The messages of a text or of items; the items of one turn become one message."""
    if isinstance(read(str | list, given, path), str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    before: int | None = None
    for i, item in enumerate(given):
        kind, found = fields.read_typed(_ITEMS, item, f"{path}.{i}", _UNKNOWN, default="message")
        message = _message(kind, found)
        at = _ORDER[kind] if message["role"] == "assistant" else None
        if None not in (before, at) and (before < at or before == at == _ORDER["function_call"]):
            message = fields.joined(messages.pop(), message)
        messages.append(message)
        before = at
    return [fields.canonical(message, path) for message in messages]


def _message(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    if kind == "message":
        return found
    if kind == "function_call_output":
        return {**found, "role": "tool"}
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [found]}
    summary = found.get("summary") or None
    return {"role": "assistant", "reasoning_content": found.get("reasoning_content", summary)}


_UNKNOWN = "is an item of type {!r:.50}, which is not known here"
_TEXT = texts("input_text", "output_text", "text")
_NOTES: Table = {
    **dict.fromkeys(("id", "status", "phase", "encrypted_content", "parsed_arguments"), Any),
    "caller": Only({"type": "direct"}),
}
_ROLE = Literal["system", "developer", "user", "assistant"]
_THOUGHTS = Field(texts("reasoning_text"), "reasoning_content")
_ITEMS: dict[str, Table] = {
    "message": {"role": need(_ROLE), "content": need(_TEXT), **_NOTES},
    "reasoning": {"summary": texts("summary_text"), "content": _THOUGHTS, **_NOTES},
    "function_call": {"name": need(str), "arguments": str, "call_id": need(str, "id"), **_NOTES},
    "function_call_output": {
        "output": Field(_TEXT, "content"),
        "call_id": need(str, "tool_call_id"),
        **_NOTES,
    },
}
_FUNCTION_TYPE = Field(Literal["function"], needed=True, unused=True)
_TOOL: Table = {"type": _FUNCTION_TYPE, **fields.FUNCTION, "parameters": dict}
# The order of the items of one turn; only calls may be repeated.
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


def _previous(value: Any, path: str) -> None:
    read(str, value, path)
    raise refused(path, "names what is not kept here: send all items")


class Responses(Protocol):
    """OpenAI's responses."""

    path = "/v1/responses"
    no_messages = ("input", "must be a text, or have at least one item")
    table: ClassVar[Table] = {
        "previous_response_id": _previous,
        "instructions": Field(str, "system"),
        "input": need(_input, "messages"),
        "tools": [_TOOL],
        "tool_choice": tool_choice,
        **OPENAI,
        "max_output_tokens": fields.LENGTH,
        "stop": fields.STOP,
        "store": bool,
        "top_logprobs": NO_OTHERS,
        "include": fields.one_or_more(Literal["reasoning.encrypted_content", _LOG_PROBS]),
        "reasoning": {},
        "text": {"format": Only({"type": "text"}), "verbosity": Only("medium")},
        "truncation": Literal["disabled"],
    }

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write the answer, see :meth:`Protocol.response`."""
        [answer] = reply.answers
        prompt, sampled = reply.token_counts
        cut = not answer.finish_reason.whole
        return {
            **_begun(reply),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(reply, answer),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
            **reply.prompt_ids(),
            **reply.token_ids(answer),
        }

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write the answer as a stream, see :meth:`Protocol.events`."""
        whole = self.response(reply)
        begun = {**_begun(reply), "id": whole["id"], "created_at": whole["created_at"]}
        for number, event in enumerate(_events(begun, whole)):
            yield {**event, "sequence_number": number}


# -- answers ---------------------------------------------------------------------------------------


_REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p")


def _begun(reply: Reply) -> dict[str, Any]:
    """The response before the answer, which repeats the request's settings."""
    asked, now = reply.body, int(time.time())
    return {
        **dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage")),
        **{name: asked.get(name) for name in _REPEATED},
        **{"id": new_id("resp_"), "object": "response", "created_at": now, "model": reply.model},
        "status": "in_progress",
        "metadata": asked.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "truncation": "disabled",
    }


def _output(reply: Reply, answer: Answer) -> list[dict[str, Any]]:
    message, items = answer.message, []
    calls = message.get("tool_calls", ())
    if (reasoning := message.get("reasoning_content")) is not None:
        part = {"type": "reasoning_text", "text": reasoning}
        items.append(_item("reasoning", "rs_", summary=[], content=[part]))
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        if _LOG_PROBS in (reply.body.get("include") or ()):
            part["logprobs"] = reply.token_entries(answer)
        items.append(_item("message", "msg_", role="assistant", content=[part]))
    for call in calls:
        called = {"name": call["function"]["name"], "arguments": arguments_text(call)}
        items.append(_item("function_call", "fc_", call_id=call["id"], **called))
    return items


def _item(kind: str, prefix: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, "id": new_id(prefix), "status": "completed", **values}


def _events(begun: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        started = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", **at, "item": started}
        for event in _item_events(item):
            yield {**event, **at, "item_id": item["id"]}
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        for piece in pieces(item["arguments"]):
            yield {"type": f"{name}.delta", "delta": piece}
        yield {"type": f"{name}.done", "name": item["name"], "arguments": item["arguments"]}
        return
    [part], at = item["content"], {"content_index": 0}
    name = f"response.{part['type']}"
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": f"{name}.delta", **at, "delta": piece, "logprobs": []}
    log_probs = part.get("logprobs", [])
    yield {"type": f"{name}.done", **at, "text": part["text"], "logprobs": log_probs}
    yield {"type": "response.content_part.done", **at, "part": part}

"""``/v1/responses`` of OpenAI: a conversation as items, of which nothing is kept between calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Annotated, Any, Literal

from torchrl_llm._checked import In
from torchrl_llm.gateway.calls import Answer, Call
from torchrl_llm.gateway.protocols.chat_completions import take_stream
from torchrl_llm.gateway.protocols.fields import (
    CALL_NOTES,
    Fields,
    canonical,
    function_tool,
    objects,
    refused,
    shown_tools,
    take_sampling,
    take_text,
)
from torchrl_llm.gateway.protocols.protocol import (
    Protocol,
    Reply,
    arguments_text,
    new_id,
    pieces,
)

_LOG_PROBS = "message.output_text.logprobs"
_INCLUDED = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
_TEXTS = ("input_text", "output_text", "text")
_NOTES = ("id", "status", "phase", "encrypted_content", *CALL_NOTES)
_DIRECT = {"caller": ({"type": "direct"},)}
# The order of the items of one turn; only calls may come more than once.
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


class Responses(Protocol):
    """OpenAI's responses."""

    path = "/v1/responses"

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call, see :meth:`Protocol.parse`."""
        fields = Fields(body)
        if fields.take("previous_response_id", str) is not None:
            raise refused("previous_response_id", "names what is not kept here: send all items")
        messages = _messages(fields)
        tools = [_tool(each) for each in fields.objects("tools")]
        call = Call(
            messages=messages,
            tools=shown_tools(fields, tools),
            sampling=take_sampling(fields, "max_output_tokens"),
        )
        take_stream(fields)
        fields.take("store", bool)
        fields.take("top_logprobs", Annotated[int, In("[0, 0]"), "of the sampled token only"])
        fields.items("include", _INCLUDED)
        Fields(fields.take("reasoning", dict, {}), "reasoning").finish({}, ())
        text = Fields(fields.take("text", dict, {}), "text")
        text.finish({"format": ({"type": "text"},), "verbosity": ("medium",)}, ())
        fields.take("truncation", Literal["disabled"])
        fields.finish()
        return call

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
        whole, numbers = self.response(reply), count()
        begun = {**_begun(reply), "id": whole["id"], "created_at": whole["created_at"]}
        for event in _events(begun, whole):
            yield {**event, "sequence_number": next(numbers)}


# -- requests --------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    instructions, given = fields.take("instructions", str), fields.need("input", str | list)
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return *messages, {"role": "user", "content": given}
    before: int | None = None
    for item in objects(given, "input"):
        kind = item.take("type", str, "message")
        if kind not in _ITEMS:
            raise refused(item.path, f"is an item of type {kind!r:.50}, which is not known here")
        message = _ITEMS[kind](item)
        item.finish(_DIRECT, _NOTES)
        at = _ORDER[kind] if message["role"] == "assistant" else None
        if None not in (before, at) and (before < at or before == at == _ORDER["function_call"]):
            message = _joined(messages.pop(), message)
        messages.append(message)
        before = at
    if not messages:
        raise refused("input", "must be a text, or have at least one item")
    return tuple(canonical(message, "input") for message in messages)


def _joined(turn: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    calls = [*turn.get("tool_calls", ()), *message.get("tool_calls", ())]
    return {**turn, "content": turn["content"] + message["content"], "tool_calls": calls}


def _message(item: Fields) -> dict[str, Any]:
    role = item.need("role", Literal["system", "developer", "user", "assistant"])
    content = take_text(item, kinds=_TEXTS)
    if content is None:
        raise refused(item.of("content"), "is missing")
    return {"role": "system" if role == "developer" else role, "content": content}


def _reasoning(item: Fields) -> dict[str, Any]:
    summary = take_text(item, "summary", ("summary_text",))
    content = take_text(item, "content", ("reasoning_text",))
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": (summary or None) if content is None else content,
    }


def _call(item: Fields) -> dict[str, Any]:
    function = {"name": item.need("name", str), "arguments": item.take("arguments", str)}
    call = {"id": item.need("call_id", str), "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(item: Fields) -> dict[str, Any]:
    text = take_text(item, "output", _TEXTS)
    return {"role": "tool", "content": text, "tool_call_id": item.need("call_id", str)}


_ITEMS = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _result,
}


def _tool(fields: Fields) -> dict[str, Any]:
    fields.need("type", Literal["function"])
    return function_tool(fields)


# -- answers ---------------------------------------------------------------------------------------


def _begun(reply: Reply) -> dict[str, Any]:
    """The response before there is an answer, which repeats what was asked for."""
    body = reply.body
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
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

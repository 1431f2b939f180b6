"""``/v1/messages`` of Anthropic: a conversation as blocks, without log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Call, RefusedCallError
from torchrl_llm.gateway.protocols.fields import (
    NEUTRAL,
    Fields,
    canonical,
    function_tool,
    objects,
    part_text,
    refused,
    take_sampling,
    take_text,
)
from torchrl_llm.gateway.protocols.protocol import (
    Protocol,
    Reply,
    finish_reason,
    new_id,
    pieces,
)

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
_NEUTRAL = {
    **NEUTRAL,
    "mcp_servers": ([],),
    "output_config": ({},),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
}
_IGNORED = ("cache_control", "metadata")
_DIRECT = {"caller": ({"type": "direct"},)}


class AnthropicMessages(Protocol):
    """Anthropic's messages."""

    path = "/v1/messages"

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call, see :meth:`Protocol.parse`."""
        call = self.parse_count(body)
        if "max_new_tokens" not in call.sampling:
            raise refused("max_tokens", "is missing")
        return call

    def parse_count(self, body: Mapping[str, Any]) -> Call:
        """Read a call whose prompt is counted only, which need not say ``max_tokens``.

        Args:
            body: of the request.

        Raises:
            RefusedCallError: a field that is wrong or cannot be honoured.
        """
        fields = Fields(body)
        system = take_text(fields, "system")
        messages = [] if system is None else [{"role": "system", "content": system}]
        for each in fields.objects("messages"):
            messages += [canonical(message, each.path) for message in _messages(each)]
        if not messages:
            raise refused("messages", "must have at least one message")
        if messages[-1]["role"] == "assistant":  # the answer goes on with it
            messages[-1] = {**messages[-1], "is_complete": False}
        call = Call(
            messages=tuple(messages),
            tools=_tools(fields),
            sampling=take_sampling(fields, "max_tokens", stop="stop_sequences"),
        )
        fields.take("model", str)
        fields.take("stream", bool)
        fields.finish(_NEUTRAL, _IGNORED)
        return call

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write the answer, see :meth:`Protocol.response`."""
        [answer] = reply.answers
        prompt, sampled = reply.token_counts
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": _blocks(answer.message),
            **_stop(reply, answer),
            "usage": {"input_tokens": prompt, "output_tokens": sampled},
        }

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write the answer as a stream, see :meth:`Protocol.events`."""
        whole = self.response(reply)
        usage, stop = whole["usage"], {"stop_reason": None, "stop_sequence": None}
        begun = {**whole, **stop, "content": [], "usage": {**usage, "output_tokens": 0}}
        yield {"type": "message_start", "message": begun}
        for i, block in enumerate(whole["content"]):
            for event in _block_events(block):
                yield {**event, "index": i}
        stop = {name: whole[name] for name in stop}
        yield {"type": "message_delta", "delta": stop, "usage": usage}
        yield {"type": "message_stop"}

    def refusal(self, error: RefusedCallError, status: int) -> dict[str, Any]:
        """Write an error, see :meth:`Protocol.refusal`."""
        message = error.message
        if error.kind == "context":
            message = f"prompt is too long: {message}"  # clients look for these words
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


# -- requests --------------------------------------------------------------------------------------


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages that one of Anthropic's holds, for it may hold several results of tools."""
    role = fields.need("role", Literal["user", "assistant", "system"])
    content = fields.need("content", str | list)
    fields.finish({}, ("cache_control",))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, fields.of("content"))
    return [_turn(blocks)] if role == "assistant" else _user_messages(role, blocks)


def _turn(blocks: Sequence[Fields]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.take("type", str)
        if kind == "thinking":
            thoughts.append(block.need("thinking", str))
            block.finish({}, ("signature",))
        elif kind == "tool_use":
            calls.append(_call(block))
        else:
            texts.append(_text(block, kind))
    message = {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
    return {**message, "reasoning_content": "".join(thoughts)} if thoughts else message


def _call(block: Fields) -> dict[str, Any]:
    function = {"name": block.need("name", str), "arguments": block.need("input", dict | str)}
    call = {"id": block.need("id", str), "function": function}
    block.finish(_DIRECT, ("cache_control",))
    return call


def _user_messages(role: str, blocks: Sequence[Fields]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.take("type", str)
        if kind == "tool_result" and role == "user":
            messages.append(_result(block))
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _text(block, kind)
        else:
            messages.append({"role": role, "content": _text(block, kind)})
    return messages


def _result(block: Fields) -> dict[str, Any]:
    text, call_id = take_text(block), block.need("tool_use_id", str)
    block.take("is_error", bool)  # the text says it
    block.finish({}, ("cache_control",))
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _text(block: Fields, kind: str | None) -> str:
    if kind != "text":
        raise refused(block.path, f"is a block of type {kind!r:.50}, which is not known here")
    return part_text(block)


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    tools = []
    for each in fields.objects("tools"):
        each.take("type", Literal["custom"])
        tools.append(function_tool(each, "input_schema"))
    choice = Fields(fields.take("tool_choice", dict, {"type": "auto"}), "tool_choice")
    kind = choice.need("type", Literal["auto", "none"])
    choice.finish({"disable_parallel_tool_use": (False,)}, ())
    return tuple(tools) if kind == "auto" else ()


# -- answers ---------------------------------------------------------------------------------------


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks, calls = [], message.get("tool_calls", ())
    if (reasoning := message.get("reasoning_content")) is not None:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        called = {"name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", "id": call["id"], **called})
    return blocks


def _stop(reply: Reply, answer: Answer) -> dict[str, Any]:
    reason, strings = finish_reason(answer), reply.body.get("stop_sequences")
    if strings and reason is FinishReason.STOP:
        # The tokens of a stop string are among the sampled ones, and only the last of all is one.
        text = "".join(reply.port.token_texts(answer.token_ids))
        if found := [string for string in strings if string in text]:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(found, key=text.index)}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _block_events(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        empty, delta, field = {"input": {}}, "input_json_delta", "partial_json"
        text = json.dumps(block["input"])
    else:
        field = "text" if kind == "text" else "thinking"
        empty, delta, text = {field: ""}, f"{field}_delta", block[field]
    yield {"type": "content_block_start", "content_block": {**block, **empty}}
    for piece in pieces(text):
        yield {"type": "content_block_delta", "delta": {"type": delta, field: piece}}
    yield {"type": "content_block_stop"}

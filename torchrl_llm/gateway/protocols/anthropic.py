"""``/v1/messages`` of Anthropic: a conversation as blocks, without log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Literal

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Call, RefusedCallError
from torchrl_llm.gateway.protocols import fields, protocol
from torchrl_llm.gateway.protocols.fields import Field, Only, Table, need, read, refused, texts
from torchrl_llm.gateway.protocols.protocol import ERROR_TYPES, Protocol, Reply

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_OWN_ERROR_TYPES = {404: "not_found_error", 413: "request_too_large", 500: "api_error"}
_ERROR_TYPES = {**ERROR_TYPES, **_OWN_ERROR_TYPES}

# -- requests --------------------------------------------------------------------------------------


def _conversation(given: Any, path: str) -> list[dict[str, Any]]:
    messages = list(chain(*read([_messages], given, path)))
    if messages and messages[-1]["role"] == "assistant":  # the answer continues it
        messages[-1]["is_complete"] = False
    return messages


def _messages(given: Any, path: str) -> list[dict[str, Any]]:
    """Convert one message of Anthropic's protocol; it may contain several tool results."""
    found = read(_MESSAGE, given, path)
    role, content = found["role"], found["content"]
    if isinstance(content, str):
        return [fields.canonical(found, path)]
    messages = [{"role": role, "content": ""}] if role == "assistant" else []
    for i, block in enumerate(content):
        message = _block_message(role, block, f"{path}.content.{i}")
        if messages and messages[-1]["role"] == message["role"] == role:
            message = fields.joined(messages.pop(), message)
        messages.append(message)
    return [fields.canonical(message, path) for message in messages]


def _block_message(role: str, given: Any, path: str) -> dict[str, Any]:
    unknown = "is a block of type {!r:.50}, which is not known here"
    kind, found = fields.read_typed(_BLOCKS[role], given, path, unknown)
    if kind == "tool_use":
        return {"role": role, "tool_calls": [found]}
    return {"role": "tool" if kind == "tool_result" else role, **found}


def _tool_choice(given: Any, path: str) -> str:
    table = {"type": need(Literal["auto", "none"]), "disable_parallel_tool_use": Only(False)}
    return read(table, given, path)["type"]


_ROLE = Literal["user", "assistant", "system"]
_MESSAGE: Table = {"role": need(_ROLE), "content": need(str | list), "cache_control": Any}
_THINKING: Table = {"thinking": need(str, "reasoning_content"), "signature": Any}
_TOOL_USE: Table = {
    "name": need(str),
    "input": need(dict | str, "arguments"),
    "id": need(str),
    "cache_control": Any,
    "caller": Only({"type": "direct"}),
}
_TOOL_RESULT: Table = {
    "content": texts("text"),
    "tool_use_id": need(str, "tool_call_id"),
    "is_error": Field(bool, unused=True),  # it is in the text
    "cache_control": Any,
}
_BLOCKS: dict[str, dict[str, Table]] = {
    "system": {"text": fields.PART},
    "user": {"text": fields.PART, "tool_result": _TOOL_RESULT},
    "assistant": {"text": fields.PART, "thinking": _THINKING, "tool_use": _TOOL_USE},
}
_CUSTOM = Field(Literal["custom"], unused=True)
_TOOL: Table = {"type": _CUSTOM, **fields.FUNCTION, "input_schema": Field(dict, "parameters")}


class AnthropicMessages(Protocol):
    """Anthropic's messages."""

    path = "/v1/messages"
    table: ClassVar[Table] = {
        "system": texts("text"),
        "messages": _conversation,
        "tools": [_TOOL],
        "tool_choice": _tool_choice,
        **fields.BODY,
        "max_tokens": fields.LENGTH,
        "stop_sequences": fields.STOP,
        "cache_control": Any,
        "metadata": Any,
        "mcp_servers": Only([]),
        "output_config": Only({}),
        "speed": Only("standard"),
        "thinking": Only({"type": "disabled"}),
    }

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call, see :meth:`Protocol.parse`."""
        call = self.parse_count(body)
        if "max_new_tokens" not in call.sampling:
            raise refused("max_tokens", "is missing")
        return call

    def parse_count(self, body: Mapping[str, Any]) -> Call:
        """Read a call for counting tokens; ``max_tokens`` is optional.

        Args:
            body: JSON body of the request.

        Raises:
            RefusedCallError: a field is wrong or cannot be honoured.
        """
        return super().parse(body)

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write the answer, see :meth:`Protocol.response`."""
        [answer] = reply.answers
        prompt, sampled = reply.token_counts
        return {
            "id": protocol.new_id("msg_"),
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
            message = f"prompt is too long: {message}"  # clients search for these words
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


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
    reason, strings = protocol.finish_reason(answer), reply.body.get("stop_sequences")
    if strings and reason is FinishReason.STOP:
        # The sampled tokens include the stop string; only the last token can be a stop token.
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
    for piece in protocol.pieces(text):
        yield {"type": "content_block_delta", "delta": {"type": delta, field: piece}}
    yield {"type": "content_block_stop"}

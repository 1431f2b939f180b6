"""``/v1/chat/completions`` of OpenAI, with vLLM's further fields for sampling and token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from torchrl_llm._checked import In
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Call
from torchrl_llm.gateway.protocols.fields import (
    CALL_NOTES,
    Fields,
    canonical,
    function_tool,
    refused,
    shown_tools,
    take_sampling,
    take_text,
)
from torchrl_llm.gateway.protocols.protocol import (
    Protocol,
    Reply,
    arguments_text,
    finish_reason,
    pieces,
)

NUM_SAMPLES = Annotated[int, In("[1, 128]")]
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "length",  # no client knows a word for it, and the text is cut
    FinishReason.TOOL_CALLS: "tool_calls",
}
"""OpenAI's word for how an answer ended."""

_ROLE = Literal["system", "developer", "user", "assistant", "tool"]
# What a client's object of our own answer may hold.
_UNUSED = {"annotations": ([],)}


class ChatCompletions(Protocol):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    stream_end = ("data: [DONE]\n\n",)

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call, see :meth:`Protocol.parse`."""
        fields = Fields(body)
        messages = tuple(_message(each) for each in fields.objects("messages"))
        if not messages:
            raise refused("messages", "must have at least one message")
        tools = [_tool(each) for each in fields.objects("tools")]
        call = Call(
            messages=messages,
            tools=shown_tools(fields, tools),
            sampling=take_sampling(fields, "max_tokens", "max_completion_tokens"),
            num_samples=fields.take("n", NUM_SAMPLES, 1),
        )
        fields.take("logprobs", bool)
        fields.take("top_logprobs", Annotated[int, In("[0, 0]"), "of the sampled token only"])
        fields.take("store", Literal[False])
        take_stream(fields)
        fields.finish()
        return call

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write answers, see :meth:`Protocol.response`."""
        choices = [
            {"index": i, "message": _written(answer.message), **_end(reply, answer)}
            for i, answer in enumerate(reply.answers)
        ]
        told = {**reply.header("chatcmpl-", "chat.completion"), "choices": choices}
        return {**told, **reply.prompt_ids(), "usage": usage(reply)}

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write answers as a stream, see :meth:`Protocol.events`."""
        told = reply.header("chatcmpl-", "chat.completion.chunk")
        first = reply.prompt_ids()
        for i, answer in enumerate(reply.answers):
            for delta in _deltas(answer.message):
                choice = {"index": i, "delta": delta, "finish_reason": None}
                yield {**told, "choices": [choice], **first}
                first = {}
            yield {**told, "choices": [{"index": i, "delta": {}, **_end(reply, answer)}]}
        yield from usage_event(reply, told)


def take_stream(fields: Fields) -> None:
    """Check what a body says of its stream and of token ids.

    Args:
        fields: of the body.
    """
    fields.take("model", str)
    fields.take("stream", bool)
    fields.take("return_token_ids", bool)
    options = Fields(fields.take("stream_options", dict, {}), "stream_options")
    options.take("include_usage", bool)
    options.finish({"continuous_usage_stats": (False,)}, ("include_obfuscation",))


def usage(reply: Reply) -> dict[str, int]:
    """How many tokens there are, in OpenAI's words."""
    prompt, sampled = reply.token_counts
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


def usage_event(reply: Reply, told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The last event of a stream, where ``stream_options`` ask for the numbers of tokens.

    Args:
        reply: what is written.
        told: what each event begins with.
    """
    if (reply.body.get("stream_options") or {}).get("include_usage"):
        yield {**told, "choices": [], "usage": usage(reply)}


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.need("role", _ROLE)
    message = {"role": "system" if role == "developer" else role, "content": take_text(fields)}
    message["name"] = fields.take("name", str)
    if role == "assistant":
        message["reasoning_content"] = fields.take("reasoning_content", str)
        message["tool_calls"] = [_call(each) for each in fields.objects("tool_calls")]
    elif message["content"] is None:
        raise refused(fields.of("content"), "is missing")
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", str)
    fields.finish(_UNUSED, ())
    return canonical(message, fields.path)


def _call(fields: Fields) -> dict[str, Any]:
    fields.take("type", Literal["function"])
    function = Fields(fields.need("function", dict), fields.of("function"))
    called = {
        "name": function.need("name", str),
        "arguments": function.take("arguments", str | dict),
    }
    call = {"id": fields.take("id", str), "function": called}
    function.finish({}, CALL_NOTES)
    fields.finish({}, ("index",))
    return call


def _tool(fields: Fields) -> dict[str, Any]:
    fields.take("type", Literal["function"])
    tool = function_tool(Fields(fields.need("function", dict), fields.of("function")))
    fields.finish({}, ())
    return tool


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_written_call(call) for call in message.get("tool_calls", ())]
    written = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if message.get("reasoning_content") is not None:
        written["reasoning_content"] = message["reasoning_content"]
    return {**written, "tool_calls": calls} if calls else written


def _written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


def _end(reply: Reply, answer: Answer) -> dict[str, Any]:
    entries = {"content": reply.token_entries(answer)} if reply.body.get("logprobs") else None
    end = {"finish_reason": FINISH[finish_reason(answer)], "logprobs": entries}
    return {**end, **reply.token_ids(answer)}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if (reasoning := message.get("reasoning_content")) is not None:
        yield from ({"reasoning_content": piece} for piece in pieces(reasoning) or [""])
    for piece in pieces(message["content"]):
        yield {"content": piece}
    for i, call in enumerate(message.get("tool_calls", ())):
        written = _written_call(call)
        arguments = written["function"]["arguments"]
        written["function"]["arguments"] = ""
        yield {"tool_calls": [{"index": i, **written}]}
        for piece in pieces(arguments):
            yield {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}

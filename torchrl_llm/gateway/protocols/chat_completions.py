"""``/v1/chat/completions`` of OpenAI, with vLLM's further fields for sampling and token ids."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from torchrl_llm._checked import In
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer
from torchrl_llm.gateway.protocols import fields, protocol
from torchrl_llm.gateway.protocols.fields import Only, Table, need, read, refused, texts
from torchrl_llm.gateway.protocols.protocol import Reply, pieces

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "length",  # clients have no word for an interrupted answer
    FinishReason.TOOL_CALLS: "tool_calls",
}
"""OpenAI's finish reason."""


# -- requests --------------------------------------------------------------------------------------


def _message(given: Any, path: str) -> dict[str, Any]:
    role = fields.read_some({"role": need(_ROLE)}, given, path)["role"]
    return fields.canonical(read(_MESSAGES.get(role, _GIVEN), given, path), path)


def _function(given: Any, path: str) -> dict[str, Any]:
    table = {"type": Literal["function"], "function": need({**fields.FUNCTION, "parameters": dict})}
    return read(table, given, path)["function"]


def tool_choice(value: Any, path: str) -> str:
    """The kind of OpenAI's ``tool_choice``: a function of the value and its path."""
    if read(str | dict, value, path) not in ("auto", "none"):
        raise refused(path, f"can only be 'auto' or 'none' here, got {value!r:.100}")
    return value


_ROLE = Literal["system", "developer", "user", "assistant", "tool"]
_TEXT = texts("text")
# Fields of an earlier answer that a client sends back.
_SAID: Table = {"role": str, "content": _TEXT, "name": str, "annotations": Only([])}
_GIVEN: Table = {**_SAID, "content": need(_TEXT)}
_CALLED: Table = {"name": need(str), "arguments": str | dict, "parsed_arguments": Any}
_CALL: Table = {"type": Literal["function"], "function": need(_CALLED), "id": str, "index": Any}
_MESSAGES: dict[str, Table] = {
    "assistant": {**_SAID, "reasoning_content": str, "tool_calls": [_CALL]},
    "tool": {**_GIVEN, "tool_call_id": need(str)},
}
_STREAM: Table = {"include_usage": bool, "continuous_usage_stats": Only(False)}
OPENAI: Table = {
    **fields.BODY,
    "return_token_ids": bool,
    "stream_options": {**_STREAM, "include_obfuscation": Any},
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), Any),
    **dict.fromkeys(("metadata", "safety_identifier", "user"), Any),
}
"""The fields of a body in OpenAI's protocols."""
CHOICES: Table = {**OPENAI, "n": Annotated[int, In("[1, 128]")], "stop": fields.STOP}
"""The fields of a body whose answer has choices."""
NO_OTHERS = Annotated[int, In("[0, 0]"), "of the sampled token only"]


# -- answers ---------------------------------------------------------------------------------------


class Choices(protocol.Protocol):
    """OpenAI's protocols whose answers have choices."""

    stream_end = ("data: [DONE]\n\n",)
    id_prefix: str
    kinds: tuple[str, str]
    """The object of a whole answer, and of an event."""

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write answers, see :meth:`Protocol.response`."""
        choices = [{"index": i, **self.choice(reply, a)} for i, a in enumerate(reply.answers)]
        told = {**self._told(reply, self.kinds[0]), "choices": choices, "usage": _usage(reply)}
        return {**told, **self.prompt_ids(reply)}

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write answers as a stream, see :meth:`Protocol.events`."""
        told, first = self._told(reply, self.kinds[1]), self.prompt_ids(reply)
        for i, answer in enumerate(reply.answers):
            for piece in self.pieces(reply, answer):
                yield {**told, "choices": [{"index": i, **piece}], **first}
                first = {}
        if (reply.body.get("stream_options") or {}).get("include_usage"):
            yield {**told, "choices": [], "usage": _usage(reply)}

    def prompt_ids(self, reply: Reply) -> dict[str, Any]:
        """The ids of the prompt, unless each choice contains them."""
        return reply.prompt_ids()

    @abstractmethod
    def choice(self, reply: Reply, answer: Answer) -> dict[str, Any]:
        """One complete answer.

        Args:
            reply: the reply to write.
            answer: one of its answers.
        """

    @abstractmethod
    def pieces(self, reply: Reply, answer: Answer) -> Iterator[dict[str, Any]]:
        """One answer in pieces; the last has the finish reason.

        Args:
            reply: the reply to write.
            answer: one of its answers.
        """

    def _told(self, reply: Reply, kind: str) -> dict[str, Any]:
        told = {"id": protocol.new_id(self.id_prefix), "object": kind, "created": int(time.time())}
        return {**told, "model": reply.model}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = reply.token_counts
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


class ChatCompletions(Choices):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    table: ClassVar[Table] = {
        "messages": [_message],
        "tools": [_function],
        "tool_choice": tool_choice,
        **CHOICES,
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), fields.LENGTH),
        "logprobs": bool,
        "top_logprobs": NO_OTHERS,
        "store": Literal[False],
    }
    id_prefix, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def choice(self, reply: Reply, answer: Answer) -> dict[str, Any]:
        """Write one answer, see ``Choices.choice``."""
        return {"message": _written(answer.message), **_end(reply, answer)}

    def pieces(self, reply: Reply, answer: Answer) -> Iterator[dict[str, Any]]:
        """Write one answer as a stream, see ``Choices.pieces``."""
        for delta in _deltas(answer.message):
            yield {"delta": delta, "finish_reason": None}
        yield {"delta": {}, **_end(reply, answer)}


def _end(reply: Reply, answer: Answer) -> dict[str, Any]:
    entries = {"content": reply.token_entries(answer)} if reply.body.get("logprobs") else None
    end = {"finish_reason": FINISH[protocol.finish_reason(answer)], "logprobs": entries}
    return {**end, **reply.token_ids(answer)}


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_written_call(call) for call in message.get("tool_calls", ())]
    written = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if message.get("reasoning_content") is not None:
        written["reasoning_content"] = message["reasoning_content"]
    return {**written, "tool_calls": calls} if calls else written


def _written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": protocol.arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


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

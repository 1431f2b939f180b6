"""``/v1/completions`` of OpenAI: a text or token ids that the model continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any

from torchrl_llm._checked import In
from torchrl_llm.gateway.calls import Answer, Call
from torchrl_llm.gateway.protocols.chat_completions import (
    FINISH,
    NUM_SAMPLES,
    take_stream,
    usage,
    usage_event,
)
from torchrl_llm.gateway.protocols.fields import LARGEST, Fields, refused, take_sampling
from torchrl_llm.gateway.protocols.protocol import Protocol, Reply, pieces


class Completions(Protocol):
    """OpenAI's completions."""

    path = "/v1/completions"
    stream_end = ("data: [DONE]\n\n",)

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call, see :meth:`Protocol.parse`."""
        fields = Fields(body)
        call = Call(
            prompt=_prompt(fields.need("prompt", str | list)),
            sampling=take_sampling(fields, "max_tokens"),
            num_samples=fields.take("n", NUM_SAMPLES, 1),
        )
        fields.take("logprobs", Annotated[int, In("[0, 1]"), "of the sampled token only"])
        take_stream(fields)
        fields.finish()
        return call

    def response(self, reply: Reply) -> dict[str, Any]:
        """Write answers, see :meth:`Protocol.response`."""
        choices = [
            {"index": i, "text": answer.message["content"], **_end(reply, answer)}
            for i, answer in enumerate(reply.answers)
        ]
        told = reply.header("cmpl-", "text_completion")
        return {**told, "choices": choices, "usage": usage(reply)}

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write answers as a stream, see :meth:`Protocol.events`."""
        told = reply.header("cmpl-", "text_completion")
        for i, answer in enumerate(reply.answers):
            for piece in pieces(answer.message["content"]):
                choice = {"index": i, "text": piece, "finish_reason": None, "logprobs": None}
                yield {**told, "choices": [choice]}
            yield {**told, "choices": [{"index": i, "text": "", **_end(reply, answer)}]}
        yield from usage_event(reply, told)


def _prompt(given: str | list[Any]) -> str | tuple[int, ...]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        [given] = given
    if isinstance(given, str):
        return given
    if not given or not all(type(each) is int and 0 <= each <= LARGEST for each in given):
        raise refused("prompt", "must be one text, or one list of token ids")
    return tuple(given)


def _end(reply: Reply, answer: Answer) -> dict[str, Any]:
    log_probs = None if reply.body.get("logprobs") is None else _log_probs(reply, answer)
    end = {"finish_reason": FINISH[answer.finish_reason], "logprobs": log_probs}
    return {**end, **reply.prompt_ids(), **reply.token_ids(answer)}


def _log_probs(reply: Reply, answer: Answer) -> dict[str, Any]:
    texts = reply.port.token_texts(answer.token_ids)
    return {
        "tokens": texts,
        "token_logprobs": answer.log_probs.tolist(),
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        "top_logprobs": None,
    }

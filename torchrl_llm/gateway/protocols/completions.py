"""``/v1/completions`` of OpenAI: a text or token ids that the model continues."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from torchrl_llm._checked import In
from torchrl_llm.gateway.calls import Answer
from torchrl_llm.gateway.protocols.chat_completions import CHOICES, FINISH, Choices
from torchrl_llm.gateway.protocols.fields import LARGEST, LENGTH, Table, need, read, refused
from torchrl_llm.gateway.protocols.protocol import Reply, pieces


def _prompt(given: Any, path: str) -> str | tuple[int, ...]:
    read(str | list, given, path)
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        [given] = given
    if isinstance(given, str):
        return given
    if not given or not all(type(each) is int and 0 <= each <= LARGEST for each in given):
        raise refused(path, "must be one text, or one list of token ids")
    return tuple(given)


class Completions(Choices):
    """OpenAI's completions."""

    path = "/v1/completions"
    table: ClassVar[Table] = {
        "prompt": need(_prompt),
        **CHOICES,
        "max_tokens": LENGTH,
        "logprobs": Annotated[int, In("[0, 1]"), "of the sampled token only"],
    }
    id_prefix, kinds = "cmpl-", ("text_completion", "text_completion")

    def prompt_ids(self, reply: Reply) -> dict[str, Any]:
        """None, because each choice contains them; see ``Choices.prompt_ids``."""
        return {}

    def choice(self, reply: Reply, answer: Answer) -> dict[str, Any]:
        """Write one answer, see ``Choices.choice``."""
        return {"text": answer.message["content"], **_end(reply, answer)}

    def pieces(self, reply: Reply, answer: Answer) -> Iterator[dict[str, Any]]:
        """Write one answer as a stream, see ``Choices.pieces``."""
        for piece in pieces(answer.message["content"]):
            yield {"text": piece, "finish_reason": None, "logprobs": None}
        yield {"text": "", **_end(reply, answer)}


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

"""A port that answers as a test tells it to, and keeps the calls that it got."""

import asyncio
import threading

import torch

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Port

PROMPT_IDS = torch.tensor([7, 8, 9])


def answer_of(message, finish_reason=FinishReason.STOP, sampled=None):
    """An answer whose token ids are the characters of what was sampled."""
    text = message["content"] if sampled is None else sampled
    token_ids = torch.tensor([ord(character) for character in text], dtype=torch.int64)
    log_probs = -torch.arange(len(text), dtype=torch.float32) / 4
    return Answer(message, finish_reason, PROMPT_IDS, token_ids, log_probs)


def text_answer(text, finish_reason=FinishReason.STOP, sampled=None):
    return answer_of({"role": "assistant", "content": text}, finish_reason, sampled)


class ScriptedPort(Port):
    """Gives the same answer to each call, or raises it."""

    model = "scripted"

    def __init__(self, answer=None):
        self.answer_or_error = answer or text_answer("4")
        self.calls = []
        self.waits = False
        self.was_called, self.was_cancelled = threading.Event(), threading.Event()

    @property
    def messages(self):
        """Those of the last call."""
        return list(self.calls[-1].messages)

    async def answer(self, call):
        self.calls.append(call)
        self.was_called.set()
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled.set()
        if isinstance(self.answer_or_error, Exception):
            raise self.answer_or_error
        return [self.answer_or_error] * call.num_samples

    def token_texts(self, token_ids):
        return [chr(token) for token in token_ids.tolist()]

    def count_tokens(self, call):
        self.calls.append(call)
        return 3

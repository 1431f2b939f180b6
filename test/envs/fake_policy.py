"""A policy that answers by a function, in all three input modes, with ragged tokens."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_llm.data.column import Column
from torchrl_llm.data.containers import ChatHistory, Text
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows, read_rows


def answer_four(prompt):
    return "<think>2+2</think><answer>4</answer>"


def chatter(prompt):
    return "well, well" + "." * (len(prompt) % 3)


class AnsweringPolicy(TensorDictModuleBase):
    """``answer(prompt) -> str``; the prompt is a Chat in history mode, else a string."""

    def __init__(self, mode="history", answer=answer_four, tokenizer=None):
        super().__init__()
        self.mode, self.answer, self.tokenizer = mode, answer, tokenizer
        self.in_keys = [(mode, "prompt")]
        self.out_keys = [(mode, "full"), ("tokens", "full"), ("log_probs", "full")]

    def _encode(self, text):
        if self.tokenizer is None:
            return torch.tensor([ord(c) for c in text])
        return torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids)

    def forward(self, td):
        prompts, texts = getattr(self, f"_{self.mode}")(td)
        responses = [self._encode(text) for text in texts]
        full = [torch.cat([p, r]) for p, r in zip(prompts, responses)]
        td.set("tokens", ragged_rows({"prompt": prompts, "response": responses, "full": full}))
        td.set("log_probs", ragged_rows({"full": [torch.full(x.shape, -0.5) for x in full]}))
        source = [
            torch.cat([torch.ones(len(p)), torch.full((len(r),), 3)]).to(torch.int8)
            for p, r in zip(prompts, responses)
        ]
        trace = {
            "source": source,
            "turn": [torch.where(s == 3, 0, -1).to(torch.int16) for s in source],
            "policy_version": [torch.where(s == 3, 0, -1).to(torch.int32) for s in source],
            "mask_reason": [(s != 3).to(torch.int8) for s in source],
        }
        td.set("trace", ragged_rows(trace))
        return td

    def _history(self, td):
        chats = td.get(("history", "prompt")).chats
        texts = [self.answer(chat) for chat in chats]
        turns = [[{"role": "assistant", "content": text}] for text in texts]
        td.set(
            "history",
            ChatHistory(
                prompt=History.of(chats),
                response=History.from_chats(turns),
                full=History.of([chat + turn for chat, turn in zip(chats, turns)]),
                batch_size=td.batch_size,
            ),
        )
        return [self._encode("".join(m["content"] for m in chat)) for chat in chats], texts

    def _text(self, td):
        prompts = td.get("text")._tensordict.get("prompt").tolist()
        texts = [self.answer(prompt) for prompt in prompts]
        text = Text._from_tensordict(td.get("text")._tensordict.copy())
        text._tensordict.set("full", Column.of([a + b for a, b in zip(prompts, texts)]))
        td.set("text", text)
        return [self._encode(prompt) for prompt in prompts], texts

    def _tokens(self, td):
        prompts = read_rows(td, ("tokens", "prompt"))
        return prompts, [self.answer(self.tokenizer.decode(ids)) for ids in prompts]

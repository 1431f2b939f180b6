"""A policy that answers by a function, in all three input modes, with ragged tokens."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_llm.data.column import Column
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.views import ChatHistory, Text, TokenTrace


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
        full = [torch.cat([p, r]) for p, r in zip(prompts, responses, strict=True)]
        td.set("tokens", ragged_rows({"prompt": prompts, "response": responses, "full": full}))
        td.set("log_probs", ragged_rows({"full": [torch.full(x.shape, -0.5) for x in full]}))
        td.set("trace", ragged_rows(self._trace(td, prompts, responses)))
        return td

    @staticmethod
    def _trace(td, prompts, responses):
        # sampled tokens of earlier turns keep their trace, as a real wrapper's do
        defaults = {"source": 1, "turn": -1, "policy_version": -1, "mask_reason": 1}
        trace = {}
        for name, default in defaults.items():
            old = read_rows(td, ("trace", name), None) or [None] * len(prompts)
            old = [
                row
                if row is not None and row.shape == ids.shape
                else ids.new_full(ids.shape, default)
                for row, ids in zip(old, prompts, strict=True)
            ]
            new = {"source": 3, "policy_version": 0, "mask_reason": 0}.get(name)
            trace[name] = [
                torch.cat([row.long(), torch.full_like(ids, row.max() + 1 if new is None else new)])
                for row, ids in zip(old, responses, strict=True)
            ]
            trace[name] = [row.to(TokenTrace._dtypes[name]) for row in trace[name]]
        return trace

    def _history(self, td):
        chats = td.get(("history", "prompt")).chats
        texts = [self.answer(chat) for chat in chats]
        turns = [[{"role": "assistant", "content": text}] for text in texts]
        td.set(
            "history",
            ChatHistory(
                prompt=History.of(chats),
                response=History.from_chats(turns),
                full=History.of([chat + turn for chat, turn in zip(chats, turns, strict=True)]),
                batch_size=td.batch_size,
            ),
        )
        return [self._encode("".join(m["content"] for m in chat)) for chat in chats], texts

    def _text(self, td):
        prompts = td.get("text")._tensordict.get("prompt").tolist()
        texts = [self.answer(prompt) for prompt in prompts]
        text = Text._from_tensordict(td.get("text")._tensordict.copy())
        text._tensordict.set(
            "full", Column.of([a + b for a, b in zip(prompts, texts, strict=True)])
        )
        td.set("text", text)
        return [self._encode(prompt) for prompt in prompts], texts

    def _tokens(self, td):
        prompts = read_rows(td, ("tokens", "prompt"))
        return prompts, [self.answer(self.tokenizer.decode(ids)) for ids in prompts]

"""A tokenizer without the special tokens of the built-in template: its markers are plain text."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchrl_llm.data import Chat, ChatHistory, History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.text import formatter
from torchrl_llm.modules import FakeWrapper


def bare_tokenizer():
    """Bytes and an end-of-text token; no template."""
    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def asked(chat):
    prompt = History.of([chat])
    return TensorDict(history=ChatHistory(prompt=prompt, batch_size=[1]), batch_size=[1])


def test_two_turns_in_chatml_as_plain_text_and_said_once_in_the_log(warned):
    formatter._TOLD.clear()
    policies = [FakeWrapper("ok", tokenizer=bare_tokenizer()) for _ in range(2)]
    assert sum("its markers are encoded as plain text" in text for text in warned) == 1
    first = policies[0](asked(Chat([{"role": "user", "content": "a"}])))
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert list(first["text"].full) == [text + "ok<end>"]
    [chat] = first["history"].full.chats
    assert (chat[-1]["content"], chat[-1]["is_complete"]) == ("ok", True)
    again = policies[0](asked(chat + [{"role": "user", "content": "b"}]))
    [before], [after] = (read_rows(x["tokens"], "full") for x in (first, again))
    assert torch.equal(after[: len(before)], before)
    # the sampled end-of-text stands for the marker that the template would write
    assert list(again["text"].prompt) == [text + f"ok<end>\n{text}".replace("user\na", "user\nb")]

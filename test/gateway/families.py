"""Template families for random sessions: a tokenizer of each, and what it can express."""

from __future__ import annotations

from functools import cache

import pytest
from data.text.test_preserving import OURS
from data.text.tokenizers_of_the_zoo import tokenizer_of
from data.text.zoo import ZOO, Specimen

from torchrl_llm.data.text.families import BUILTIN_TEMPLATES

_CHATML = {"special": ("<|im_start|>", "<|im_end|>"), "eos": "<|im_end|>"}
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_ABOUT = {
    "chatml_format": _CHATML,
    "qwen": _CHATML,
    "qwen3": {**_CHATML, "reasoning": "reasoning_content"},
    "llama": {"special": ("<|header_start|>", "<|header_end|>", "<|eot|>"), "eos": "<|eot|>"},
    "llama3": {"special": _HEADERS, "eos": "<|eot_id|>"},
    "falcon": {"special": (), "eos": "<|endoftext|>", "tools": False},
    "deepseek": {"special": (), "eos": "<｜end▁of▁sentence｜>", "tools": False},
    "dialogpt": {"special": (), "eos": "<|endoftext|>", "tools": False, "system": False},
}
_BOS = {"llama": "<|begin_of_text|>", "llama3": "<|begin_of_text|>"}
_BUILTIN = {
    name: Specimen(BUILTIN_TEMPLATES[name], bos=_BOS.get(name), **about)
    for name, about in _ABOUT.items()
}
# Rewrites of history: thoughts go, the last turn is closed otherwise.
_OF_THE_ZOO = ("drops_thoughts", "closes_last_otherwise")
# Contents as lists, arguments as text: the formatter brings messages into that form.
_IN_OTHER_FORMS = ("parts", "arguments_as_text")
FAMILIES: dict[str, Specimen] = {**_BUILTIN, **OURS, **{name: ZOO[name] for name in _OF_THE_ZOO}}
MORE = {name: each for name, each in ZOO.items() if name not in {*_OF_THE_ZOO, *_IN_OTHER_FORMS}}

EACH_FAMILY = [
    *FAMILIES,
    *(pytest.param(name, marks=pytest.mark.full) for name in MORE),
]


def specimen_of(name: str) -> Specimen:
    return FAMILIES.get(name) or MORE[name]


@cache
def family_tokenizer(name: str):
    return tokenizer_of(specimen_of(name), "bytes")

"""What the programs share: a tokenizer, models, chats, and a printer that only rounds."""

from __future__ import annotations

import functools

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensorclass
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm.assets import embedded_model_path

CHAT = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 12+30?"},
    {"role": "assistant", "content": "<think>easy</think><answer>42</answer>"},
]
OTHER = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 7+8?"},
    {"role": "assistant", "content": "<answer>15</answer>"},
]


@functools.cache
def tokenizer():
    """The embedded tokenizer, which has a pad token and a chat template."""
    return AutoTokenizer.from_pretrained(embedded_model_path())


@functools.cache
def model():
    """The embedded model."""
    return AutoModelForCausalLM.from_pretrained(embedded_model_path()).eval()


def plain(value):
    """Lists, numbers and strings of whatever a program has; floats rounded to 3 decimals."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return ["nested", str(value.dtype), [plain(row.tolist()) for row in value.unbind()]]
        return [str(value.dtype), list(value.shape), plain(value.tolist())]
    if hasattr(value, "role") and hasattr(value, "content") and is_tensorclass(value):
        return ["History", list(value.shape), plain(value.role), plain(value.content)]
    if isinstance(value, TensorDictBase) or is_tensorclass(value):
        if isinstance(value, LazyStackedTensorDict) or -1 in value.batch_size:
            return [type(value).__name__, [plain(row) for row in value.unbind(0)]]
        keys = sorted(map(str, value.keys()))
        return [type(value).__name__, list(value.batch_size), keys]
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, torch.Size):
        return f"Size{tuple(value)}"
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return type(value).__name__


def show(*values):
    """Print each value on a line."""
    for value in values:
        print(repr(plain(value)))


def read(thing, *names):
    """Print attributes of something, each on a line."""
    show(*[getattr(thing, name) for name in names])

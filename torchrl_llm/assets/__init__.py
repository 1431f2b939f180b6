"""What ships with the package: a tiny chat model, its tokenizer and its chat template.

The model (0.33M parameters, float32 safetensors) was made by
``sota-implementations/sft/embedded.py``, which makes it again from a seed. It adds two-digit
numbers, badly: it learned from pupils most of whom forget to carry or round, and is what
``sota-implementations/grpo`` trains when nothing else is named. Its tokenizer encodes any text (256
bytes), its context is 2,048 tokens.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["embedded_model_path"]


def embedded_model_path() -> Path:
    """Folder of the embedded chat model and its tokenizer, in the format of Hugging Face.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> tokenizer.decode(tokenizer("What is 37+85?").input_ids)
        'What is 37+85?'
    """
    return Path(__file__).parent / "embedded"

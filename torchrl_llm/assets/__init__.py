"""What ships with the package: a tiny chat model, its tokenizer and its chat template, and pairs.

The model (0.33M parameters, float32 safetensors) was made by
``sota-implementations/sft/embedded.py``, which makes it again from a seed. It adds two-digit
numbers, badly: it learned from pupils most of whom forget to carry or round, and is what
``sota-implementations/grpo`` trains when nothing else is named. Its tokenizer encodes any text (256
bytes), its context is 2,048 tokens. The pairs are 600 sums, each with a right and a wrong answer
that this model has sampled; ``torchrl-llm train dpo`` learns from them where no data is named.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PAIRS_OF_SUMS", "embedded_model_path"]

PAIRS_OF_SUMS = Path(__file__).parent / "pairs_of_sums.jsonl"
"""Rows with a prompt, a chosen and a rejected answer."""


def embedded_model_path() -> Path:
    """Folder of the embedded chat model and its tokenizer, in the format of Hugging Face.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> tokenizer.decode(tokenizer("What is 37+85?").input_ids)
        'What is 37+85?'
    """
    return Path(__file__).parent / "embedded"

"""Table of "Hardware and memory": what models of three sizes need, by formula.

    python docs/memory_table.py

It is what ``torchrl-llm memory`` prints for these models, whose shapes are given here, and no
weights are needed. ``docs/source/howto/memory_of_models.csv`` is written.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from transformers import Qwen2Config

from torchrl_llm.recipes import load_config, memory

TABLE = Path(__file__).parent / "source/howto/memory_of_models.csv"
# Layers, hidden width, heads, heads of keys, intermediate width, vocabulary, one embedding.
MODELS = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, 151_936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, 151_936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18_944, 152_064, False),
}
BFLOAT16 = {"dtype": "bfloat16"}
SETTINGS = {
    "all weights, float32": {},
    "all weights, bfloat16": BFLOAT16,
    "LoRA over bfloat16": {**BFLOAT16, "lora": {"enabled": True}},
}
TRAIN = {"micro_token_budget": 8192, "prompts_per_batch": 8, "device": "cuda"}
LENGTHS = {"prompt_tokens": 256, "max_tokens": 256}


def rows() -> list[list[str]]:
    """Header and lines of the table."""
    header = ["model", "trained", "parameters", "at rest", "activations", "cache", "sampling"]
    found = [[*header, "training"]]
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_config(folder, sizes)
            for setting, train_model in SETTINGS.items():
                found.append([name, setting, *_figures(folder, train_model)])
    return found


def write_config(folder: str | Path, sizes: tuple[int, int, int, int, int, int, bool]) -> None:
    """Write the ``config.json`` of a Qwen2.

    Args:
        folder: an existing one.
        sizes: as in ``MODELS``.
    """
    layers, hidden, heads, kv_heads, intermediate, vocabulary, is_tied = sizes
    Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
    ).save_pretrained(folder)


def _figures(folder: str, train_model: dict) -> list[str]:
    values = {
        "model": {"name": folder},
        "train": TRAIN,
        "train_model": {**train_model, "gradient_checkpointing": True},
        "inference_model": {"max_tokens": LENGTHS["max_tokens"]},
    }
    parts = memory.memory_parts(load_config(values), prompt_tokens=LENGTHS["prompt_tokens"])
    size = {part.name: part.num_bytes for part in parts}
    at_rest = size["weights"] + size["gradients"] + size["optimizer states"]
    shown = [at_rest, size["activations"], size["cache of sampling"]]
    shown += [memory.peak_bytes(parts, where) for where in ("sample", "train")]
    weights = next(part.note for part in parts if part.name == "weights")
    return [weights.partition(" ")[0], *(f"{each / 2**30:.1f}" for each in shown)]


if __name__ == "__main__":
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows())

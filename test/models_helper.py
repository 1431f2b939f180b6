"""A tiny model for tests, also in processes of their own, where there are no fixtures."""

from __future__ import annotations

import torch


def make_tiny_model(vocab_size=292, *, seed=0, **overrides):
    """A two-layer Qwen2 with tied embeddings, hidden 64, float32, in eval mode."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**{**settings, **overrides})).eval()

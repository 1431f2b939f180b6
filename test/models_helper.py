"""A tiny model and a tokenizer for tests, also in processes of their own, without fixtures."""

import torch

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46\n",
    "user\nassistant\nsystem\ntool\nHello, how are you? I'm fine.\n\n",
    "<answer>72</answer> <think>let me see</think> What is the sum of 3 and 4?\n",
]


def make_tokenizer(
    *, chat_template=CHATML, eos="<|im_end|>", pad="<|endoftext|>", vocab_size=292, extra=()
):
    """A byte-level BPE tokenizer with ChatML markers; ``pad=None`` leaves the pad token out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


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

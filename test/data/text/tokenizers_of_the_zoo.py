"""Tokenizers for the templates of the zoo, trained on a few lines.

Byte-level, and two that mark words as sentencepiece does: ``"metaspace"`` puts a space in front of
a text, ``"prepend"`` in front of every section behind a special token. Merges cross words and line
ends.
"""

from __future__ import annotations

from functools import cache

from data.text.zoo import ZOO

_CORPUS = (
    "user\nassistant\nsystem\ntool\nmodel\n\n\nWhat is the weather in Paris? It is sunny.\n\n"
    "Hello there, how are you?\nI am fine.\n  def f(x):\n    return x\n"
    "<think>\nlet me see\n</think>\n\n"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n<tool_response>\n21 degrees\n'
    "\n\nassistant\n\n. \n! \n\n  \n\t<|im_end|>\n|im_end|> im_end _end <|user|>\n"
)


def _trained(kind, special, added):
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    if kind == "bytes":
        backend = Tokenizer(models.BPE())
        # Words may take the space before and the line ends behind them.
        pattern = Regex(r" ?[A-Za-z]+[\r\n]*|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s+")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token=None, fuse_unk=False))
        if kind == "metaspace":  # a space before the first word of a text, merges across words
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            backend.decoder = decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        else:  # "prepend": a space before every section, as older conversions have it
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            backend.decoder = decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        alphabet = [chr(c) for c in range(33, 127)] + ["▁", "\n", "\t"]
    byte_tokens = [] if kind == "bytes" else [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(byte_tokens) + len(special) + 260,
        special_tokens=[*special, *byte_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    text = [_CORPUS] * 4 if kind == "bytes" else [_CORPUS.replace(" ", "▁")] * 4
    backend.train_from_iterator(text, trainer)
    if byte_tokens:  # they are ordinary tokens of the vocabulary, not matched in a text
        import json

        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
        backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return backend


def tokenizer_of(specimen, kind):
    """A tokenizer for a specimen: ``kind`` is "bytes", "metaspace" or "prepend"."""
    from transformers import PreTrainedTokenizerFast

    special = dict.fromkeys(
        [*specimen.special, specimen.eos, *([specimen.bos] if specimen.bos else []), "<|other|>"]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(kind, list(special), specimen.added),
        eos_token=specimen.eos,
        pad_token=specimen.eos,
        **({"bos_token": specimen.bos} if specimen.bos else {}),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = specimen.template
    return tokenizer


@cache
def make_tokenizer(name, kind):
    """The tokenizer of a specimen of the zoo, made once."""
    return tokenizer_of(ZOO[name], kind)

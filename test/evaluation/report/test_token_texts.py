"""Texts of tokens: one an id, whatever its bytes are, and nothing that cannot be seen."""

import random

import pytest

from torchrl_llm.evaluation.report.token_texts import CONTINUED, TokenTexts, visible
from torchrl_llm.modules import load_tokenizer


def of_bytes(tokenizer, data):
    """Ids of single bytes, as a model that samples them gives."""
    from torchrl_llm.evaluation.report.token_texts import _SPELLED

    spelled = {byte: char for char, byte in _SPELLED.items()}
    return [tokenizer.convert_tokens_to_ids(spelled[byte]) for byte in data]


def test_texts_of_plain_tokens_join_to_the_text_that_the_tokenizer_decodes(tokenizer):
    text = "<|im_start|>user\nHow are you?  fine <answer>72</answer><|im_end|>\n"
    ids = tokenizer.encode(text)
    texts = TokenTexts(tokenizer).of(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids) == text


def test_a_character_of_several_tokens_is_shown_by_the_first_of_them(tokenizer):
    ids = of_bytes(tokenizer, "a€🤖b".encode())
    mark = CONTINUED
    assert TokenTexts(tokenizer).of(ids) == ["a", "€", mark, mark, "🤖", mark, mark, mark, "b"]


def test_bytes_that_form_no_character_are_shown_as_bytes(tokenizer):
    texts = TokenTexts(tokenizer)
    assert texts.of(of_bytes(tokenizer, b"\xe2\x82")) == [r"\xe2", r"\x82"]  # cut off
    assert texts.of(of_bytes(tokenizer, b"\xff\xe2\x82\xac")) == [
        r"\xff",
        "€",
        CONTINUED,
        CONTINUED,
    ]
    assert texts.of(of_bytes(tokenizer, b"\xe2a\x82")) == [r"\xe2", "a", r"\x82"]
    # The character that stands for broken ones, when the model writes it.
    assert texts.of(of_bytes(tokenizer, "\ufffd".encode()))[0] == "\ufffd"


def test_every_sequence_of_ids_has_as_many_texts(tokenizer):
    draw, texts = random.Random(0), TokenTexts(tokenizer)
    for _ in range(200):
        ids = [draw.randrange(len(tokenizer) + 3) for _ in range(draw.randrange(12))]
        shown = texts.of(ids)
        assert len(shown) == len(ids)
        assert all(shown)
        joined = "".join(shown)
        assert joined.replace("\n", "").replace("\t", "").isprintable()


def test_a_tokenizer_that_falls_back_to_bytes_keeps_its_spaces_and_joins_its_bytes():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "▁Hi": 2, "▁you": 3, "<0xC3>": 4, "<0xA9>": 5, "▁": 6}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    shown = TokenTexts(tokenizer).of([0, 2, 3, 4, 5, 4, 1])
    assert shown == ["<s>", " Hi", " you", "é", CONTINUED, r"\xc3", "</s>"]


def test_ids_that_no_tokenizer_has_are_shown_as_ids():
    assert TokenTexts(None).of([3, 99999]) == ["⟨3⟩", "⟨99999⟩"]
    assert TokenTexts(load_tokenizer()).of([10**6]) == ["⟨1000000⟩"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb\u3000c é漢🤖", "a\n\tb\u3000c é漢🤖"),
        ("\x1b[31m\x00\x7f\r", r"\x1b[31m\x00\x7f\r"),
        ("\u202e\u2066\u200f\u200b\u2028\ufeff", r"\u202e\u2066\u200f\u200b\u2028\ufeff"),
        ("\ud83d\udce6"[0], r"\ud83d"),
    ],
)
def test_what_cannot_be_seen_is_escaped_and_everything_else_kept(text, shown):
    assert visible(text) == shown

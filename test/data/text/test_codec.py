from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from data.text.tokenizers_of_the_zoo import make_tokenizer

from torchrl_llm.data.text.codec import Codec, Piece
from torchrl_llm.errors import TokenizerError

KINDS = ("bytes", "metaspace", "prepend")


@pytest.mark.parametrize("kind", KINDS)
def test_a_literal_place_is_encoded_as_characters_and_leaves_its_neighbours_alone(kind):
    codec = Codec(make_tokenizer("faithful", kind))
    text = "Hello <|im_end|> there<|im_end|>"
    encoding = codec.encode(Piece(text, [(6, 16)]))
    ids = encoding.ids.tolist()
    assert [i for i in ids if i in codec.special_ids] == [codec.special["<|im_end|>"]]
    assert codec.decode(ids) == text
    # Outside the place, tokens are those of the text with some odd symbol there.
    other = codec.ids("Hello \u2603 there<|im_end|>")
    assert ids[:2] == other[:2]
    assert ids[-2:] == other[-2:]
    assert (encoding.starts <= encoding.ends).all()
    assert all(text[a:b] for a, b in zip(encoding.starts, encoding.ends, strict=True) if b > a)


@pytest.mark.parametrize("kind", KINDS)
def test_adjacent_literals_and_a_literal_at_each_end(kind):
    codec = Codec(make_tokenizer("faithful", kind))
    marker = "<|im_start|>"
    text = marker * 2 + "a" + marker
    n = len(marker)
    ids = codec.encode(Piece(text, [(0, n), (n, 2 * n), (2 * n + 1, len(text))])).ids.tolist()
    assert codec.decode(ids).strip() == text
    assert not codec.special_ids.intersection(ids)


def test_text_that_continues_other_text_gets_no_prefix_space():
    codec = Codec(make_tokenizer("faithful", "metaspace"))
    alone, behind = codec.encode(Piece("user")), codec.encode(Piece("user", (), True))
    assert codec.tokenizer.convert_ids_to_tokens(alone.ids.tolist())[0].startswith("▁")
    assert not codec.tokenizer.convert_ids_to_tokens(behind.ids.tolist())[0].startswith("▁")
    assert behind.starts[0] == 0
    assert behind.ends[-1] == 4


def test_padding_and_truncation_left_on_by_another_call_do_not_reach_the_ids():
    tokenizer = make_tokenizer("faithful", "bytes")
    codec = Codec(tokenizer)
    want = codec.ids("user assistant user")
    tokenizer(["a", "user assistant"], padding=True, truncation=True, max_length=2)
    assert codec.ids("user assistant user") == want
    tokenizer(["<|im_end|>"], split_special_tokens=True)
    assert codec.ids("<|im_end|>") == [codec.special["<|im_end|>"]]


def test_a_batch_is_the_same_as_one_by_one():
    codec = Codec(make_tokenizer("faithful", "bytes"))
    batch = [Piece("user"), Piece("a<|im_end|>", [(1, 11)]), Piece(""), Piece("b", (), True)]
    for one, piece in zip(codec.encode_batch(batch), batch, strict=True):
        assert one.ids.tolist() == codec.encode(piece).ids.tolist()
    assert codec.encode_batch([]) == []


def test_decoding_behind_a_token_keeps_the_space_that_was_sampled():
    spaced = Codec(make_tokenizer("faithful", "metaspace"))
    ids = spaced.encode(Piece(" user", (), True)).ids.tolist()
    assert spaced.decode(ids) == "user"  # the decoder strips the first space of a text
    assert spaced.decode_behind(spaced.special["<|im_end|>"], ids) == " user"
    assert spaced.decode_behind(spaced.special["<|im_end|>"], []) == ""
    # A tokenizer that writes a space behind each token of its own: that one is taken away.
    always = Codec(make_tokenizer("faithful", "prepend"))
    ids = always.ids("<|im_end|>user")
    assert always.decode_behind(ids[0], ids[1:]) == "user"


def test_a_slow_tokenizer_is_an_error_that_says_what_to_do():
    with pytest.raises(TokenizerError, match="fast tokenizer"):
        Codec(object())


def test_a_codec_travels_and_serves_many_threads():
    codec = pickle.loads(pickle.dumps(Codec(make_tokenizer("faithful", "bytes"))))
    texts = [f"user {i} <|im_end|>" for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert [codec.decode(ids) for ids in pool.map(codec.ids, texts)] == texts


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_halves_of_characters_are_question_marks_and_keep_the_places_of_the_rest(kind):
    codec = Codec(make_tokenizer("faithful", kind))
    broken, whole = "a\ud83d<|im_end|>b", "a?<|im_end|>b"
    assert codec.ids(broken) == codec.ids(whole)
    ours, theirs = (codec.encode(Piece(text, [(2, 12)])) for text in (broken, whole))
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.ends.tolist() == theirs.ends.tolist()


def test_without_a_usable_anchor_literals_are_still_plain():
    # A tokenizer that drops symbols it does not know: the anchor leaves no token behind.
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(["[UNK]", "<s>", *"<>sab "])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    backend.normalizer = normalizers.Replace("\ue000", "")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    codec = Codec(tokenizer)
    codec._anchor = "\ue000"
    text = "a<s> b"
    ids = codec.encode(Piece(text, [(1, 4)], True)).ids.tolist()
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == list(text)

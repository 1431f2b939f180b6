"""Words, sentences and paragraphs, counted without language data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.rewards.ifeval.text import (
    split_paragraphs,
    split_parts,
    split_sentences,
    split_words,
)


def test_words():
    for text, count in [
        ("", 0),
        ("one", 1),
        ("don't", 2),
        ("well-known", 2),
        ("3.14", 2),
        ("snake_case", 1),
        ("naïve café", 2),
        ("nai\u0308ve cafe\u0301", 2),  # letters with combining marks
        ("हिन्दी में", 2),
        ("می\u200cخواهم", 1),  # a joiner that nobody sees
        ("**bold** _it_", 2),
        ("emoji 🎉 party", 2),
        ("你好世界", 1),
    ]:
        assert len(split_words(text)) == count


def test_sentences():
    for text, sentences in [
        ("", []),
        ("...", []),
        ("No mark", ["No mark"]),
        ("One. Two.", ["One.", "Two."]),
        ("one. two. three", ["one.", "two.", "three"]),
        ("Really?! Yes...  Fine!!", ["Really?!", "Yes...", "Fine!!"]),
        ("Wait… what?", ["Wait…", "what?"]),
        ('She said "Go." He went.', ['She said "Go."', "He went."]),
        ("(It rained.) **It stopped.** End", ["(It rained.)", "**It stopped.**", "End"]),
        ("Mr. and Mrs. Smith met Prof. Li.", ["Mr. and Mrs. Smith met Prof. Li."]),
        ("J. R. R. Tolkien wrote it.", ["J. R. R. Tolkien wrote it."]),
        ("So do I. Everyone knows.", ["So do I.", "Everyone knows."]),
        ("Take vitamin C. It helps.", ["Take vitamin C.", "It helps."]),
        ("Cats, dogs, etc. are pets.", ["Cats, dogs, etc. are pets."]),
        ("Cats, dogs, etc. They are pets.", ["Cats, dogs, etc.", "They are pets."]),
        ("cats, dogs, etc. they are pets.", ["cats, dogs, etc.", "they are pets."]),
        ("At 5 p.m. the U.S. team won.", ["At 5 p.m. the U.S. team won."]),
        ("He lives in the U.S. She does not.", ["He lives in the U.S.", "She does not."]),
        ("Use fruit, e.g. apples, i.e. these.", ["Use fruit, e.g. apples, i.e. these."]),
        (
            "Pi is 3.14. See example.com/a.b for more.",
            ["Pi is 3.14.", "See example.com/a.b for more."],
        ),
        ("1. Eat\n2. Sleep. 3. Repeat.", ["1. Eat\n2. Sleep.", "3. Repeat."]),
        ("A title\n\nA line.", ["A title\n\nA line."]),
        ("यह एक है। वह दो है।", ["यह एक है।", "वह दो है।"]),
        ("هل هذا؟ نعم.", ["هل هذا؟", "نعم."]),
        ("这是一。这是二！是吗？", ["这是一。", "这是二！", "是吗？"]),
    ]:
        assert split_sentences(text) == sentences


@given(st.text(alphabet="ab.!? \n1\")*'IMr", max_size=60))
def test_sentences_lose_no_letter_and_hold_one_each(text):
    sentences = split_sentences(text)
    assert [c for s in sentences for c in s if c.isalpha()] == [c for c in text if c.isalpha()]
    assert all(any(c.isalpha() for c in s) and s == s.strip() for s in sentences)


@given(st.lists(st.sampled_from(["He came", "It is so", "are we there", "Ünder"]), max_size=8))
def test_sentences_that_are_put_together_are_counted(pieces):
    assert len(split_sentences(" ".join(piece + "!" for piece in pieces))) == len(pieces)


def test_paragraphs():
    assert split_paragraphs("") == []
    assert split_paragraphs("a\nb") == ["a\nb"]
    assert split_paragraphs("\n\na\n\n\n\nb\n \t\n\nc\n") == ["a", "b", "c"]


def test_parts_between_dividers():
    assert split_parts("", "***") == split_parts("***", "***") == []
    assert split_parts("a", "***") == ["a"]
    assert split_parts("***\na\n***b***", "***") == ["a", "b"]
    assert split_parts("a******b", "***") == ["a", "", "b"]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.data.text.codec import ESCAPE, Shield, covers
from torchrl_llm.errors import TokenizerError

MARKERS = ("<|im_end|>", "<|im_end|><|x|>", "<s>", "\n", "x")
pieces = st.sampled_from([*MARKERS, ESCAPE, "\ue000", "\ue001", "<|im", "_end|>", "a", " ", "é"])


@given(st.lists(pieces, max_size=12).map("".join))
def test_what_is_covered_comes_back_with_its_place(text):
    shield = Shield(MARKERS)
    covered = shield.cover(text)
    assert not any(m in covered for m in shield.markers)
    again, literals = shield.uncover(covered)
    assert again == text
    assert all(text[a:b] in (*shield.markers, ESCAPE) for a, b in literals)
    for marker in shield.markers:
        assert (marker not in text) or literals


def test_a_text_without_markers_is_not_copied():
    text = "nothing here"
    assert Shield(MARKERS).cover(text) is text


def test_the_longest_marker_wins_and_blank_or_single_characters_are_no_markers():
    shield = Shield(MARKERS)
    assert shield.markers == ("<|im_end|><|x|>", "<|im_end|>", "<s>")
    assert shield.uncover(shield.cover("a<|im_end|><|x|>"))[1] == [(1, 16)]


def test_strings_inside_schemas_are_covered():
    shield = Shield(["<s>"])
    tree = shield.cover_tree({"name": "<s>", "list": ["a<s>", 3], "n": None})
    assert "<s>" not in str(tree)
    assert tree["list"][1] == 3
    assert tree["n"] is None


def test_a_code_that_a_template_cut_in_two_stays_text():
    assert Shield(["<s>"]).uncover("a" + ESCAPE) == ("a" + ESCAPE, [(1, 2)])


def test_markers_are_found_in_a_range():
    shield = Shield(["<s>"])
    assert shield.markers_in("<s>a<s>", 1) == [(4, 7, "<s>")]
    assert Shield([]).markers_in("<s>") == []


def test_ranges_that_touch_do_not_overlap():
    assert not covers([(0, 3)], 3, 5)
    assert covers([(0, 3)], 2, 5)


def test_too_many_special_tokens_are_an_error():
    with pytest.raises(TokenizerError, match="at most"):
        Shield(f"<{i}>" for i in range(7000))

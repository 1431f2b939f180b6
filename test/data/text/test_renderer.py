from __future__ import annotations

import pytest
from data.text.tokenizers_of_the_zoo import make_tokenizer
from data.text.zoo import ZOO

from torchrl_llm.data.text import ChatFormatter, renderer
from torchrl_llm.data.text.codec import Shield
from torchrl_llm.data.text.renderer import Locator
from torchrl_llm.errors import ConfigError, TemplateError


def spans_of(template, *chats, empty_shield=True):
    """Located texts of chats in turn, by a template that is a Python function."""
    locator, calls, out = Locator(Shield([])), [], []
    for chat in chats:

        def render(mark, chat=chat):
            calls.append(chat)
            return template([{**m, "content": mark(m["content"], i)} for i, m in enumerate(chat)])

        text = template(chat)
        spans = locator.locate(chat, text, render, None)
        out.append([(text[a:b], i) for a, b, i in spans])
    return out, len(calls)


def chat(*contents):
    return [{"role": "user", "content": c} for c in contents]


def faithful(messages):
    return "".join(f"[{m['content']}]\n" for m in messages)


def stripping(messages):
    return "".join(f"[{m['content'].strip()}]\n" for m in messages)


def test_contents_keep_the_white_space_that_was_rendered():
    assert spans_of(faithful, chat(" a ", "b\n"))[0] == [[(" a ", 0), ("b\n", 1)]]
    assert spans_of(stripping, chat(" a ", "b\n"))[0] == [[("a", 0), ("b", 1)]]


def test_a_second_chat_of_the_same_structure_is_located_without_rendering():
    for template in (faithful, stripping):
        chats = [chat(" a ", "b"), chat("c", "\n d"), chat("]\n[", "]")]
        located, renders = spans_of(template, *chats)
        assert renders == 1
        for spans, messages in zip(located, chats, strict=True):
            assert [t.strip() for t, _ in spans] == [m["content"].strip() for m in messages]
    assert spans_of(faithful, chat("a", "b"), chat("", "b"))[1] > 1


def test_the_same_word_twice_is_found_at_both_places():
    assert spans_of(lambda m: "b a b " + faithful(m), chat("b", "b"))[0] == [[("b", 0), ("b", 1)]]


def test_a_template_that_looks_at_contents_falls_back_to_a_search():
    def looking(messages):
        return "".join(
            f"[{m['content']}]" if m["content"].startswith("a") else "-" for m in messages
        )

    assert spans_of(looking, chat("ab", "c", "ad"))[0] == [[("ab", 0), ("ad", 2)]]


def test_contents_with_private_characters_are_searched():
    odd = "x\U000f0001y\U00100000"
    assert spans_of(faithful, chat(odd, "b"))[0] == [[(odd, 0), ("b", 1)]]


def test_empty_contents_have_a_place_where_the_template_writes_them():
    assert spans_of(faithful, chat("", "b"))[0] == [[("", 0), ("b", 1)]]

    def skipping(messages):
        return "".join(f"[{m['content']}]" for m in messages if m["content"])

    assert spans_of(skipping, chat("", "b"))[0] == [[("b", 1)]]


@pytest.mark.parametrize("name", ZOO)
def test_every_content_is_found_in_every_template(name):
    formatter = ChatFormatter(make_tokenizer(name, "bytes"))
    messages = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "assistant"},
        {"role": "user", "content": "user <|im_end|>\n"},
    ]
    for _ in range(2):  # the second time from memory
        rendered = formatter._renderer.render(messages, spans=True)
        found = [rendered.text[a:b].strip() for a, b, _ in rendered.spans]
        assert found == [m["content"].strip() for m in messages]


NESTED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "computes",
    ["{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ 1 / 0 }}", "{{ '{5}'.format(1) }}"],
    ids=["recursion", "division", "index"],
)
def test_whatever_a_template_raises_is_a_refusal_by_it(computes):
    with pytest.raises(TemplateError, match="the chat template rejects messages with roles"):
        ChatFormatter(make_tokenizer(next(iter(ZOO)), "bytes"), chat_template=computes)


@pytest.mark.parametrize("use", ["encode", "render"])
def test_a_template_that_does_not_end_is_an_error(use, monkeypatch):
    """Loops of 99,999 in one another: 10 billion rounds."""
    monkeypatch.setattr(renderer, "LONGEST_S", 0.3)

    def begin():
        formatter = ChatFormatter(make_tokenizer(next(iter(ZOO)), "bytes"), chat_template=NESTED)
        return getattr(formatter, use)([{"role": "user", "content": "a"}])

    with pytest.raises(ConfigError, match=r"chat template had not ended after 0\.3 s .* repair"):
        begin()

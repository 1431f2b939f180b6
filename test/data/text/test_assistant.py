"""Masks of the assistant's turns in conversations that nobody sampled."""

from __future__ import annotations

import pytest

from torchrl_llm.data.text import ChatFormatter, assistant_mask
from torchrl_llm.errors import TemplateError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
# Writes the reasoning of the last answer only, as the templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _spans(ids, mask, formatter):
    inside, spans = False, []
    for token, own in zip(ids.tolist(), mask.tolist(), strict=True):
        if own and not inside:
            spans.append([])
        if own:
            spans[-1].append(token)
        inside = own
    return [formatter.decode(span) for span in spans]


def test_turns_are_marked_without_their_header(tokenizer):
    formatter = ChatFormatter(tokenizer)
    ids, mask = assistant_mask(formatter, CHAT)
    assert ids.shape == mask.shape
    assert _spans(ids, mask, formatter) == ["1<|im_end|>", "2<|im_end|>"]


def test_the_header_and_the_line_break_are_marked_on_request(tokenizer):
    formatter = ChatFormatter(tokenizer)
    ids, mask = assistant_mask(formatter, CHAT, include_header=True)
    assert _spans(ids, mask, formatter) == [
        "<|im_start|>assistant\n1<|im_end|>\n",
        "<|im_start|>assistant\n2<|im_end|>\n",
    ]


def test_a_template_that_rewrites_earlier_turns_has_no_such_spans(tokenizer):
    formatter = ChatFormatter(tokenizer, chat_template=FORGETFUL)
    assert assistant_mask(formatter, CHAT)[1].any()
    with pytest.raises(TemplateError, match="first 3 messages"):
        assistant_mask(formatter, CHAT, include_header=True)


def test_a_conversation_without_an_answer_has_an_empty_mask(tokenizer):
    for include_header in (False, True):
        _, mask = assistant_mask(ChatFormatter(tokenizer), CHAT[:2], include_header=include_header)
        assert not mask.any()

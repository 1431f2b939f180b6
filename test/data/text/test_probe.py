from __future__ import annotations

import pytest
from data.text import scenarios
from data.text.tokenizers_of_the_zoo import make_tokenizer
from data.text.zoo import ZOO

from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import TemplateError

IM = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
END = "{%- endfor -%}"


def probe_of(name, kind="bytes"):
    return ChatFormatter(make_tokenizer(name, kind)).probe


@pytest.mark.parametrize(("name", "kind"), scenarios.EACH_TEMPLATE)
def test_closers_form_and_losses_are_found(name, kind):
    probe, specimen = probe_of(name, kind), ZOO[name]
    assert {c.text for c in probe.closers} == set(specimen.closers)
    assert (probe.call is not None) == specimen.tools
    assert probe.system == specimen.system
    assert probe.form.reasoning_field == specimen.reasoning
    assert all(c.ids for c in probe.closers)


def test_a_response_ends_with_what_closes_the_last_turn():
    ends = {n: [c.text for c in probe_of(n).terminal] for n in ZOO}
    assert ends["faithful"] == ["<|im_end|>"]
    assert ends["two_closers"] == ["<end_text><end_turn>"]
    assert ends["header_closes"] == ["<|user|>", "<|observation|>"]
    # What closes a turn of the history may stand inside a response, and does not end it.
    assert ends["closes_last_otherwise"] == ["<|return|>", "<|call|>"]
    assert ends["eos_at_the_end"] == ["<|end|>"]
    assert ends["arguments_as_text"] == ["<|eos|>"]
    assert ends["plain_text"] == []


def test_stop_ids_are_the_last_token_of_a_turn_and_the_eos():
    for name, markers in (
        ("two_closers", ["<end_turn>"]),
        ("header_closes", ["<|user|>", "<|observation|>", "<|endoftext|>"]),
        ("closes_last_otherwise", ["<|return|>", "<|call|>"]),
        ("plain_text", ["<eos>"]),
    ):
        tokenizer = make_tokenizer(name, "bytes")
        ids = sorted(tokenizer.convert_tokens_to_ids(m) for m in markers)
        assert list(ChatFormatter(tokenizer).stop_token_ids) == ids


def test_headers_and_reasoning_marks():
    assert probe_of("faithful").header == "<|im_start|>assistant\n"
    assert probe_of("two_closers").header == "<turn><assistant><begin>"
    assert probe_of("no_generation_prompt").header == " [/INST]"
    assert probe_of("eos_at_the_end").header == "<|assistant|>\n"
    assert probe_of("drops_thoughts").reasoning == ("<think>", "</think>")
    assert probe_of("prompt_opens_and_history_keeps").reasoning == ("<think>", "</think>")
    assert probe_of("closes_last_otherwise").reasoning[0] == "<|channel|>analysis<|message|>"
    assert probe_of("faithful").reasoning is None


def test_contents_and_arguments_in_the_form_that_the_template_wants():
    assert probe_of("parts").form.parts
    assert not probe_of("parts").form.text
    assert probe_of("arguments_as_text").form.arguments_as_text
    assert not probe_of("faithful").form.arguments_as_text
    assert probe_of("tools_at_last_user").form.call_ids


def test_a_mapping_that_python_printed_is_no_argument():
    template = (
        IM
        + "{%- for c in m.tool_calls or [] -%}{{- '[' + c.function.name -}}"
        + ("{{- c.function.arguments -}}{{- ']' -}}{%- endfor -%}" + END)
    )
    formatter = ChatFormatter(make_tokenizer("faithful", "bytes"), chat_template=template)
    assert formatter.probe.form.arguments_as_text


def test_a_template_that_drops_contents_is_an_error_at_construction():
    tokenizer = make_tokenizer("faithful", "bytes")
    with pytest.raises(TemplateError, match="drops the content of a plain user message"):
        ChatFormatter(tokenizer, chat_template="{{- 'nothing' -}}")
    with pytest.raises(TemplateError, match="assistant"):
        ChatFormatter(
            tokenizer,
            chat_template="{%- for m in messages -%}{%- if m.role == 'user' -%}{{- m.content -}}"
            "{%- endif -%}{%- endfor -%}",
        )
    with pytest.raises(TemplateError, match="not today"):
        ChatFormatter(tokenizer, chat_template="{{- raise_exception('not today') -}}")

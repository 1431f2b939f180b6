"""Calls in the forms of published templates, each learnt from one example of our own wording."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from data.text.scenarios import TOOLS
from data.text.tokenizers_of_the_zoo import tokenizer_of
from data.text.zoo import Specimen

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.text.call_syntax import ANSWER, NAME, VALUE
from torchrl_llm.data.text.learnt_calls import syntax_of
from torchrl_llm.errors import TemplateError

_KNOWN = yaml.safe_load(Path(__file__).with_name("learnt_calls.yaml").read_text(encoding="utf-8"))
FORMS, BESIDE = _KNOWN["forms"], _KNOWN["beside"]


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_a_call_is_learnt_from_one_example(form):
    example, text, calls = FORMS[form].values()
    syntax = syntax_of(example.replace("NAME", NAME).replace("VALUE", VALUE))
    read = syntax.parse(text, {})
    assert [[c.name, c.arguments] for c in read.calls] == calls
    assert not read.errors
    assert not read.content.strip()


def test_values_that_a_template_prints_as_python_does_have_the_type_of_their_schema():
    syntax = syntax_of(f"<do>\n<function={NAME}>\n<parameter=key>\n{VALUE}\n</parameter>\n</do>")
    kinds = {"b": "boolean", "o": "object", "l": "array", "n": "integer", "s": "string"}
    kinds["wild"] = "object"
    values = {"b": "True", "o": "{'k': None}", "l": "[1, False]", "n": "3", "s": "True"}
    values["wild"] = "{'k': open('f')}"
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    schema = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    [call] = syntax.parse(f"<do>\n<function=f>\n{text}</do>", {"f": schema}).calls
    assert call.arguments == {
        "b": True,
        "o": {"k": None},
        "l": [1, False],
        "n": 3,
        "s": "True",
        "wild": "{'k': open('f')}",
    }


def test_a_string_that_python_takes_for_a_number_stays_one_by_its_schema():
    syntax = syntax_of(f"[{NAME}(key={VALUE})]")
    schemas = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
    [call] = syntax.parse("[f(s=012.50, n=7)]".replace("012", "12"), schemas).calls
    assert call.arguments == {"s": "12.50", "n": 7}


def test_the_mark_that_phi_is_told_to_begin_calls_with_is_read():
    syntax = syntax_of(f'{{"name": "{NAME}", "arguments": {{"key": "{VALUE}"}}}}')
    read = syntax.parse('functools[{"name": "f", "arguments": {"a": 1}}]', {})
    assert [(c.name, c.arguments) for c in read.calls] == [("f", {"a": 1})]
    assert not syntax.parse("functools is a module", {}).found


def test_what_would_not_read_its_own_example_is_no_syntax():
    assert syntax_of(f'<do>{{"name": "{NAME}, "arguments": {{"key": "{VALUE}"}}"}}</do>') is None


@pytest.mark.parametrize("form", BESIDE)
def test_text_next_to_a_call_without_marks_is_told_from_it(form):
    example, text, said = BESIDE[form].values()
    example = example.replace("NAME", NAME).replace("VALUE", VALUE)
    syntax = syntax_of(example.replace("SAID", ""), example.replace("SAID", ANSWER))
    known = {"get_weather": {}}
    read = syntax.parse(text, known)
    assert [(c.name, c.arguments) for c in read.found] == [("get_weather", {"n": 1})]
    assert read.content == said
    alone = syntax.parse(text.replace(said, ""), known)
    assert [c.name for c in alone.calls] == ["get_weather"]
    assert not alone.content
    # A tool that is not known may be an example within an answer.
    answer = text.replace("get_weather", "other")
    assert form == "marked" or syntax.parse(answer, known) == (answer, [])


def test_the_outer_mark_of_named_calls_may_be_missing():
    syntax = syntax_of(f'<do><one>function<sep>{NAME}\n{{"key": "{VALUE}"}}</one></do>')
    for text in (
        '<do><one>function<sep>f\n{"a": 1}</one></do>',
        '<one>function<sep>f\n{"a": 1}</one>',
    ):
        assert [(c.name, c.arguments) for c in syntax.parse(text, {}).calls] == [("f", {"a": 1})]


def _formatter(body, *, tools=None, **fields):
    template = (
        "{%- for m in messages -%}" + body + "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    specimen = Specimen(template, **fields)
    return ChatFormatter(tokenizer_of(specimen, "bytes"), tools=tools, debug=True)


_TURN = "{{- '<|im_start|>' + m.role + '\n' + m.content -}}"


def test_tools_are_refused_where_their_calls_cannot_be_read():
    body = _TURN + (
        "{%- for c in m.tool_calls or [] -%}{{- 'do ' + c.function.name + ' with ' "
        "+ c.function.arguments.key | default('') -}}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    )
    assert _formatter(body).probe.call is not None
    with pytest.raises(TemplateError, match=r"cannot be read back.*do kqxname with"):
        _formatter(body, tools=TOOLS)


def test_tools_are_refused_where_calls_of_two_arguments_are_glued_together():
    """As by a loop that sets a variable of its own (vLLM's gemma3_pythonic)."""
    call = (
        "{%- for k, v in c.function.arguments | items -%}{{- k + '=' + (v | tojson) -}}{% endfor %}"
    )
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
        "{%- for c in m.tool_calls or [] -%}{{- '[' + c.function.name + '(' -}}"
        + call
        + "{{- ')]' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    specimen = Specimen(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    tokenizer = tokenizer_of(specimen, "bytes")
    ChatFormatter(tokenizer)
    with pytest.raises(TemplateError, match=r"expected a call \[\('kqxname', \['key', 'other'\]\)"):
        ChatFormatter(tokenizer, tools=TOOLS)


def test_a_template_that_counts_rounds_is_given_all_of_them():
    body = (
        "{%- if m.role == 'user' -%}{{- '[Round ' ~ (loop.index0 // 2 + 1) ~ ']\n' -}}{%- endif -%}"
        + _TURN
        + "{{- '<|im_end|>\n' -}}"
    )
    formatter = _formatter(body)
    chat = [{"role": ("user", "assistant")[k % 2], "content": f"turn {k}"} for k in range(7)]
    prompt = formatter.encode(chat).token_ids
    said = {"role": "assistant", "content": "so"}
    ids = prompt.new_tensor([*prompt.tolist(), *formatter._codec.ids("so<|im_end|>")])
    new = [{"role": "user", "content": "more"}]
    more = formatter.extend(ids, [*chat, said], FinishReason.STOP, new, response_start=len(prompt))
    assert not more.forked
    assert formatter.decode(more.token_ids) == formatter.render([*chat, said, *new])
    with pytest.raises(TemplateError, match="counts the turns"):
        formatter.extend_turn(ids, said, FinishReason.STOP, new, response_start=len(prompt))


def test_a_template_that_looks_at_tools_without_asking_whether_there_are_any():
    body = "{%- if loop.first and tools | length -%}{{- tools | tojson -}}{%- endif -%}" + _TURN
    formatter = _formatter(body + "{{- '<|im_end|>\n' -}}")
    assert "hello" in formatter.render([{"role": "user", "content": "hello"}])


def test_calls_that_are_written_by_their_id_alone():
    body = _TURN + (
        "{%- for c in m.tool_calls or [] -%}{{- '<do>' + c.id + '<with>' "
        "+ (c.function.arguments | tojson) + '</do>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    )
    formatter = _formatter(body, tools=TOOLS, added=("<do>", "<with>", "</do>"))
    prompt = formatter.encode([{"role": "user", "content": "hi"}]).token_ids
    ids = formatter._codec.ids('<do>functions.f:3<with>{"a": 1}</do><|im_end|>')
    (call,) = formatter.parse_response(prompt, ids, FinishReason.STOP)["tool_calls"]
    assert call["id"] == "functions.f:3"
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
    foreign = {"id": "x1", "function": {"name": "g", "arguments": {}}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [foreign]},
        {"role": "tool", "content": "21", "tool_call_id": "x1"},
    ]
    assert "<do>functions.g:0<with>{}" in formatter.render(chat)


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|other|>"])
def test_marks_glued_to_words_are_the_structure_of_an_answer_and_not_its_end(eos):
    body = (
        "{{- '<|im_start|>' + m.role + '\n' -}}{%- if m.role == 'assistant' -%}"
        "{{- '<|open|>say<|sep|>' + m.content + '<|close|>say<|sep|>' -}}{%- else -%}"
        "{{- m.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}"
    )
    marks = ("<|im_start|>", "<|im_end|>", "<|open|>", "<|sep|>", "<|close|>")
    formatter = _formatter(body, special=marks, eos=eos)
    prompt = formatter.encode([{"role": "user", "content": "hi"}]).token_ids
    assert {closer.text for closer in formatter.closers} == {"<|sep|><|im_end|>"}
    ids = formatter._codec.ids("<|open|>say<|sep|>so<|close|>say<|sep|><|im_end|>")
    assert formatter.parse_response(prompt, ids, FinishReason.STOP)["content"] == "so"


def test_marks_that_only_the_model_writes_are_no_header_and_no_content():
    body = (
        "{%- if m.role == 'assistant' -%}{{- '<|say|>' + m.content + '<|said|><|im_end|>' -}}"
        "{%- else -%}{{- m.content + '<|im_end|><|im_start|>' -}}{%- endif -%}"
    )
    template = "{%- for m in messages -%}" + body + "{%- endfor -%}"
    marks = ("<|im_start|>", "<|im_end|>", "<|say|>", "<|said|>")
    tokenizer = tokenizer_of(Specimen(template, special=marks), "bytes")
    formatter = ChatFormatter(tokenizer, debug=True)
    prompt = formatter.encode([{"role": "user", "content": "hi"}]).token_ids
    ids = formatter._codec.ids("<|say|>so<|said|><|im_end|>")
    assert formatter.parse_response(prompt, ids, FinishReason.STOP)["content"] == "so"


_CALL = (
    '{{- \'<do>{"name": "\' + c.function.name + \'", "arguments": \' '
    "+ (c.function.arguments | tojson) + '}</do>' -}}"
)


def test_a_template_that_drops_calls_with_text_takes_them_alone():
    body = (
        "{{- '<|im_start|>' + m.role + '\n' -}}{%- if m.content -%}{{- m.content -}}{%- else -%}"
        "{%- for c in m.tool_calls or [] -%}" + _CALL + "{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\n' -}}"
    )
    formatter = _formatter(body, tools=TOOLS, added=("<do>", "</do>"))
    user = {"role": "user", "content": "hi"}
    prompt = formatter.encode([user]).token_ids
    ids = formatter._codec.ids('So: <do>{"name": "get_weather", "arguments": {}}</do><|im_end|>')
    message = formatter.parse_response(prompt, ids, FinishReason.STOP)
    assert "tool_calls" not in message
    assert "call alone" in message["tool_call_errors"][0]
    call = {"function": {"name": "get_weather", "arguments": {}}}
    assert "get_weather" in formatter.render([user, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(TemplateError, match="message 1 has text next to its tool calls"):
        formatter.render([user, {"role": "assistant", "content": "So", "tool_calls": [call]}])


def test_a_thought_that_ends_as_the_turn_does_is_refused():
    body = (
        "{%- if m.reasoning_content -%}{{- '<|im_start|>assistant\n<think>' + m.reasoning_content "
        "+ '<|im_end|>' -}}{%- endif -%}" + _TURN + "{{- '<|im_end|>' -}}"
    )
    with pytest.raises(TemplateError, match=r"ends a thought .*<think>.* with '<\|im_end\|>'"):
        _formatter(body, added=("<think>",))


def test_a_header_that_only_history_has_behind_a_result_is_no_content():
    body = (
        "{%- if m.role == 'tool' -%}{{- '<got>' + m.content + '</got>' -}}{%- else -%}"
        + _TURN
        + "{%- for c in m.tool_calls or [] -%}"
        + _CALL
        + "{%- endfor -%}"
        "{{- '<|im_end|>\n' -}}{%- endif -%}"
    )
    template = (
        "{%- for m in messages -%}" + body + "{%- endfor -%}{%- if add_generation_prompt and "
        "messages[-1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    specimen = Specimen(template, added=("<do>", "</do>"))
    formatter = ChatFormatter(tokenizer_of(specimen, "bytes"), tools=TOOLS, debug=True)
    call = {"id": "a", "function": {"name": "get_weather", "arguments": {}}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "a"},
    ]
    prompt = formatter.encode(chat).token_ids
    ids = formatter._codec.ids("<|im_start|>assistant\nSunny.<|im_end|>")
    message = formatter.parse_response(prompt, ids, FinishReason.STOP)
    assert message["content"].strip() == "Sunny."
    assert "flags" not in message
    new = [{"role": "user", "content": "more"}]
    whole = prompt.new_tensor([*prompt.tolist(), *ids])
    more = formatter.extend(
        whole, [*chat, message], FinishReason.STOP, new, response_start=len(prompt)
    )
    assert not more.forked
    # Where the prompt has the header, another one is content and is told.
    prompt = formatter.encode(chat[:1]).token_ids
    assert formatter.parse_response(prompt, ids, FinishReason.STOP)["flags"] == ["injection"]


def test_arguments_are_encoded_once_where_the_tools_are_printed_by_python():
    body = (
        "{%- if loop.first and tools -%}{{- tools | string -}}{%- endif -%}"
        + _TURN
        + "{%- for c in m.tool_calls or [] -%}"
        + _CALL
        + "{%- endfor -%}{{- '<|im_end|>\n' -}}"
    )
    formatter = _formatter(body, tools=TOOLS, added=("<do>", "</do>"))
    assert not formatter.probe.form.arguments_as_text
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    assert '"arguments": {"city": "Rome"}}</do>' in formatter.render(chat)

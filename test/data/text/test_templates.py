"""Which template is chosen, and what the built-in ones write."""

from __future__ import annotations

import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_llm.data.history import History
from torchrl_llm.data.text.families import BUILTIN_TEMPLATES
from torchrl_llm.data.text.templates import (
    TemplateSpec,
    add_chat_template,
    has_generation,
    remove_chat_template,
    resolve_template,
)
from torchrl_llm.errors import TemplateError

FAMILIES = sorted(BUILTIN_TEMPLATES)
SHOUT = (
    "{% for message in messages %}{{ message['role'] }}> "
    "{% generation %}{{ message['content'] }}!{% endgeneration %}{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TALK = [
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "\nHello there "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": ""},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def registered():
    names = []

    def register(name, *args, **kwargs):
        add_chat_template(name, *args, **kwargs)
        names.append(name)

    yield register
    for name in set(names):
        remove_chat_template(name)


def spans(name, messages, **variables):
    text, blocks = render_jinja_template(
        [messages],
        chat_template=BUILTIN_TEMPLATES[name],
        return_assistant_tokens_mask=True,
        **variables,
    )
    return text[0], [text[0][a:b] for a, b in blocks[0]]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# -- what the built-in templates write ------------------------------------------------------------

END = {
    "chatml_format": "<|im_end|>",
    "qwen": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama": "<|eot|>",
    "llama3": "<|eot_id|>",
    "dialogpt": "<|endoftext|>",
    "falcon": "<|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
LEAD = {"falcon": " ", "deepseek": " "}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_generation_block_is_the_answer_as_it_is_and_its_end_of_turn_token(name):
    _, blocks = spans(name, TALK)
    lead, end = LEAD.get(name, ""), END[name]
    assert blocks == [f"{lead}\nHello there {end}", f"{lead}{end}"]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_template_adds_a_message_of_its_own(name):
    text, _ = spans(name, TALK[:1])
    assert "system" not in text.lower()
    assert "helpful" not in text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_generation_prompt_is_how_the_next_answer_begins(name):
    prompt, _ = spans(name, TALK[:1], add_generation_prompt=True)
    whole, blocks = spans(name, TALK[:2])
    assert whole.startswith(prompt)
    assert whole[len(prompt) :].startswith(blocks[0])


def test_qwen_joins_the_results_of_one_step_into_one_user_turn():
    messages = [
        {"role": "user", "content": "2+3 and 4+5?"},
        {"role": "assistant", "content": "", "tool_calls": [call("add", a=2), call("add", a=4)]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "9"},
    ]
    text, _ = spans("qwen", messages)
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n"
        "<tool_response>\n9\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["qwen", "chatml_format", "llama", "llama3"])
def test_tools_are_declared_in_the_system_message(name):
    text, _ = spans(name, [{"role": "system", "content": "Be brief."}, *TALK], tools=[TOOL])
    assert text.count("system") == 1
    assert '"name": "add"' in text
    assert text.index("Be brief.\n\n") < text.index('"name": "add"') < text.index("Hi")


def test_the_tokenizers_own_bos_and_eos_tokens_are_written():
    text, _ = spans("deepseek", TALK[:2], bos_token="<s>", eos_token="</s>")
    assert text == "<s>User:  Hi\n\n\nAssistant: \nHello there </s>"


ROLE = {"role": "critic!", "content": "x"}
SYSTEM = {"role": "system", "content": "x"}
RESULT = {"role": "tool", "content": "x"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call("add")]}
TWO_CALLS = {"role": "assistant", "content": "", "tool_calls": [call("add"), call("add")]}
CALL_AND_TEXT = {"role": "assistant", "content": "so", "tool_calls": [call("add")]}
REASONED = {"role": "assistant", "content": "x", "reasoning_content": "why"}
PICTURE = {"role": "user", "content": [{"type": "image", "url": "a.png"}]}
RESPONSES = {"role": "tool", "content": "", "tool_responses": ["1"]}


REFUSED = {
    name: [
        *(ROLE, PICTURE, RESPONSES),
        *([] if name == "qwen3" else [REASONED]),
        *([RESULT, CALLS] if name in ("falcon", "deepseek", "dialogpt") else []),
        *([SYSTEM] if name in ("deepseek", "dialogpt") else []),
        *([TWO_CALLS, CALL_AND_TEXT] if name.startswith("llama") else []),
        *([{**CALLS, "role": "user"}] if name == "qwen" else []),
    ]
    for name in FAMILIES
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_cannot_express_is_an_error_that_names_the_message(name):
    for message in REFUSED[name]:
        history = History.from_chats([*TALK[:2], message])
        with pytest.raises(TemplateError, match=r"message 2 \(") as caught:
            history.apply_chat_template(chat_template_name=name)
        assert re.search(rf"\b{name}\b", str(caught.value))


def test_dialogpt_refuses_two_users_in_a_row():
    with pytest.raises(TemplateError, match=r"message 1 \(user\)"):
        History.from_chats([TALK[0], TALK[0]]).apply_chat_template(chat_template_name="dialogpt")


@pytest.mark.parametrize("name", ["falcon", "deepseek", "dialogpt"])
def test_families_without_tools_refuse_to_declare_any(name):
    with pytest.raises(TemplateError, match=name):
        History.from_chats(TALK).apply_chat_template(chat_template_name=name, tools=[TOOL])


def test_a_foreign_template_that_refuses_is_an_error_that_names_the_message():
    picky = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    history = History.from_chats([TALK[0], SYSTEM, TALK[1]])
    with pytest.raises(TemplateError, match=r"message 1 \(system\).*no system"):
        history.apply_chat_template(chat_template=picky, tokenize=False)


# -- which template is chosen ---------------------------------------------------------------------


def test_an_explicit_text_comes_first_and_a_name_next(tokenizer):
    assert resolve_template(tokenizer, chat_template=PLAIN).template == PLAIN
    assert resolve_template(tokenizer, chat_template_name="llama").name == "llama"
    with pytest.raises(TemplateError, match="not both"):
        resolve_template(tokenizer, PLAIN, "llama")


def test_a_registered_keyword_beats_the_tokenizers_own_template(make_tokenizer, registered):
    tokenizer = make_tokenizer()
    tokenizer.name_or_path = "Some-Org/Shouter-7B"
    assert resolve_template(tokenizer).name == "tokenizer"
    registered("shout", SHOUT, model_family_keywords=["SHOUTER"])
    assert resolve_template(tokenizer).name == "shout"


def test_the_tokenizers_own_template_beats_the_family(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.name_or_path = "Qwen/Qwen2.5-0.5B"
    assert resolve_template(tokenizer).template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen"),
        ("microsoft/DialoGPT-medium", "dialogpt"),
        ("tiiuae/falcon-7b-instruct", "falcon"),
        ("deepseek-ai/deepseek-coder-6.7b-base", "deepseek"),
        ("/data/models/meta-llama/Llama-2-7b", "llama3"),
        ("facebook/opt-125m", "chatml_format"),
        ("", "chatml_format"),
    ],
)
def test_a_tokenizer_without_template_gets_its_familys(make_tokenizer, path, family):
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.name_or_path = path
    assert resolve_template(tokenizer).name == family


def test_defect_34_a_folder_far_above_the_model_does_not_choose_its_template(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.name_or_path = "/home/qwen-fan/models/gpt2/checkpoint"
    assert resolve_template(tokenizer).name == "chatml_format"


def test_named_templates_of_a_tokenizer_are_found_by_name(make_tokenizer):
    tokenizer = make_tokenizer(chat_template={"default": PLAIN, "loud": SHOUT})
    assert resolve_template(tokenizer).template == PLAIN
    assert resolve_template(tokenizer, chat_template_name="loud").template == SHOUT


def test_an_unknown_name_names_the_nearest(tokenizer):
    with pytest.raises(TemplateError, match="did you mean 'falcon'"):
        resolve_template(tokenizer, chat_template_name="falcn")
    with pytest.raises(TemplateError, match="pass tokenizer"):
        resolve_template(None)


def test_a_template_without_generation_block_is_not_registered():
    assert not has_generation(PLAIN)
    with pytest.raises(ValueError, match="generation"):
        add_chat_template("plain", PLAIN)
    with pytest.raises(TemplateError, match="no chat template 'plain'"):
        remove_chat_template("plain")


def test_a_user_may_replace_a_builtin_name_and_get_it_back(registered):
    builtin = resolve_template(None, chat_template_name="llama")
    registered("llama", SHOUT)
    assert resolve_template(None, chat_template_name="llama") == TemplateSpec("llama", SHOUT)
    assert not resolve_template(None, chat_template_name="llama").builtin
    remove_chat_template("llama")
    assert resolve_template(None, chat_template_name="llama") == builtin
    registered("llama", SHOUT)


def test_own_templates_with_known_marks_get_the_familys_parser(tokenizer):
    assert resolve_template(tokenizer).inverse_parser.family == "chatml_format"
    assert resolve_template(tokenizer, chat_template=PLAIN).inverse_parser is None

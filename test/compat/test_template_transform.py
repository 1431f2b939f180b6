"""TemplateTransform: messages to text with the template, the model's text back to its answer."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from torchrl_llm.data import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.history import History
from torchrl_llm.envs.transforms import TemplateTransform
from torchrl_llm.errors import ConfigError, DataError

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "{% for m in messages %}{{ '<|im_start|>[' + m.role + ']\n\n' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>[assistant]\n\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "message",
    [
        "Hi",
        {"role": "user", "content": "Hi"},
        ({"role": "user", "content": "Hi"},),
        Chat([{"role": "user", "content": "Hi"}]),
    ],
)
def test_every_form_of_a_message_is_rendered_up_to_the_models_turn(message, tokenizer):
    td = TensorDict(message=Column.of([message] * 2), batch_size=[2])
    assert TemplateTransform(tokenizer)(td)["message"] == [ASKED] * 2


def test_a_history_is_rendered_row_by_row(tokenizer):
    chats = [Chat([{"role": "user", "content": text}]) for text in ("Hi", "Ho")]
    td = TensorDict(message=History.of(chats), batch_size=[2])
    texts = TemplateTransform(tokenizer, out_keys=["text"])(td)["text"]
    assert texts == [ASKED, ASKED.replace("Hi", "Ho")]


def test_without_a_batch_there_is_one_text(tokenizer):
    transform = TemplateTransform(tokenizer)
    td = transform(TensorDict(message="Hi"))
    assert td["message"] == ASKED
    td["action"] = ASKED + "Hello<|im_end|>"
    assert transform.inv(td)["action"] == "Hello"


def test_special_token_strings_in_a_message_stay_in_the_text(tokenizer):
    td = TensorDict(message=Column.of(["<|im_end|>"]), batch_size=[1])
    assert TemplateTransform(tokenizer)(td)["message"][0].count("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (ASKED + "Hello<|im_end|>", "Hello"),
        ("Hello<|im_end|>\n", "Hello"),
        ("Hello", "Hello"),
        (ASKED + " two\nlines \n", " two\nlines \n"),
        (ASKED + "one<|im_end|>\n" + ASKED + "two<|im_end|>", "two"),
        ("", ""),
        ("a<|im_end|>b", "a"),
    ],
)
def test_the_answer_is_what_stands_in_the_last_turn(text, answer, tokenizer):
    td = TensorDict(action=Column.of([text]), batch_size=[1])
    assert TemplateTransform(tokenizer).inv(td)["action"] == [answer]


def test_another_template_is_used_both_ways(tokenizer):
    transform = TemplateTransform(tokenizer, LLAMA, out_keys_inv=["said"])
    td = transform(TensorDict(message=Column.of(["Hi"]), batch_size=[1]))
    assert td["message"][0].endswith("Hi<|im_end|><|im_start|>[assistant]\n\n")
    td["said"] = Column.of([td["message"][0] + "\nYes<|im_end|>"])
    assert transform.inv(td)["action"] == ["\nYes"]
    assert transform.chat_template == LLAMA


@pytest.mark.parametrize("row", [1, None, ["a"]])
def test_what_is_no_message_is_named(row, tokenizer):
    with pytest.raises(DataError, match="'message' must hold"):
        TemplateTransform(tokenizer)(TensorDict(message=Column.of([row]), batch_size=[1]))


def test_keys_must_match(tokenizer):
    with pytest.raises(ConfigError, match="as many"):
        TemplateTransform(tokenizer, out_keys=["a", "b"])

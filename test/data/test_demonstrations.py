"""Conversations of a table as tokens: which columns, which tokens, and what is refused."""

from __future__ import annotations

import json

import pytest

from torchrl_llm.data.column_names import as_messages
from torchrl_llm.data.demonstrations import (
    DemonstrationColumns,
    Demonstrations,
    check_conversation,
    learned_rows,
)
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import load_tokenizer


@pytest.fixture(scope="module")
def formatter():
    return ChatFormatter(load_tokenizer())


def made(rows, formatter, columns=None, **settings):
    columns = columns or DemonstrationColumns.find(rows[0])
    return Demonstrations(rows, formatter, columns, **settings)


def text_of(demonstrations, index=0):
    one = demonstrations[index]
    return demonstrations.formatter.decode(one.token_ids[one.learned])


COLUMNS = [
    ({"prompt": "", "completion": ""}, {}, (("prompt",), "completion", None, None)),
    ({"question": "", "answer": "", "id": 1}, {}, (("question",), "answer", None, None)),
    ({"messages": [], "prompt": "", "answer": ""}, {}, ((), None, "messages", None)),
    ({"conversations": [], "tools": []}, {}, ((), None, "conversations", "tools")),
    (
        {"instruction": "", "input": "", "output": ""},
        {},
        (("instruction", "input"), "output", None, None),
    ),
    ({"x": "", "y": ""}, {"prompt": "x", "completion": "y"}, (("x",), "y", None, None)),
    ({"messages": [], "q": "", "answer": ""}, {"prompt": "q"}, (("q",), "answer", None, None)),
    ({"talk": []}, {"messages": "talk"}, ((), None, "talk", None)),
]


@pytest.mark.parametrize(("row", "named", "found"), COLUMNS)
def test_columns_are_found_by_usual_names_unless_they_are_named(row, named, found):
    assert tuple(DemonstrationColumns.find(row, **named)) == found


@pytest.mark.parametrize(
    ("row", "named", "error", "message"),
    [
        ({"a": 1}, {}, DataError, r"none of the columns \['a'\]"),
        ({"prompt": 1}, {}, DataError, "is a completion"),
        ({"answer": 1}, {}, DataError, "is a prompt"),
        ({"a": 1}, {"completion": "b"}, DataError, r"data\.completion=b: .*there are \['a'\]"),
        ({"m": 1, "p": 1}, {"messages": "m", "prompt": "p"}, ConfigError, "leave out p"),
    ],
)
def test_columns_that_are_not_there_or_too_many_are_refused(row, named, error, message):
    with pytest.raises(error, match=message):
        DemonstrationColumns.find(row, **named)


def test_forms_of_a_conversation_are_the_same_tokens(formatter):
    turns = [("user", "2+2?"), ("assistant", "4")]
    messages = [{"role": role, "content": text} for role, text in turns]
    shared = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    forms = [
        {"question": "2+2?", "answer": "4"},
        {"question": "2+2?", "answer": 4},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"messages": messages},
        {"messages": json.dumps(messages)},
        {"conversations": shared},
    ]
    ids = [made([form], formatter)[0].token_ids.tolist() for form in forms]
    assert all(each == ids[0] for each in ids)
    assert text_of(made(forms[:1], formatter)) == "4<|im_end|>"


def test_an_input_beside_an_instruction_is_a_part_of_the_prompt(formatter):
    rows = [{"instruction": "Add.", "input": "2+2", "output": "4"}]
    rows.append({"instruction": "Hi", "input": "", "output": "Hello"})
    found = made(rows, formatter)
    assert found.messages(0)[0]["content"] == "Add.\n\n2+2"
    assert found.messages(1)[0]["content"] == "Hi"


def test_every_turn_of_the_assistant_is_learned_and_no_system_prompt(formatter):
    turns = ["a", "b", "c", "d"]
    roles = ["user", "assistant"] * 2
    chat = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    found = made([{"messages": chat}], formatter, system_prompt="Be brief.")
    assert text_of(found) == "b<|im_end|>d<|im_end|>"
    assert found.messages(0)[0] == {"role": "system", "content": "Be brief."}
    assert "[[b<|im_end|>]]" in found.show(0)


def test_a_row_that_is_shown_is_not_longer_than_a_screen(formatter):
    shown = made([{"prompt": "x" * 5000, "completion": "y"}], formatter).show(0)
    assert len(shown) < 2000
    assert "characters ..." in shown
    assert shown.endswith("[[y<|im_end|>]]")


def test_overlong_rows_are_an_error_dropped_or_cut(formatter):
    rows = [{"prompt": "a", "completion": "b" * 50}]
    with pytest.raises(DataError, match=r"row 7 of mine has \d+ tokens.* may have 20"):
        made(rows, formatter, max_seq_len=20, name="mine", first_row=7)[0]
    dropped = made(rows, formatter, max_seq_len=20, on_overlong="drop")
    assert dropped[0].overlong
    assert learned_rows([dropped[0]]) is None
    with pytest.raises(DataError, match="nothing is left"):
        dropped.check(10)
    cut = made(rows, formatter, max_seq_len=20, on_overlong="truncate")
    assert (len(cut[0].token_ids), cut[0].overlong, cut.check(10)) == (20, True, 1)


def role(name, content="x"):
    return {"role": name, "content": content}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "only nothing"),
        ([role("user")], "only user"),
        ([role("user"), role("system"), role("assistant")], "message 1 is a system message"),
        ([role("user"), role("tool"), role("assistant")], "message 1 is a tool's result"),
        ([role("assistant"), role("assistant")], "message 1 is the assistant's, as the one before"),
        ([role("user"), role("assistant", " ")], "message 1 is the assistant's and empty"),
    ],
)
def test_conversations_that_cannot_have_taken_place_are_refused(messages, problem):
    with pytest.raises(DataError, match=problem):
        check_conversation(messages)


def test_what_is_no_conversation_is_shown():
    for value in (3, "hello", ["a"], None):
        with pytest.raises(DataError, match="expected a list of messages, got"):
            as_messages(value)


def test_tools_without_a_template_for_them_are_refused():
    tokenizer = load_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    columns = DemonstrationColumns(messages="messages", tools="tools")
    with pytest.raises(ConfigError, match=r"data\.tools=tools: the chat template has no form"):
        Demonstrations([{"messages": []}], ChatFormatter(tokenizer), columns)

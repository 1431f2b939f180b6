"""Conversations of a table as tokens: which columns, which tokens, and what is refused."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from torchrl_llm.data.chat import chat_of
from torchrl_llm.data.column_names import as_messages
from torchrl_llm.data.conversation_rules import check_conversation, check_written, keep_turns
from torchrl_llm.data.demonstrations import DemonstrationColumns, Demonstrations, learned_rows
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs.datasets.rows_env import RowsEnv
from torchrl_llm.errors import ConfigError, DataError, TemplateError
from torchrl_llm.modules import load_tokenizer
from torchrl_llm.rewards import ExactReward


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
    ({"prompt": "", "completion": ""}, {}, (("prompt",), "completion", None, "tools")),
    ({"question": "", "answer": "", "id": 1}, {}, (("question",), "answer", None, "tools")),
    ({"messages": [], "prompt": "", "answer": ""}, {}, ((), None, "messages", "tools")),
    ({"conversations": [], "t": []}, {"tools": "t"}, ((), None, "conversations", "t")),
    (
        {"instruction": "", "input": "", "output": ""},
        {},
        (("instruction", "input"), "output", None, "tools"),
    ),
    ({"x": "", "y": ""}, {"prompt": "x", "completion": "y"}, (("x",), "y", None, "tools")),
    ({"messages": [], "q": "", "answer": ""}, {"prompt": "q"}, (("q",), "answer", None, "tools")),
    ({"talk": []}, {"messages": "talk"}, ((), None, "talk", "tools")),
]


@pytest.mark.parametrize(("row", "named", "found"), COLUMNS)
def test_columns_are_found_by_usual_names_unless_they_are_named(row, named, found):
    assert tuple(DemonstrationColumns.find(row, **named))[:4] == found


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
    rows += [{"instruction": "Hi", "input": none, "output": "Hello"} for none in ("", " ", None)]
    rows.append({"instruction": "Even?", "input": 0, "output": "yes"})
    found = made(rows, formatter)
    asked = [found.messages(row)[0]["content"] for row in range(len(rows))]
    assert asked == ["Add.\n\n2+2", "Hi", "Hi", "Hi", "Even?\n\n0"]


BEFORE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
ASKED = {"role": "user", "content": "2+2?"}
CELLS = {"instruction": "2+2?", "input": "", "output": "4", "system": "Be brief."}


@pytest.mark.parametrize(
    ("row", "before"),
    [
        (CELLS | {"history": [["1+1?", "2"]]}, BEFORE),
        (CELLS | {"history": '[["1+1?", "2"]]'}, BEFORE),  # as a CSV file has it
        (CELLS | {"history": BEFORE[1:]}, BEFORE),
        (CELLS | {"history": None}, BEFORE[:1]),
        (CELLS | {"system": "", "history": "[]"}, []),
        ({"prompt": [*BEFORE[1:], ASKED], "output": "4", "system": "Be brief."}, BEFORE),
        ({"prompt": [*BEFORE, ASKED], "output": "4", "system": "Be brief."}, BEFORE),
    ],
)
def test_the_system_message_and_the_history_of_a_row_stand_before_its_prompt(row, before):
    """In what is learned and in what is answered; the last rows hold messages as the prompt."""
    asked = [*before, ASKED]
    learned = [*asked, {"role": "assistant", "content": "4"}]
    assert DemonstrationColumns.find(row).read(row) == learned
    query = RowsEnv(dataset=[row], reward=len).reset()["history"].prompt
    assert [dict(message) for message in query.chats[0].messages] == asked


def test_the_system_message_of_a_row_stands_before_its_whole_conversation():
    row = {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}
    row |= {"system": "Be brief.", "history": "of a column that means something else"}
    assert DemonstrationColumns.find(row).read(row) == BEFORE
    asked = RowsEnv(dataset=[row], reward=ExactReward()).reset()
    assert (asked["history"].prompt.content, asked["answer"][0]) == ([["Be brief.", "1+1?"]], "2")


def test_columns_that_are_named_stand_before_nothing():
    row = {"question": "Which?", "system": "Linux", "history": []}
    assert DemonstrationColumns.find(row, completion="system").read(row) == [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "Linux"},
    ]
    env = RowsEnv(dataset=[row], answer="system", reward=ExactReward())
    assert env.reset()["history"].prompt.content == [["Which?"]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"history": "long"}, "the column 'history' must hold pairs of question and answer, got"),
        ({"history": [["1+1?"]]}, "the column 'history' must hold pairs"),
        ({"system": 3}, "the column 'system' must hold the system message, got 3; if it is"),
        ({"prompt": BEFORE[:2], "system": "Be long."}, "the conversation has another"),
    ],
)
def test_a_system_message_or_a_history_that_is_none_is_refused(cells, message):
    row = {"prompt": "2+2?", "answer": "4", **cells}
    with pytest.raises(DataError, match=message):
        DemonstrationColumns.find(row).read(row)
    with pytest.raises(DataError, match=f"row 1: .*{message}"):
        RowsEnv(dataset=[row], reward=ExactReward())


def test_a_system_message_of_a_row_besides_that_of_the_environment_is_refused():
    env = RowsEnv(dataset=[CELLS], reward=ExactReward(), system_prompt="Think.")
    with pytest.raises(DataError, match="a system message of its own, and system_prompt is"):
        env.reset()


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
    rows = [{"messages": [user("Hi"), says("Ho")]}, {"messages": [user("Hi"), says("Ho")]}]
    rows[1]["tools"] = [ADD]
    found = made(rows, ChatFormatter(tokenizer))
    assert text_of(found).startswith("Ho")
    with pytest.raises(DataError, match=r"row 2 of .* has tools \(tools\), .* no form for them"):
        found[1]


# -- tools, reasoning, flags ----------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def user(content):
    return {"role": "user", "content": content}


def says(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def calls(arguments='{"a": 2}', **fields):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return says(None, tool_calls=[call], **fields)


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
LEARNED_CALL = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>4<|im_end|>'
)


def test_calls_are_learned_with_the_tools_before_them_in_every_form_of_theirs(formatter):
    chat = [user("2+2?"), calls(), RESULT, says("4")]
    legacy = says(None, function_call={"name": "add", "arguments": '{"a": 2}'})
    result = {"role": "function", "name": "add", "content": "4"}
    sharegpt = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    forms = [
        {"messages": chat, "tools": [ADD]},
        {"messages": json.dumps(chat), "tools": json.dumps([ADD])},
        {
            "messages": [user("2+2?"), calls({"a": 2}), RESULT, says("4")],
            "tools": [ADD["function"]],
        },
        {"messages": [user("2+2?"), legacy, result, says("4")], "tools": [ADD]},
        {"prompt": chat[:1], "completion": chat[1:], "tools": [ADD]},
        {"conversations": sharegpt, "tools": json.dumps([ADD["function"]])},
    ]
    ids = [made([form], formatter)[0].token_ids.tolist() for form in forms]
    assert all(each == ids[0] for each in ids)
    found = made(forms[:1], formatter)
    assert text_of(found) == LEARNED_CALL
    shown = found.show(0)
    assert '"description": "Adds."' in shown.split("[[<tool_call>")[0]
    assert "[[<tool_call>" in shown
    assert "<tool_response>\n4\n</tool_response>" in shown
    without = made([{"messages": chat}, forms[0]], formatter)  # the second row has tools, too
    assert without[1].token_ids.tolist() == ids[0]
    assert len(without[0].token_ids) < len(ids[0])


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_learned_by_any_of_its_names(key):
    thinking = ChatFormatter(load_tokenizer(), chat_template_name="qwen3")
    chat = [user("2+2?"), says("4", **{key: "Two and two."}), user("3+3?"), says("6")]
    found = made([{"messages": chat}], thinking)
    assert text_of(found) == "<think>\nTwo and two.\n</think>\n\n4<|im_end|>6<|im_end|>"
    assert "[[<think>\nTwo and two." in found.show(0)


def test_a_text_that_the_template_does_not_write_is_told_with_its_message(formatter):
    thought = [user("2+2?"), says("4", reasoning_content="Two and two.")]
    with pytest.raises(DataError, match=r"row 1 of .*message 1 .*write its reasoning 'Two and two"):
        made([{"messages": thought}], formatter)[0]
    tokenizer = load_tokenizer()
    # Thoughts of earlier turns are dropped, as by the templates of several published models.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}"
        "{% if m['reasoning_content'] and loop.last %}{{ m['reasoning_content'] + '/' }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = made(
        [{"messages": thought}, {"messages": [*thought, user("?"), says("!")]}],
        ChatFormatter(tokenizer),
    )
    assert "Two and two./4" in text_of(found)
    with pytest.raises(DataError, match=r"row 2 of .*message 1 .*write its reasoning"):
        found[1]


def test_white_space_and_escapes_of_a_template_are_no_loss():
    chat = [user('say "a\nb"'), says(" <think>\nx\n</think>\n\nline one\nline two ")]
    check_written(chat, 'user "say \\"a\\nb\\"" assistant <think> x </think>line one\nline two')
    with pytest.raises(TemplateError, match=r"message 1 .*its reasoning 'x'"):
        check_written(chat, 'user say "a\nb" line one\nline two')
    with pytest.raises(TemplateError, match=r"message 1 .*its text 'line one'"):
        check_written(chat, 'user say "a\nb" x')


def test_each_text_needs_a_place_of_its_own():
    chat = [user("is it 4?"), says("<think>4</think>yes")]
    check_written(chat, "user is it 4? assistant 4 yes")
    with pytest.raises(TemplateError, match=r"message 1 .*its reasoning '4'"):
        check_written(chat, "user is it 4? assistant yes")
    twice = [user("hi"), says("hi")]
    with pytest.raises(TemplateError, match=r"message 1 .*its text 'hi'"):
        check_written(twice, "user hi assistant")


@pytest.mark.parametrize("thought", ["4", "assistant", "is it", "yes"])
def test_a_thought_that_a_template_drops_is_told_of_wherever_its_text_stands(thought):
    drops = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    formatter = ChatFormatter(load_tokenizer(), chat_template=drops)
    chat = [user("is it 4?"), says(f"<think>{thought}</think>yes, it is")]
    with pytest.raises(DataError, match=f"message 1 .*does not write its reasoning '{thought}'"):
        made([{"messages": chat}], formatter)[0]
    plain = [user("is it 4?"), says("yes, it is")]
    assert text_of(made([{"messages": plain}], formatter)) == "yes, it is<|im_end|>"


def test_special_tokens_that_were_added_are_learned_in_answers_and_plain_elsewhere():
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<obs>"]})
    formatter = ChatFormatter(tokenizer)
    (obs, end) = tokenizer.convert_tokens_to_ids(["<obs>", "<|im_end|>"])
    system = {"role": "system", "content": "<obs> marks"}
    chat = [system, user("what is <obs>?"), says("an <obs> and no <|im_end|>")]
    one = made([{"messages": chat}], formatter)[0]
    ids, learned = one.token_ids, one.learned
    assert (ids == obs).sum() == 1
    assert learned[ids == obs].all()
    assert (ids == end).sum() == 3  # the ends of the turns: an answer cannot spell one
    assert formatter.decode(ids[learned]) == "an <obs> and no <|im_end|><|im_end|>"
    assert formatter.decode(ids).count("<obs>") == 3
    # A prompt keeps it plain, whoever has said it: a model samples the token itself.
    assert not (formatter.encode(chat).token_ids == obs).any()


CALLS = [("add", {"a": 1}), ("find", {"text": "x", "deep": {"c": [{"d": 2}, {"e": 3}]}})]


@pytest.mark.parametrize("kind", ["dataset", "parquet", "files"])
def test_what_arrow_adds_to_calls_and_schemas_is_not_learned(formatter, tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    rows = []
    for name, arguments in CALLS:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        rows.append(
            {
                "messages": [
                    user("go"),
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": "ok"},
                    says("done"),
                ],
                "tools": [{"name": name, "description": "d", "parameters": schema}],
            }
        )
    table = datasets.Dataset.from_list(rows)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["deep"] is None
    source = table
    if kind != "dataset":
        table.to_parquet(tmp_path / "rows.parquet")
        source = tmp_path / "rows.parquet" if kind == "parquet" else [tmp_path / "rows.parquet"]
    columns = DemonstrationColumns(messages="messages")
    padded = made(load_rows(source), formatter, columns)
    plain = made(rows, formatter, columns)
    for got, want in zip(padded, plain, strict=True):
        assert got.token_ids.equal(want.token_ids)
        assert got.learned.equal(want.learned)
    # The same conversation as a prompt.
    env = RowsEnv(dataset=load_rows(source), reward=len, shuffle=False)
    asked = env.reset()["history"].prompt.chats[0].messages
    assert asked[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_nulls_of_a_file_of_text_are_learned_as_they_are(formatter, tmp_path):
    call = {"name": "f", "arguments": {"a": None}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [user("go"), turn]}))
    found = made(load_rows(tmp_path / "rows.jsonl"), formatter)
    assert '{"a": null}' in text_of(found)


@pytest.mark.parametrize(("flags", "learned"), [
    ([{"weight": 0}, {"weight": 1}], "6<|im_end|>"),
    ([{"train": False}, {}], "6<|im_end|>"),
    ([{"weight": 1}, {"train": False}], "4<|im_end|>"),
    ([{"weight": None}, {"train": True}], "4<|im_end|>6<|im_end|>"),
])  # fmt: skip
def test_turns_that_are_flagged_are_not_learned(formatter, flags, learned):
    chat = [user("2+2?"), says("4", **flags[0]), user("3+3?"), says("6", **flags[1])]
    found = made([{"messages": chat}], formatter)
    assert text_of(found) == learned
    plain = made([{"messages": [user("2+2?"), says("4"), user("3+3?"), says("6")]}], formatter)
    assert found[0].token_ids.equal(plain[0].token_ids)


@pytest.mark.parametrize(("chat", "problem"), [
    ([user("a"), says("b", weight=0.5)], "message 1: weight must be 0 or 1, got 0.5"),
    ([{**user("a"), "train": True}, says("b")], r"message 0 \(user\) has train=True"),
    ([user("a"), says("b", weight=0)], "no turn of the assistant is learned"),
])  # fmt: skip
def test_flags_that_mean_nothing_are_refused(formatter, chat, problem):
    with pytest.raises(DataError, match=problem):
        made([{"messages": chat}], formatter)[0]


def test_a_turn_in_pieces_cannot_be_left_out():
    with pytest.raises(TemplateError, match="2 turns of the assistant in 3 pieces"):
        keep_turns(torch.tensor([1, 0, 1, 0, 1]).bool(), [True, False])


# -- conversations that cannot have taken place ---------------------------------------------------


IMPOSSIBLE = [
    ([], "only nothing"),
    ([user("x")], "only user"),
    ([user("x"), {"role": "bot", "content": "y"}], "message 1 has the role 'bot'; roles are"),
    ([user("x"), {"role": "system", "content": "y"}, says("z")], "message 1 is a system message"),
    ([user("x"), {"role": "tool", "content": "y"}, says("z")], "message 1 is a tool's result"),
    ([says("x"), says("y")], "message 1 is the assistant's, as the one before"),
    ([user("x"), says(" ")], "message 1 is the assistant's and empty"),
    ([user(""), says("x")], "message 0 is the user's and empty"),
    ([user("x"), calls(), user("y"), says("z")], r"message 1 calls .* message 2 \(user\)"),
    ([user("x"), calls(), {**RESULT, "tool_call_id": "b"}], "message 2 is the result of .*'b'"),
    ([user("x"), says("y"), RESULT], "message 2 is the result of .* are none"),
    ([user("x"), calls("2+2"), RESULT], "message 1 calls .* no JSON object: .*2\\+2"),
    ([{**user("x"), "tool_calls": calls()["tool_calls"]}, says("y")], "message 0 has tool calls"),
]


@pytest.mark.parametrize(("messages", "problem"), IMPOSSIBLE)
def test_conversations_that_cannot_have_taken_place_are_refused(messages, problem):
    with pytest.raises(DataError, match=problem):
        check_conversation(chat_of(messages, "message").messages)


def test_calls_that_are_spelled_out_may_have_results_and_the_last_call_none():
    spelled = [user("x"), says("<tool_call>add</tool_call>"), {"role": "tool", "content": "4"}]
    for chat in ([*spelled, says("4")], [user("x"), calls()]):
        check_conversation(chat_of(chat, "message").messages)


def test_file_and_line_of_a_bad_row_are_told(tmp_path, formatter):
    good = json.dumps({"messages": [user("a"), says("b")]})
    path = tmp_path / "chats.jsonl"
    lines = [good, "", *[good] * 731, json.dumps({"conversation": "c"}), good]
    path.write_text("\n".join(lines))
    rows = load_rows(path)
    assert len(rows) == 734
    found = made(rows, formatter)
    message = r"chats\.jsonl, line 734: there is no column 'messages'; there are \['conversation'\]"
    with pytest.raises(DataError, match=message):
        found.check(10)  # the others are looked at, too


def test_a_multi_line_record_of_csv_is_named_by_its_first_line(tmp_path, formatter):
    path = tmp_path / "qa.csv"
    path.write_text('question,answer\n"a\nb",c\n"d\ne",\n')
    found = made(load_rows(path), formatter)
    with pytest.raises(DataError, match=r"qa\.csv, line 4: the column 'answer' is empty"):
        found[1]
    assert pickle.loads(pickle.dumps(found.rows[1])).place.endswith("line 4")


def test_a_second_system_message_is_told_by_its_cause(formatter):
    chat = [{"role": "system", "content": "a"}, user("b"), says("c")]
    with pytest.raises(DataError, match=r"data\.system_prompt is the first message"):
        made([{"messages": chat}], formatter, system_prompt="d")[0]

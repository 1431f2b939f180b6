"""Rows of tables as preferences: columns of other people, what is compared, what is refused."""

import json

import pytest
import torch

from torchrl_llm.data.preferences import PreferenceColumns, Preferences, preference_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import load_tokenizer

TOKENIZER = load_tokenizer()
USER, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
PLAIN = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def preferences(*rows, settings=None, **names):
    columns = PreferenceColumns.find(rows[0], **names)
    return Preferences(rows, ChatFormatter(TOKENIZER), columns, **(settings or {}))


def texts(preference):
    """Each answer: what stands before it, and what is compared."""
    return [
        tuple(TOKENIZER.decode(each.token_ids[mask]) for mask in (~each.learned, each.learned))
        for each in preference.answers
    ]


EXPECTED = texts(preferences(PLAIN)[0])


def test_what_is_compared_is_the_answer_with_its_end():
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert [said for _, said in EXPECTED] == ["4<|im_end|>", "5<|im_end|>"]
    assert all(asked.startswith(before) for asked, _ in EXPECTED)


SAME = {
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "and the prompt once more": {
        "prompt": "2+2?",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 9.0,
    },
    "JSON": {
        "prompt": json.dumps([USER]),
        "chosen": json.dumps([GOOD]),
        "rejected": json.dumps([BAD]),
    },
    "one message each": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "dialogues": {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
    },
    "a dialogue as prompt": {
        "prompt": "\n\nHuman: 2+2?\n\nAssistant:",
        "chosen": "4",
        "rejected": "5",
    },
    "stack exchange": {"question": "2+2?", "response_j": "4", "response_k": "5"},
    "numbers": {"question": "2+2?", "chosen": 4, "rejected": 5},
}


@pytest.mark.parametrize("name", SAME)
def test_forms_of_one_pair(name):
    pair = preferences(SAME[name])[0]
    assert texts(pair) == EXPECTED
    assert pair.good == (True, False)
    assert pair.margin == 0.0


def test_named_columns_and_a_system_message():
    row = {"q": "2+2?", "win": "4", "lose": "5", "by": "1.5", "system": "Add."}
    names = {"prompt": "q", "chosen": "win", "rejected": "lose", "margin": "by"}
    pair = preferences(row, **names)[0]
    assert pair.margin == 1.5
    asked, said = texts(pair)[0]
    assert said == "4<|im_end|>"
    assert asked.startswith("<|im_start|>system\nAdd.<|im_end|>\n")


def test_earlier_turns_belong_to_the_prompt():
    begin = [USER, GOOD, {"role": "user", "content": "Sure?"}]
    pair = preferences({"chosen": [*begin, GOOD], "rejected": [*begin, BAD]})[0]
    assert [said for _, said in texts(pair)] == ["4<|im_end|>", "5<|im_end|>"]
    begin = [USER]
    more = [{"role": "user", "content": "Sure?"}, GOOD]
    pair = preferences({"chosen": [*begin, GOOD, *more], "rejected": [*begin, BAD]})[0]
    assert texts(pair)[0][1] == "4<|im_end|>4<|im_end|>"


@pytest.mark.parametrize("margin", [None, "", 0])
def test_a_margin_that_is_not_said_is_0(margin):
    assert preferences({**PLAIN, "margin": margin})[0].margin == 0.0


def test_the_same_answer_twice_is_compared():
    pair = preferences({"chosen": [USER, GOOD], "rejected": [USER, GOOD]})[0]
    assert texts(pair) == [EXPECTED[0]] * 2


def test_answers_with_a_label():
    rows = [
        {"prompt": "2+2?", "completion": said, "label": label}
        for said, label in (("4", True), ("5", "false"), ("5", 0))
    ]
    found = list(preferences(*rows))
    assert [each.good for each in found] == [(True,), (False,), (False,)]
    assert texts(found[0]) == [EXPECTED[0]]
    rows = preference_rows(found)
    assert rows["pair_id"].tolist() == [0, 1, 2]
    assert rows["is_chosen"].tolist() == [True, False, False]


def test_rows_for_a_loss_are_without_pairs_of_which_one_side_was_dropped():
    rows = [PLAIN, {"prompt": "2+2?", "chosen": "4", "rejected": "5" * 99}, PLAIN]
    found = preferences(*rows, settings={"max_seq_len": 40, "on_overlong": "drop"})
    assert [each.is_whole for each in found] == [True, False, True]
    made = preference_rows(found)
    assert made["pair_id"].tolist() == made["group_id"].tolist() == [0, 0, 2, 2]
    assert made["is_chosen"].tolist() == [True, False] * 2
    assert torch.equal(made[0]["tokens", "full"], found[0].answers[0].token_ids)
    assert preference_rows([found[1]]) is None
    with pytest.raises(DataError, match=r"row 2.*has 1\d\d tokens"):
        preferences(*rows, settings={"max_seq_len": 40}).check(9)


REFUSED = {
    "no pair": ({"text": "4"}, {}, "data.chosen and data.rejected"),
    "no label": ({"prompt": "2+2?", "completion": "4"}, {}, "data.completion and data.label"),
    "a name that is not there": (
        PLAIN,
        {"chosen": "win", "rejected": "rejected"},
        "data.chosen=win",
    ),
    "no prompt": ({"chosen": "4", "rejected": "5"}, {}, "name data.prompt"),
    "an empty answer": ({**PLAIN, "rejected": ""}, {}, "row 1.*'rejected' is empty"),
    "half a conversation": ({**PLAIN, "chosen": [USER, GOOD]}, {}, "the other is not"),
    "another prompt": (
        {"prompt": "3+3?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {},
        "the prompt '3.3.' is not in",
    ),
    "questions that differ": (
        {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "?"}, GOOD]},
        {},
        "no prompt before|continue with the assistant",
    ),
    "a dialogue without an answer": (
        {
            "chosen": "\n\nHuman: 2+2?\n\nAssistant: ",
            "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
        },
        {},
        "row 1.*'chosen' ends without an answer",
    ),
    "a label of another kind": (
        {"prompt": "2+2?", "completion": "4", "label": [True]},
        {},
        "'label' must be true or false",
    ),
    "a margin that is none": ({**PLAIN, "margin": "much"}, {}, "'margin' must be a number"),
    "a label that is none": (
        {"prompt": "2+2?", "completion": "4", "label": "maybe"},
        {},
        "'label' must be true or false",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_preference_is_refused(name):
    row, names, expected = REFUSED[name]
    with pytest.raises(DataError, match=expected):
        preferences(row, **names)[0]


def test_names_that_do_not_go_together_are_refused():
    row = {**PLAIN, "completion": "4", "label": True}
    with pytest.raises(ConfigError, match="both"):
        PreferenceColumns.find(row, chosen="chosen")
    with pytest.raises(ConfigError, match="not both"):
        PreferenceColumns.find(row, chosen="chosen", rejected="rejected", label="label")


def test_what_a_run_shows_first():
    shown = preferences(PLAIN).show(0)
    assert shown.index("chosen: row 1") < shown.index("[[4<|im_end|>]]")
    assert shown.index("rejected: row 1") < shown.index("[[5<|im_end|>]]")

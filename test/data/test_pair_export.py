"""Pairs out of rollouts, and that train dpo reads them."""

from __future__ import annotations

import json

import pytest

from torchrl_llm.cli import main
from torchrl_llm.data.chat_export import SampledChat
from torchrl_llm.data.pair_export import PairFilter
from torchrl_llm.data.preferences import PreferenceColumns, Preferences
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.modules import load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(said, reward, group=0, asked="1+1?", **more):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": asked}]
    answers = said if isinstance(said, list) else [{"role": "assistant", "content": said}]
    return SampledChat([*messages, *answers], reward, group, **more)


GROUPS = [
    chat("2", 1.0),
    chat("3", 0.0),
    chat("two", 1.0),
    chat("4", 0.25),
    chat("5", 0.5, 1, "2+2?"),
    chat("6", 0.5, 1, "2+2?"),
    chat("7", 0.0, 2, "3+3?", tools=TOOLS),
    chat("6", 1.0, 2, "3+3?", tools=TOOLS),
]


def said(pairs):
    return [
        (row["chosen"][0]["content"], row["rejected"][0]["content"], row["margin"])
        for row in (pair.row() for pair in pairs)
    ]


def test_the_best_and_the_worst_of_each_group():
    wanted = PairFilter()
    pairs = list(wanted(GROUPS))
    assert said(pairs) == [("2", "3", 1.0), ("6", "7", 1.0)]
    assert pairs[0].row() == {
        "prompt": GROUPS[0].messages[:2],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
        "margin": 1.0,
    }
    assert pairs[1].row()["tools"] == TOOLS
    assert wanted.counts == {"groups": 3, "written": 2, "groups without a difference": 1}


def test_every_two_with_different_rewards():
    assert said(PairFilter(which="all")(GROUPS)) == [
        ("2", "4", 0.75),
        ("2", "3", 1.0),
        ("two", "4", 0.75),
        ("two", "3", 1.0),
        ("4", "3", 0.25),
        ("6", "7", 1.0),
    ]


def test_what_is_no_pair_is_counted():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    end = {"role": "assistant", "content": "9"}
    turns = [[call, {"role": "tool", "content": each}, end] for each in "12"]
    chats = [
        *(chat("2", reward, 0) for reward in (0.0, 1.0)),  # the same text, judged differently
        *(chat("2", 1.0, 1, asked) for asked in ("a", "b")),
        chat("2", 0.0, 1, "c"),
        *(chat(each, reward, 2) for each, reward in (("x", 1.0), ("y", 0.0))),
        *(chat(each, reward, 3) for each, reward in (("x", 1.0), ("y", 0.5))),
        chat("2", 0.1 + 0.2, 4),
        chat("3", 0.3, 4),
        *(chat(each, reward, 5) for each, reward in zip(turns, (0.0, 1.0), strict=True)),
    ]
    wanted = PairFilter()
    pairs = list(wanted(chats))
    assert wanted.counts == {
        "groups": 6,
        "pairs of equal answers": 1,
        "pairs of different prompts": 1,
        "written": 2,
        "pairs twice": 1,
        "groups without a difference": 1,
    }
    assert pairs[1].shared == 2  # a tool answers differently: the call before it is the first turn
    assert len(list(PairFilter(duplicates=True)(chats))) == 3


@pytest.fixture
def answers(tmp_path):
    """Answers of an evaluation, as the command reads them."""
    records = [
        {"prompt": each.group, "messages": each.messages, "reward": each.reward, "valid": True}
        for each in GROUPS
    ]
    records.append({**records[0], "reward": None, "valid": False})
    (tmp_path / "answers_x.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def test_the_command_writes_what_preferences_read(answers, capsys):
    file = answers / "pairs.jsonl"
    main(["export", str(answers), "--pairs", "best-worst", "-o", str(file)])
    told = capsys.readouterr()
    assert f"wrote 2 pairs of 3 groups to {file}" in told.out
    assert "9 conversations read; left out: 1 without a valid reward" in told.err
    assert "1 groups without a difference" in told.err
    rows = load_rows(file)
    columns = PreferenceColumns.find(rows[0])
    assert columns.margin == "margin"
    read = Preferences(rows, ChatFormatter(load_tokenizer()), columns)
    assert read[1].margin == 1.0
    assert [bool(answer.learned.any()) for answer in read[0].answers] == [True, True]
    assert "[[6" in read.show(1)
    main(["export", str(answers), "--pairs", "all", "-o", str(file)])
    assert "wrote 6 pairs of 3 groups" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--min-reward", "1"), ("--best-of-group", "1")])
def test_options_without_effect_are_refused(answers, option, capsys):
    with pytest.raises(SystemExit):
        main(["export", str(answers), "--pairs", "all", *option])
    assert f"{option[0]} has no effect with --pairs" in capsys.readouterr().err

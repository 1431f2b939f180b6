from __future__ import annotations

import json

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_llm.cli import main
from torchrl_llm.data import Chat, ChatHistory, FinishReason, History
from torchrl_llm.data.chat_export import (
    SampledChat,
    as_dataset,
    read_chats,
    write_chats,
)
from torchrl_llm.data.rollout_store import RolloutStore, RolloutWriter
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.errors import DataError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SPOKEN = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "reasoning_content": "Call.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2 é 😀", "raw": "<x>2", "is_complete": False},
]
KEPT = [*SPOKEN[:3], {"role": "assistant", "content": "2 é 😀"}]


def turn(messages, *, traj, number, done, reward, group=0, valid=True, reason=FinishReason.STOP):
    history = ChatHistory(full=History.of([Chat(messages)])[0], batch_size=[])
    row = TensorDict(
        traj_id=torch.tensor(traj),
        turn=torch.tensor(number),
        group_id=torch.tensor(group),
        tokens={"finish_reason": torch.tensor(int(reason), dtype=torch.int8)},
        next={
            "reward": torch.full((1, 1), reward),
            "done": torch.tensor([done]),
            "reward_valid": torch.tensor(valid),
        },
    )
    row.set("history", history)
    return row


def answer(text, **about):
    return turn([{"role": "assistant", "content": text}], number=0, done=True, **about)


@pytest.fixture
def run_folder(tmp_path):
    """Turns of two trajectories that overlap, and single answers of two groups that alternate."""
    rows = [
        turn(SPOKEN[:2], traj=0, number=0, done=False, reward=0.25),
        answer("a", traj=1, reward=0.0, group=1),
        turn(SPOKEN, traj=0, number=1, done=True, reward=0.75),
        answer("b", traj=2, reward=2.0, group=1),
        answer("c", traj=3, reward=9.0, group=0, valid=False),
        answer("d", traj=4, reward=3.0, group=1, reason=FinishReason.LENGTH),
    ]
    RolloutWriter(tmp_path / "rollouts").append(1, rows)
    return tmp_path


def exported(folder, *options):
    main(["export", str(folder), "-o", str(folder / "chats.jsonl"), *map(str, options)])
    return load_rows(folder / "chats.jsonl")


def test_a_trajectory_is_one_chat_with_its_calls_reasoning_and_summed_reward(run_folder):
    first, *others = read_chats(run_folder)
    assert (first.messages, first.reward, first.group) == (KEPT, 1.0, (1, 0))
    said = [chat.messages[0]["content"] for chat in others]
    assert said == ["c", "a", "b", "d"]  # group by group
    assert [chat.reward for chat in others] == [None, 0.0, 2.0, 3.0]
    assert [chat.cut for chat in others] == [False, False, False, True]


def test_the_command_writes_what_is_good_enough_and_says_what_is_not(run_folder, capsys):
    chats = exported(run_folder, "--min-reward", 1)
    assert [chat["messages"][-1]["content"] for chat in chats] == ["2 é 😀", "b"]
    assert chats[0]["messages"] == KEPT
    told = capsys.readouterr()
    assert "5 conversations read; left out: 1 without a valid reward" in told.err
    assert "1 reward below 1.0" in told.err
    assert "1 cut" in told.err
    assert "wrote 2 conversations to" in told.out
    best = exported(run_folder, "--best-of-group", 1, "--cut")
    assert [chat["messages"][-1]["content"] for chat in best] == ["2 é 😀", "d"]


def test_nothing_that_is_good_enough_is_an_error_and_leaves_an_earlier_file(run_folder, capsys):
    (run_folder / "chats.jsonl").write_text("earlier\n")
    with pytest.raises(SystemExit):
        exported(run_folder, "--min-reward", 9)
    told = capsys.readouterr().err
    assert "no conversation is good enough" in told
    assert "3 reward below 9.0" in told
    assert (run_folder / "chats.jsonl").read_text() == "earlier\n"
    assert not list(run_folder.glob(".*"))


def test_answers_of_an_evaluation_are_chats_of_their_prompts(tmp_path):
    record = {"prompt": 0, "messages": KEPT, "reward": 1.0, "valid": True, "cut": False}
    wrong = {**record, "reward": None, "valid": False}
    with_tools = {**record, "prompt": 1, "tools": [{"type": "function"}]}
    lines = [json.dumps(each) for each in (record, wrong, record, with_tools)]
    (tmp_path / "answers_x.jsonl").write_text("\n".join(lines))
    found = list(read_chats(tmp_path))
    assert [chat.reward for chat in found] == [1.0, None, 1.0, 1.0]
    assert found[0].group == found[2].group != found[3].group
    assert found[3].row() == {"messages": KEPT, "tools": [{"type": "function"}], "reward": 1.0}
    assert len(exported(tmp_path, "--min-reward", 1)) == 1
    (tmp_path / "answers_x.jsonl").write_text('{"messages": [1]}')
    with pytest.raises(DataError, match=r"line 1 of .*answers_x"):
        list(read_chats(tmp_path))
    # Lines that are empty count, as they do in an editor.
    (tmp_path / "answers_x.jsonl").write_text('\n\n{"messages": [1]}')
    with pytest.raises(DataError, match=r"line 3 of .*answers_x"):
        list(read_chats(tmp_path))


def test_half_a_surrogate_pair_is_written_so_that_it_is_read_again(tmp_path):
    chat = SampledChat([{"role": "assistant", "content": "half \ud83d of one"}], 1.0, 0)
    assert write_chats([chat], tmp_path / "chats.jsonl") == 1
    (row,) = load_rows(tmp_path / "chats.jsonl")
    assert row["messages"] == chat.messages


def test_what_json_cannot_hold_is_told(tmp_path):
    chat = SampledChat([{"role": "user", "content": object()}], 1.0, 0)
    with pytest.raises(DataError, match="conversation 1 cannot be written"):
        write_chats([chat], tmp_path / "chats.jsonl")
    assert not list(tmp_path.iterdir())


def test_rows_of_text_alone_are_no_chats(tmp_path):
    row = answer("a", traj=1, reward=1.0).exclude("history")
    row.set("text", NonTensorData("a"))
    RolloutWriter(tmp_path).append(1, [row])
    with pytest.raises(DataError, match="rows of text"):
        list(read_chats(tmp_path))


def test_a_dataset_takes_calls_with_any_arguments(run_folder):
    pytest.importorskip("datasets")
    rows = as_dataset(read_chats(run_folder))
    assert len(rows) == 5
    call = rows[0]["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"a": 1}
    assert RolloutStore(run_folder)[0]["history", "full"].content == ["1+1?", ""]

"""Rows of one's own as a task: which columns count, and what is refused."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data import History
from torchrl_llm.data.demonstrations import DemonstrationColumns
from torchrl_llm.data.wire import encode, pack_rows
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.datasets.rows_env import RowsEnv, choose_columns, query_and_answer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards import ExactReward
from torchrl_llm.rewards.function_reward import FunctionReward

QA = [{"question": f"{n}+1?", "answer": str(n + 1), "id": n} for n in range(4)]
NONE = {"prompt": None, "answer": None, "messages": None}
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
        ]
    }
]


def right(response, answer):
    return response == answer


def test_rows_are_asked_and_scored_and_keep_the_row_they_come_from():
    env = RowsEnv(dataset=QA, reward=right, num_envs=2, repeats=2, shuffle=False)
    check_env_specs(RowsEnv(dataset=QA, reward=right, num_envs=2, shuffle=False))
    td = env.reset()
    assert list(td["query"]) == ["0+1?", "0+1?"]
    assert td["row"][0] == QA[0]
    answers = [[{"role": "assistant", "content": text}] for text in "12"]
    asked = td["history"].prompt.chats
    td["history"].full = History.of([c + more for c, more in zip(asked, answers, strict=True)])
    done = env.step(td)["next"]
    assert done["reward"].flatten().tolist() == [1.0, 0.0]
    assert done["done"].all()


def test_conversations_are_continued_and_their_last_answer_is_what_is_compared():
    env = RowsEnv(dataset=CHATS, reward=right)
    td = env.reset()
    assert td["history"].prompt.role == [["system", "user"]]
    assert list(td["answer"]) == ["4"]


COLUMNS = [
    ({"question": "", "answer": "", "x": ""}, {}, (("question",), "answer")),
    ({"prompt": "", "question": "", "target": ""}, {}, (("prompt",), "target")),
    ({"x": "", "y": ""}, {"prompt": "x"}, (("x",), None)),
    ({"x": "", "y": ""}, {"prompt": "x", "answer": "y"}, (("x",), "y")),
    ({"messages": []}, {}, (("messages",), None)),
    ({"conversations": []}, {}, (("conversations",), None)),
    ({"chat": [], "answer": ""}, {"messages": "chat"}, (("chat",), "answer")),
    ({"input": "", "output": ""}, {}, (("input",), "output")),
    (
        {"instruction": "", "input": "", "output": ""},
        {},
        (("instruction", "input"), "output"),
    ),
    (
        {"instruction": "", "input": "", "output": ""},
        {"prompt": "instruction"},
        (("instruction",), "output"),
    ),
]


@pytest.mark.parametrize(("row", "named", "chosen"), COLUMNS)
def test_columns_are_found_by_usual_names_unless_they_are_named(row, named, chosen):
    wanted = {"prompt": None, "answer": None, "messages": None} | named
    assert choose_columns(row, **wanted)[:2] == chosen


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prompt": "questoin"}, DataError, r"data\.prompt=questoin: .*there are \['answer', 'id'"),
        ({"answer": "anwser"}, DataError, r"data\.answer=anwser: there is no such column"),
        ({"prompt": "question", "messages": "id"}, ConfigError, "both name the question"),
        ({"prompt": "id"}, DataError, "row 1: .*must hold a text or a list of messages.*got 0"),
        ({"reward": None}, ConfigError, r"need a reward: reward=FILE\.py:FUNCTION"),
        ({"dataset": [{"a": 1}]}, DataError, r"none of the columns \['a'\] is a prompt"),
        ({"dataset": None}, ConfigError, "need data: data=FILE"),
    ],
)
def test_wrong_columns_are_answered_with_those_that_there_are(given, error, message):
    with pytest.raises(error, match=message):
        RowsEnv(**({"dataset": QA, "reward": right} | given))


def test_a_reward_that_compares_is_refused_where_no_row_has_an_answer():
    rows = [{"instruction": "1+1?", "result": "2"}]
    for reward in (right, ExactReward(), {"exact": ExactReward(), "right": (right, 0.5)}):
        with pytest.raises(DataError, match=r"columns \['instruction', 'result'\].*data\.answer="):
            RowsEnv(dataset=rows, reward=reward)
        assert RowsEnv(dataset=rows, reward=reward, answer="result").reset()["answer"][0] == "2"
    by_row = {"row": lambda response, row: response == row["result"], "short": len}
    assert RowsEnv(dataset=rows, reward=by_row).reset()["answer"][0] is None


def test_the_input_of_an_instruction_is_asked_as_in_fine_tuning():
    rows = [
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    env = RowsEnv(dataset=rows, reward=right, num_envs=2, shuffle=False)
    asked = list(env.reset()["query"])
    assert asked == ["Add.\n\n2 and 2", "Say hi."]
    columns = DemonstrationColumns.find(rows[0])
    assert asked == [columns.read(row)[0]["content"] for row in rows]


def test_conversations_of_other_forms_are_asked_and_answered_as_sft_learns_them():
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in said]
    for row, query in [
        ({"messages": json.dumps(said)}, said[:1]),
        ({"messages": parts}, parts[:1]),
        ({"prompt": said[:1], "completion": said[1:]}, said[:1]),
        ({"prompt": json.dumps(said[:1]), "completion": json.dumps(said[1:])}, said[:1]),
        ({"instruction": "Add.", "context": "2, 2", "response": "4"}, "Add.\n\n2, 2"),
        *(
            ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": m, "value": "4"}]}, q)
            for m, q in (("gpt", said[:1]), ("chatgpt", said[:1]), ("bard", said[:1]))
        ),
    ]:
        assert query_and_answer(row, choose_columns(row, **NONE)) == (query, "4")
    unknown = [{"from": "human", "value": "2+2?"}, {"from": "parrot", "value": "4"}]
    with pytest.raises(DataError, match="of the roles system, developer, user, assistant, tool"):
        RowsEnv(dataset=[{"conversations": unknown}], reward=lambda response: 1.0)


def test_rewards_get_numbers_of_python_from_numpy_torch_and_pandas():
    import numpy as np
    import torch

    cells = {
        "flag": (np.bool_(False), False),
        "count": (np.int64(40), 40),
        "share": (np.float32(0.5), 0.5),
        "tensor": (torch.tensor(3), 3),
        "vector": (np.array([1, 2]), [1, 2]),
        "nested": ({"a": [np.int64(7), torch.tensor([True])]}, {"a": [7, [True]]}),
        "missing": (float("nan"), None),
        "text": ("40", "40"),
    }
    row = {"question": "?", "answer": np.int64(4)} | {
        name: cell for name, (cell, _) in cells.items()
    }
    seen = []

    def reward(response, row):
        seen.append(row)
        return 1.0

    def by_answer(response, answer):
        seen.append({"answer": answer})
        return 1.0

    for function in (reward, by_answer):
        answered(RowsEnv(dataset=[row], reward=function))
    plain = DatasetChatEnv(dataset=[{"query": "?"} | row])
    answered(plain.append_transform(FunctionReward(reward)))
    for got in seen:
        assert type(got["answer"]) is int
        assert got["answer"] == 4
    for got in (seen[0], seen[2]):
        for name in ("flag", "count", "share", "tensor", "text"):
            assert type(got[name]) is type(cells[name][1])
            assert got[name] == cells[name][1]
    assert {name: seen[0][name] for name in cells} == {n: value for n, (_, value) in cells.items()}


def test_rewards_get_dates_decimals_and_collections_as_they_are():
    import datetime as dt

    import numpy as np

    pd = pytest.importorskip("pandas")
    day, moment = dt.date(2024, 5, 7), dt.datetime(2024, 5, 7, 1, 2, 3)
    for cell, expected in [
        *((day, day), (moment, moment), (Decimal("0.10"), Decimal("0.10")), (b"a", b"a")),
        *((dt.timedelta(3), dt.timedelta(3)), ((1, np.int64(2)), (1, 2)), ({1, 2}, {1, 2})),
        (np.datetime64("2024-05-07T01:02:03", "ns"), moment),
        (np.array(["2024-05-07T01:02:03"], "datetime64[ns]"), [moment]),
        (pd.Timestamp(moment), moment),
        (pd.Timedelta(days=3), dt.timedelta(3)),
        (np.array([{"a": 1, "b": None}, {"a": None, "b": [None]}]), [{"a": 1}, {"b": [None]}]),
    ]:
        seen = []
        by_row = lambda response, row: seen.append(row["answer"]) or 1.0  # noqa: B023, E731
        by_answer = lambda response, answer: seen.append(answer) or 1.0  # noqa: B023, E731
        for reward in (by_row, by_answer):
            env = RowsEnv(dataset=[{"question": "?", "answer": cell}], reward=reward)
            encode(pack_rows(env.reset()))  # as a checkpoint does
            answered(env)
        assert seen == [expected, expected]
        assert type(seen[0]) is type(seen[1]) is type(expected)


def answered(env):
    td = env.reset()
    chat = td["history"].prompt.chats[0] + [{"role": "assistant", "content": "4"}]
    td["history"].full = History.of([chat])
    return env.step(td)["next"]


def test_a_missing_cell_makes_no_floats_of_whole_numbers():
    nan = float("nan")
    rows = [
        {"question": "a", "answer": 30.0, "size": 1.5},
        {"question": "b", "answer": nan, "size": nan},
        {"question": "c", "answer": 4.0, "size": 2.0},
    ]
    env = RowsEnv(dataset=rows, reward=ExactReward(), num_envs=3, shuffle=False)
    td = env.reset()
    assert list(td["answer"]) == [30, None, 4]
    assert [type(answer) for answer in td["answer"]] == [int, type(None), int]
    assert [row["size"] for row in td["row"]] == [1.5, None, 2.0]  # not all of them are whole
    said = [[{"role": "assistant", "content": text}] for text in ("30", "x", "4")]
    asked = td["history"].prompt.chats
    td["history"].full = History.of([c + more for c, more in zip(asked, said, strict=True)])
    assert env.step(td)["next", "reward"].flatten().tolist() == [1.0, 0.0, 1.0]


def test_a_row_without_a_prompt_is_found_before_training():
    rows = [*QA, {"question": "", "answer": "1", "id": 4}]
    with pytest.raises(DataError, match=r"row 5: .*must hold a text"):
        RowsEnv(dataset=rows, reward=right)


def test_a_reward_takes_the_place_of_a_tasks_own():
    from torchrl_llm.envs import GSM8KEnv
    from torchrl_llm.envs.games import TicTacToeEnv

    rows = [{"question": "3+4?", "answer": "Add.\n#### 7"}]
    env = GSM8KEnv(dataset=rows, reward=right)
    td = env.reset()
    td["history"].full = History.of(
        [td["history"].prompt.chats[0] + [{"role": "assistant", "content": "7"}]]
    )
    assert env.step(td)["next", "reward"].item() == 1.0  # the task's own wants an answer block
    with pytest.raises(ConfigError, match="reward has no effect"):
        TicTacToeEnv(reward=right)

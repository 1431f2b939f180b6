"""Rows of one's own as a task: which columns count, and what is refused."""

from __future__ import annotations

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data import History
from torchrl_llm.envs.datasets.rows_env import RowsEnv, choose_columns
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards import ExactReward

QA = [{"question": f"{n}+1?", "answer": str(n + 1), "id": n} for n in range(4)]
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
    ({"question": "", "answer": "", "x": ""}, {}, ("question", "answer")),
    ({"prompt": "", "question": "", "target": ""}, {}, ("prompt", "target")),
    ({"x": "", "y": ""}, {"prompt": "x"}, ("x", None)),
    ({"x": "", "y": ""}, {"prompt": "x", "answer": "y"}, ("x", "y")),
    ({"messages": []}, {}, ("messages", None)),
    ({"conversations": []}, {}, ("conversations", None)),
    ({"chat": [], "answer": ""}, {"messages": "chat"}, ("chat", "answer")),
    ({"input": "", "output": ""}, {}, ("input", "output")),
]


@pytest.mark.parametrize(("row", "named", "chosen"), COLUMNS)
def test_columns_are_found_by_usual_names_unless_they_are_named(row, named, chosen):
    wanted = {"prompt": None, "answer": None, "messages": None} | named
    assert choose_columns(row, **wanted) == chosen


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prompt": "questoin"}, DataError, r"data\.prompt=questoin: .*there are \['answer', 'id'"),
        ({"answer": "anwser"}, DataError, r"data\.answer=anwser: there is no such column"),
        ({"prompt": "question", "messages": "id"}, ConfigError, "both say what is asked"),
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

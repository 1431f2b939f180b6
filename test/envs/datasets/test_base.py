"""DatasetChatEnv and TaskEnv: rows in, conversations out, resumable."""

from __future__ import annotations

import json
import pickle

import pytest
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs import ChatEnv, DatasetChatEnv, RewardParser, TaskEnv
from torchrl_llm.envs.datasets import GeneratedRows, RowLoader
from torchrl_llm.envs.transforms import DataLoadingPrimer, PolicyVersion
from torchrl_llm.errors import ConfigError, DataError

ROWS = [{"query": letter, "answer": letter.upper()} for letter in "abcde"]


class Upper(RewardParser):
    def score(self, response, answer):
        return float(response == answer)


class UpperEnv(TaskEnv):
    """A generated task with a held-out split of its own."""

    SYSTEM_PROMPT = "Answer in capitals."

    @classmethod
    def default_dataset(cls, split):
        offset = {"train": 0, "test": 1000}[split or "train"]
        return GeneratedRows(lambda i: {"query": f"w{i}", "answer": f"W{i}"}, 4, offset=offset)

    def make_reward(self):
        return Upper()


def queries(env, resets=1):
    return [query for _ in range(resets) for query in env.reset()["query"]]


def test_it_is_a_transformed_chat_env_that_takes_more_transforms(answer):
    env = DatasetChatEnv(dataset=ROWS, num_envs=2, shuffle=False)
    assert isinstance(env, TransformedEnv)
    assert isinstance(env.base_env, ChatEnv)
    assert isinstance(env.primer, DataLoadingPrimer)
    assert env.append_transform(PolicyVersion(int)) is env
    td = env.step(answer(env.reset(), "x", "y"))
    assert td["next", "policy_version"].tolist() == [0, 0]
    assert env.input_mode == "history"


def test_the_order_is_a_function_of_the_seed():
    first, same, other = (DatasetChatEnv(dataset=ROWS * 5, seed=seed) for seed in (0, 0, 1))
    assert queries(first, 30) == queries(same, 30)
    assert queries(first, 20) != queries(other, 20)


def test_set_seed_starts_over_in_another_order():
    env = DatasetChatEnv(dataset=ROWS * 5, seed=0)
    before = queries(env, 10)
    env.set_seed(1)
    assert queries(env, 10) == queries(DatasetChatEnv(dataset=ROWS * 5, seed=1), 10)
    env.set_seed(0)
    assert queries(env, 10) == before
    env.reset_dataloader()
    assert queries(env, 10) == before


def test_a_collate_function_makes_the_columns():
    def collate(rows):
        return {"query": [row["query"] * 2 for row in rows]}

    env = DatasetChatEnv(
        dataset=ROWS, shuffle=False, batch_size_dl=2, collate_fn=collate, num_envs=3
    )
    assert queries(env) == ["aa", "bb", "cc"]


def test_another_column_can_be_the_query():
    rows = [{"question": "Hi"}]
    env = DatasetChatEnv(dataset=rows, data_key="question")
    assert env.reset()["history"].prompt.content == [["Hi"]]
    with pytest.raises(DataError, match=r"lack the column 'query'.*question"):
        DatasetChatEnv(dataset=rows)


def test_a_query_column_may_hold_messages():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    env = DatasetChatEnv(dataset=[{"query": messages}], num_envs=2)
    assert env.reset()["history"].prompt.role == [["system", "user"]] * 2
    check_env_specs(env)


def test_a_column_text_is_the_query_unless_another_is_named():
    rows = [{"text": "a", "answer": "1"}]
    td = DatasetChatEnv(dataset=rows).reset()
    assert (list(td["query"]), "text" in td.keys()) == (["a"], False)
    assert list(DatasetChatEnv(dataset=rows, data_key="text").reset()["text"]) == ["a"]


def test_a_task_over_a_data_loader_has_its_reward_where_it_is_asked_for():
    def rewards(**kwargs):
        return UpperEnv.from_dataloader(ROWS, **kwargs).reward_keys

    assert rewards() == []
    assert "reward" in rewards(compute_reward=True)


def test_a_file_is_a_data_set(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert queries(DatasetChatEnv(dataset=path, shuffle=False), 3) == ["a", "b", "c"]


def test_a_data_loader_is_used_as_it_is():
    env = DatasetChatEnv.from_dataloader(ROWS, batch_size=(2,), repeats=2)
    assert queries(env) == ["a", "a"]
    env = ChatEnv.from_dataloader(RowLoader(ROWS, shuffle=False), batch_size=(2,))
    assert queries(env) == ["a", "b"]
    env = UpperEnv.from_dataloader(ROWS, batch_size=(3,), max_steps=2)
    assert env.reset()["history"].prompt.content[0] == ["Answer in capitals.", "a"]
    with pytest.raises(ConfigError, match=r"\['seed', 'shuffle'\] would have no effect"):
        DatasetChatEnv.from_dataloader(ROWS, shuffle=True, seed=1)


def test_unknown_arguments_fail():
    with pytest.raises(TypeError):
        DatasetChatEnv(dataset=ROWS, sufle=True)
    with pytest.raises(TypeError):
        UpperEnv(max_step=2)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_check_env_specs_passes_as_it_is(mode, tokenizer):
    env = UpperEnv(num_envs=3, repeats=2, input_mode=mode, tokenizer=tokenizer, max_steps=2)
    check_env_specs(env)
    check_env_specs(env, break_when_any_done="both")
    check_env_specs(DatasetChatEnv(dataset=ROWS, input_mode=mode, tokenizer=tokenizer))


def test_a_task_has_a_reward_a_limit_and_a_held_out_split(answer):
    env = UpperEnv(num_envs=4, shuffle=False)
    td = env.step(answer(env.reset(), "W0", "x", "W2", "x"))["next"]
    assert td["reward"].flatten().tolist() == [1, 0, 1, 0]
    assert td["done"].all()
    held_out = UpperEnv(num_envs=4, shuffle=False, split="test")
    assert not set(queries(env)) & set(queries(held_out))


def test_reward_and_limit_can_be_left_out(answer):
    env = UpperEnv(compute_reward=False, max_steps=None)
    td = env.step(answer(env.reset(), "x"))["next"]
    assert "reward" not in td.keys()
    assert not td["done"].any()


def test_a_task_without_data_or_reward_says_so():
    with pytest.raises(ConfigError, match="no data of its own"):
        TaskEnv()
    with pytest.raises(ConfigError, match="no reward"):
        TaskEnv(dataset=ROWS)
    with pytest.raises(ConfigError, match="not both"):
        TaskEnv(dataset=ROWS, data_files="rows.jsonl")
    TaskEnv(dataset=ROWS, compute_reward=False)


def test_a_resumed_environment_continues_exactly(answer):
    env = UpperEnv(num_envs=3, repeats=2, seed=0)
    env.append_transform(PolicyVersion(int))
    env.reset()
    state = pickle.loads(pickle.dumps(env.state_dict()))
    resumed = UpperEnv(num_envs=3, repeats=2, seed=5).append_transform(PolicyVersion(int))
    resumed.load_state_dict(state)
    for _ in range(5):
        a, b = env.reset(), resumed.reset()
        assert list(a["query"]) == list(b["query"])
        for key in ("group_id", "traj_id", "policy_version"):
            assert a[key].tolist() == b[key].tolist()


@pytest.mark.parametrize("started", [False, True])
def test_a_pickled_environment_draws_the_same_rows_under_ids_of_its_own(started):
    env = DatasetChatEnv(dataset=ROWS, num_envs=2, seed=0)
    if started:
        env.reset()
    copy = pickle.loads(pickle.dumps(env))
    for _ in range(4):
        td, again = env.reset(), copy.reset()
        assert list(td["query"]) == list(again["query"])
        assert not set(td["group_id"].tolist()) & set(again["group_id"].tolist())

"""LLMEnv: text or ids that grow by what the policy writes."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.envs.utils import check_env_specs, step_mdp

from torchrl_llm.data.column import Column
from torchrl_llm.envs import LLMEnv
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.errors import ConfigError, DataError


def texts(*items):
    return TensorDict({"text": Column.of(items)}, batch_size=[len(items)])


def ids(rows):
    tokens = torch.tensor(rows)
    return TensorDict({"tokens": tokens, "attention_mask": torch.ones_like(tokens)}, [len(rows)])


def theirs(**kwargs):
    from torchrl.envs.llm import LLMEnv as Theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Theirs(**kwargs)


def test_text_grows_turn_by_turn():
    env = LLMEnv(batch_size=2)
    td = env.reset(texts("a", "b"))
    for more in ("c", "d"):
        td["text_response"] = Column.of([more, more + more])
        td = step_mdp(env.step(td))
    assert list(td["text"]) == ["acd", "bccdd"]
    assert not td["done"].any()


def test_one_row_without_a_batch():
    env = LLMEnv()
    td = env.reset(TensorDict({"text": NonTensorData("Hello")}))
    td["text_response"] = NonTensorData(" you")
    assert env.step(td)["next", "text"] == "Hello you"


def test_ids_grow_with_their_mask_as_in_torchrl():
    arguments = {
        "from_text": False,
        "batch_size": (2,),
        "assign_reward": True,
        "assign_done": True,
        "eos_token_id": 9,
    }
    results = []
    for env in (LLMEnv(**arguments), theirs(**arguments)):
        td = ids([[1, 2], [3, 4]])
        td["tokens_response"] = torch.tensor([[5, 9], [6, 7]])
        results.append(env._step(td))
    ours, other = results
    for key in ("tokens", "attention_mask", "done", "terminated"):
        assert torch.equal(ours[key], other[key])
    assert ours["tokens"].tolist() == [[1, 2, 5, 9], [3, 4, 6, 7]]
    assert ours["attention_mask"].tolist() == [[1] * 4] * 2
    assert ours["done"].tolist() == [[True], [False]]
    assert ours["tokens_data", "done"].tolist() == [[False, True], [False, False]]
    assert ours["reward"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_nested_ids_of_several_lengths_grow_each_by_its_own():
    env = LLMEnv(from_text=False, batch_size=2, eos_token_id=7)
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])])
    td = TensorDict({"tokens": nested}, [2])
    td["tokens_response"] = torch.nested.nested_tensor([torch.tensor([4, 5]), torch.tensor([7])])
    after = env._step(td)
    assert [row.tolist() for row in after["tokens"].unbind(0)] == [[1, 4, 5], [2, 3, 7]]
    assert after["done"].tolist() == [[False], [True]]


def test_text_ends_where_the_ids_of_the_action_hold_the_end_of_sequence():
    env = LLMEnv(batch_size=2, eos_token_id=9)
    td = env.reset(texts("a", "b"))
    td["text_response"] = Column.of(["x", "y"])
    td["tokens_response"] = torch.tensor([[1, 9], [2, 3]])
    assert env.step(td)["next", "done"].tolist() == [[True], [False]]
    del td["tokens_response"]
    with pytest.raises(DataError, match="eos_token_id is looked for in 'tokens_response'"):
        env.step(td.exclude("next"))


def test_rows_that_are_not_stepped_keep_their_text():
    env = LLMEnv(batch_size=2)
    td = env.reset(texts("a", "b"))
    td["text_response"] = Column.of(["x", "y"])
    td["_step"] = torch.tensor([True, False])
    assert list(env.step(td)["next", "text"]) == ["ax", "b"]


def test_a_loader_starts_rows_repeats_them_and_other_columns_come_along():
    rows = [{"text": "a", "answer": "1"}, {"text": "b", "answer": "2"}]
    env = LLMEnv.from_dataloader(rows, repeats=2, batch_size=2)
    env = env.append_transform(StepCounter(max_steps=2))
    td = env.reset()
    assert list(td["text"]) == ["a", "a", "b", "b"]
    assert list(td["answer"]) == ["1", "1", "2", "2"]
    rollout = env.rollout(
        4,
        lambda td: td.set("text_response", Column.of(["x"] * 4)),
        break_when_any_done=False,
    )
    assert [rollout[row, 1]["next", "text"] for row in range(4)] == ["axx", "axx", "bxx", "bxx"]
    assert rollout["next", "done"].squeeze(-1)[0].tolist() == [False, True, False, True]


def test_a_tokenizer_writes_the_ids_of_the_texts(tokenizer):
    env = LLMEnv.from_dataloader([{"text": "12 + 34"}], tokenizer=tokenizer)
    td = env.reset()
    assert tokenizer.decode(td["tokens"][0]) == "12 + 34"
    td["text_response"] = Column.of([" = 46"])
    assert tokenizer.decode(env.step(td)["next", "tokens"][0]) == "12 + 34 = 46"


def test_specs_are_kept():
    check_env_specs(LLMEnv.from_dataloader([{"text": "a"}], batch_size=2))


def test_impossible_settings_and_wrong_types_are_refused():
    for name in ("assign_reward", "assign_done"):
        with pytest.raises(ConfigError, match="from_text=False"):
            LLMEnv(**{name: True})
    with pytest.raises(ConfigError, match=r"must be \(\) or \(B,\)"):
        LLMEnv(batch_size=(2, 3))
    with pytest.raises(ConfigError, match="a tokenizer reads texts"):
        LLMEnv.from_dataloader([{"tokens": [1]}], tokenizer=object(), from_text=False)
    for start in (None, TensorDict(batch_size=[2])):
        with pytest.raises(ConfigError, match="reset needs 'text'"):
            LLMEnv(batch_size=2).reset(start)
    env = LLMEnv(batch_size=2)
    td = env.reset(texts("a", "b"))
    with pytest.raises(DataError, match="did not write 'text_response'"):
        env.step(td)
    with pytest.raises(DataError, match="got str and int"):
        env.step(td.set("text_response", Column.of([1, 2])))
    env = LLMEnv(batch_size=1, from_text=False)
    with pytest.raises(DataError, match="must be token ids"):
        env.step(ids([[1]]).set("tokens_response", Column.of(["a"])))

"""DataLoadingPrimer: rows into resets, in groups, from a position that can be saved."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import DataLoader
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs import ChatEnv, DatasetChatEnv
from torchrl_llm.envs.transforms import (
    DataLoadingPrimer,
    RayDataLoadingPrimer,
    as_nested_tensor,
    as_padded_tensor,
)
from torchrl_llm.errors import ConfigError, DataError

ROWS = [{"query": letter, "answer": letter.upper()} for letter in "abcde"]


def make_env(loader, size=3, **kwargs):
    return ChatEnv(batch_size=(size,)).append_transform(DataLoadingPrimer(loader, **kwargs))


def drawn(env, resets=1):
    return [query for _ in range(resets) for query in env.reset()["query"]]


def test_rows_come_in_order_and_start_over_at_the_end():
    env = make_env(ROWS)
    assert drawn(env, 3) == list("abcdeabcd")
    td = env.reset()
    assert list(td["query"]) == list("eab")
    assert list(td["answer"]) == list("EAB")
    assert td["history"].prompt.content == [["e"], ["a"], ["b"]]


def test_a_service_is_a_primer_whose_rows_come_from_an_actor(monkeypatch):
    asked = []
    module = "torchrl_llm.envs.transforms.ray_dataloading.RayDataLoadingPrimer.__init__"
    monkeypatch.setattr(module, lambda self, *args, **kwargs: asked.append(kwargs))
    for arguments in ({"use_ray_service": True}, {"service_backend": "ray", "num_gpus": 1}):
        assert type(DataLoadingPrimer(ROWS, **arguments)) is RayDataLoadingPrimer
        assert asked.pop() == arguments
    assert type(DataLoadingPrimer(ROWS, service_backend="direct")) is DataLoadingPrimer
    with pytest.raises(ConfigError, match="service_backend_options must be empty"):
        DataLoadingPrimer(ROWS, service_backend_options={"num_cpus": 1})


def test_the_batch_of_the_environment_cuts_no_row_in_pieces():
    # TorchRL's batch_size: characters are no rows, and a loader that has none gives single rows
    assert drawn(make_env([{"query": "abc", "answer": "xyz"}], 1, batch_size=1)) == ["abc"]

    class Single(list):
        batch_size = 0

    rows = Single([{"query": "ab", "ids": torch.arange(3)}])
    assert make_env(rows, 2, batch_size=(2,)).reset()["ids"].tolist() == [[0, 1, 2]] * 2


def test_the_primer_answers_for_its_loader():
    loader = DataLoader(ROWS, batch_size=2)
    primer = DataLoadingPrimer(loader, repeats=3, group_repeats=True)
    assert (primer.dataloader, primer.batch_size) == (loader, (6,))
    assert DataLoadingPrimer(ROWS).batch_size == ()
    env = ChatEnv(batch_size=(6,)).append_transform(primer)
    assert env.transform.primers["answer"].shape == (6, -1)


def test_repeats_follow_each_other_under_one_group_id():
    env = make_env(ROWS, repeats=2, worker_id=0)
    first, second = env.reset(), env.reset()
    assert list(first["query"]) + list(second["query"]) == list("aabbcc")
    assert first["group_id"].tolist() + second["group_id"].tolist() == [0, 0, 1, 1, 2, 2]


def test_group_ids_are_new_in_every_epoch():
    env = make_env(ROWS, size=5)
    ids = [i for _ in range(3) for i in env.reset()["group_id"].tolist()]
    assert len(set(ids)) == 15


def test_equal_prompts_of_different_rows_are_different_groups():
    env = make_env([{"query": "same"}] * 2, size=4, repeats=2, worker_id=0)
    assert env.reset()["group_id"].tolist() == [0, 0, 1, 1]


def test_a_partial_reset_draws_rows_only_for_its_mask(answer):
    env = make_env(ROWS, worker_id=0)
    td = answer(env.reset(), "1", "2", "3")
    _, td = env.step_and_maybe_reset(td)
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = env.reset(td)
    assert list(td["query"]) == ["a", "d", "c"]
    assert list(td["answer"]) == ["A", "D", "C"]
    assert td["group_id"].tolist() == [0, 3, 2]
    assert drawn(env) == ["e", "a", "b"]


def test_data_travels_to_the_next_step(answer):
    env = make_env(ROWS)
    td = env.step(answer(env.reset(), "1", "2", "3"))
    assert list(td["next", "answer"]) == list("ABC")
    assert td["next", "group_id"].tolist() == td["group_id"].tolist()


def test_data_loaders_give_batches_of_columns():
    env = make_env(DataLoader(ROWS, batch_size=2))
    assert drawn(env, 2) == list("abcdea")


def test_data_loaders_without_batches_give_rows():
    env = make_env(DataLoader(ROWS, batch_size=None))
    assert drawn(env) == list("abc")


def test_the_batch_size_of_other_loaders_is_an_argument():
    batches = [{"query": ["a", "b"]}, {"query": ["c", "d"]}]
    assert drawn(make_env(batches, batch_size=2)) == list("abc")
    assert drawn(make_env(batches, batch_size=torch.Size([2]))) == list("abc")
    env = make_env([{"query": ["a"], "answer": ["b", "c"]}], batch_size=1)
    with pytest.raises(DataError, match="one length"):
        env.reset()


def test_tensordicts_say_their_batch_size_themselves():
    batch = TensorDict(query=NonTensorStack("a", "b"), number=torch.arange(2), batch_size=[2])
    env = make_env([batch])
    td = env.reset()
    assert list(td["query"]) == ["a", "b", "a"]
    assert td["number"].tolist() == [0, 1, 0]
    env = make_env([TensorDict(query="a"), TensorDict(query="b")])
    assert drawn(env) == ["a", "b", "a"]


def test_tensors_are_stacked_and_declared():
    rows = [{"query": "a", "x": torch.ones(2)}, {"query": "b", "x": torch.zeros(2)}]
    env = make_env(rows)
    assert env.reset()["x"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert env.observation_spec["x"].shape == (3, 2)


def test_tensors_of_different_lengths_need_a_stack_method():
    rows = [{"query": "a", "x": torch.ones(1)}, {"query": "b", "x": torch.ones(2)}]
    with pytest.raises(DataError, match="stack_method"):
        make_env(rows).reset()
    for method in (as_padded_tensor, "as_padded_tensor"):
        env = make_env(rows, stack_method=method)
        assert env.reset()["x"].tolist() == [[0, 1], [1, 1], [0, 1]]
    env = make_env(rows, size=2, stack_method="as_nested_tensor")
    assert [row.tolist() for row in env.reset()["x"].unbind()] == [[1], [1, 1]]
    nested = as_nested_tensor([TensorDict(x=row["x"]) for row in rows])
    assert [row.tolist() for row in nested["x"].unbind()] == [[1], [1, 1]]


def test_padding_is_on_the_left_of_the_given_dimension_as_in_torchrl():
    rows = [TensorDict(a=torch.ones(2, 1), n=TensorDict(b=torch.tensor(3)), q="x")]
    rows += [TensorDict(a=torch.full((2, 2), 2.0), n=TensorDict(b=torch.tensor(4)), q="y")]
    padded = as_padded_tensor(rows, dim=1)
    assert padded["a"].tolist() == [[[0, 1], [0, 1]], [[2, 2], [2, 2]]]
    assert padded["n", "b"].tolist() == [3, 4]
    assert list(padded["q"]) == ["x", "y"]
    with pytest.raises(DataError, match="one dimension"):
        as_padded_tensor(rows)
    with pytest.raises(ConfigError, match="stack_dim"):
        as_padded_tensor(rows, dim=1, stack_dim=1)
    with pytest.raises(DataError, match="unbind"):
        as_padded_tensor([TensorDict(a=torch.ones(2), batch_size=[2])])


def test_explicit_primers_choose_the_columns():
    spec = Composite(query=ColumnSpec((3, -1), example_data="q"), shape=(3,))
    td = make_env(ROWS, primers=spec).reset()
    assert "answer" not in td.keys()
    flat = Composite(number=Unbounded(shape=(), dtype=torch.int64))
    rows = [{"query": "q", "number": torch.tensor(4)}]
    primer = DataLoadingPrimer(rows, primers=flat)
    env = ChatEnv(batch_size=(3,)).append_transform(primer)
    assert env.observation_spec["number"].shape == (3,)


def test_a_factory_is_called_when_data_is_needed():
    calls = []

    def factory():
        calls.append(1)
        return ROWS

    primer = DataLoadingPrimer(dataloader_factory=factory, repeats=2)
    assert not calls
    env = ChatEnv(batch_size=(2,)).append_transform(primer)
    assert drawn(env, 2) == list("aabb")
    assert len(calls) == 1


def test_defect_29_group_repeats_works_with_several_environments():
    env = make_env(ROWS, size=4, repeats=2, group_repeats=True, worker_id=0)
    assert env.reset()["group_id"].tolist() == [0, 0, 1, 1]
    assert env.rollout(2, break_when_any_done=False).shape == (4, 2)


def test_group_repeats_refuses_a_batch_that_cannot_hold_whole_groups():
    with pytest.raises(ConfigError, match=r"multiple of repeats=3, got 4"):
        make_env(ROWS, size=4, repeats=3, group_repeats=True).reset()
    with pytest.raises(ConfigError, match=r"multiple of repeats=3, got 4"):
        DatasetChatEnv(dataset=ROWS, num_envs=4, repeats=3, group_repeats=True)


def test_impossible_arguments_are_refused():
    with pytest.raises(ConfigError, match="exactly one"):
        DataLoadingPrimer()
    with pytest.raises(ConfigError, match="exactly one"):
        DataLoadingPrimer(ROWS, dataloader_factory=lambda: ROWS)
    with pytest.raises(ConfigError, match="repeats"):
        DataLoadingPrimer(ROWS, repeats=0)


@pytest.mark.parametrize("loader", [[], iter(())])
def test_an_empty_loader_is_refused(loader):
    with pytest.raises(DataError, match="no rows"):
        make_env(loader).reset()


def test_an_iterator_that_ends_says_that_it_cannot_start_over():
    env = make_env(iter(ROWS))
    env.reset()
    with pytest.raises(DataError, match="second epoch"):
        env.reset()


def test_a_row_of_the_wrong_kind_or_without_a_column_is_refused():
    with pytest.raises(DataError, match="dicts or tensordicts, got int"):
        make_env([1, 2]).reset()
    with pytest.raises(DataError, match="lacks 'answer'"):
        make_env([{"query": "a", "answer": "b"}, {"query": "c"}]).reset()


def test_reset_dataloader_starts_over():
    env = make_env(RowLoader(ROWS, seed=0), repeats=2)
    first = drawn(env, 3)
    env.transform.reset_dataloader()
    assert drawn(env, 3) == first
    env.transform.reset_dataloader(seed=1)
    assert drawn(env, 3) != first


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: RowLoader(ROWS, seed=0),
        lambda: RowLoader(
            ROWS,
            seed=0,
            batch_size=2,
            collate_fn=lambda rows: {"query": [row["query"] for row in rows]},
        ),
        lambda: ROWS,
        lambda: DataLoader(ROWS, batch_size=2),
    ],
    ids=["rows", "collated", "list", "DataLoader"],
)
@pytest.mark.parametrize("resets", range(7))
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(make_loader, resets):
    # 4 rows of 3 repeats a reset: the position is in the middle of a group at most resets
    env = make_env(make_loader(), size=4, repeats=3)
    drawn(env, resets)
    state = pickle.loads(pickle.dumps(env.state_dict()))
    expected = [env.reset() for _ in range(6)]
    resumed = make_env(make_loader(), size=4, repeats=3)
    resumed.load_state_dict(state)
    for td in expected:
        again = resumed.reset()
        assert list(again["query"]) == list(td["query"])
        assert again["group_id"].tolist() == td["group_id"].tolist()


def test_taking_the_state_changes_nothing():
    env, other = (make_env(RowLoader(ROWS, seed=0), repeats=2) for _ in range(2))
    seen = []
    for _ in range(6):
        env.state_dict()
        seen += drawn(env)
    assert seen == drawn(other, 6)


@pytest.mark.parametrize("kind", [list, tuple])
def test_batches_of_columns_are_read_as_rows_where_nobody_says_their_size(kind):
    batches = kind([{"query": ["a", "b"], "answer": ["A", "B"]}, {"query": ["c"], "answer": ["C"]}])
    env = make_env(batches, size=2)
    assert drawn(env, 2) == ["a", "b", "c", "a"]
    env = make_env([{"query": ["a", "b"], "number": torch.tensor([1, 2])}], size=3)
    assert env.reset()["number"].tolist() == [1, 2, 1]


def test_conversations_are_rows_alone_and_columns_in_lists_of_them():
    asked = [[{"role": "user", "content": text}] for text in "ab"]
    env = make_env([{"query": asked}], size=2)
    assert env.reset()["history"].prompt.content == [["a"], ["b"]]
    env = make_env([{"query": chat, "tags": ["one"]} for chat in asked], size=2)
    assert env.reset()["history"].prompt.content == [["a"], ["b"]]


def test_an_element_that_may_be_one_row_is_one():
    loader = [{"query": [{"role": "user", "content": "a"}], "number": 3}]
    assert list(make_env(loader, size=1).reset()["number"]) == [3]
    uneven = [{"query": "a", "tags": ["x", "y"], "ids": torch.arange(2)}]
    assert make_env(uneven, size=1).reset()["ids"].tolist() == [[0, 1]]

"""Batches of environments split into rows."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_llm.data import ChatHistory, Column, History, Text, Tokens
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.rollouts import row_list, sampled_tokens, split_batch, split_rollout


def _step(offset: int) -> TensorDict:
    """Two rows as an environment holds them: dense root, lazy tokens, columns, typed views."""
    chats = [[{"role": "user", "content": f"{offset}{row}"}] for row in "ab"]
    history = TensorDict({"prompt": History.from_chats(chats)}, batch_size=[2])
    tokens = ragged_rows({"prompt": [torch.arange(offset + 1), torch.arange(offset + 2)]})
    return TensorDict(
        {
            "history": ChatHistory._from_tensordict(history),
            "tokens": Tokens._from_tensordict(tokens),
            "query": Column.of([f"q{offset}", f"r{offset}"]),
            "same": NonTensorData("x", batch_size=[2]),
            "turn": torch.tensor([offset, offset + 10]),
            "next": TensorDict({"done": torch.tensor([[False], [True]])}, batch_size=[2]),
        },
        batch_size=[2],
    )


def test_a_step_splits_into_plain_rows():
    first, second = split_batch(_step(3))

    assert second["tokens", "prompt"].tolist() == [0, 1, 2, 3, 4]
    assert type(second["tokens"]) is TensorDict
    assert second["history", "prompt"].content == ["3b"]
    assert isinstance(second["history"], ChatHistory)
    assert second["query"] == "r3"
    assert first["same"] == "x"
    assert second["next", "done"].item() is True
    assert second["turn"].item() == 13


def test_rows_keep_no_large_batch_alive_and_share_nothing_with_it():
    step = _step(0)
    step["frame"] = torch.arange(20_000).view(2, -1)
    row = split_batch(step)[0]
    assert row["frame"].untyped_storage().nbytes() == 80_000

    step["turn"].add_(5)  # an environment that writes in place
    row["tokens", "extra"] = torch.ones(1)
    row["history"].full = row["history"].prompt
    assert row["turn"].item() == 0
    assert ("tokens", "extra") not in step.keys(True)
    assert step["history"].full is None


def test_a_rollout_splits_trajectory_by_trajectory():
    rollout = lazy_stack([_step(0), _step(1), _step(2)], -1)
    rows = split_rollout(rollout)

    assert rows.batch_size == (6,)
    assert [row["turn"].item() for row in rows.unbind(0)] == [0, 1, 2, 10, 11, 12]
    assert [row["query"] for row in rows.unbind(0)] == ["q0", "q1", "q2", "r0", "r1", "r2"]


def test_lazy_and_dense_rollouts_of_any_batch_follow_reshape():
    dense = TensorDict({"x": torch.arange(24).view(2, 3, 4)}, batch_size=[2, 3, 4])
    lazy_first = lazy_stack(list(dense.unbind(0)), 0)
    lazy_middle = lazy_stack(list(dense.unbind(1)), 1)
    lazy_last = lazy_stack(list(dense.unbind(2)), 2)

    for rollout in (dense, lazy_first, lazy_middle, lazy_last):
        assert [row["x"].item() for row in split_rollout(rollout).unbind(0)] == list(range(24))


def test_rows_that_are_split_already_are_split_again_without_harm():
    rows = split_rollout(_step(0))
    again = split_rollout(rows)

    assert again[1]["history", "prompt"].content == ["0b"]
    assert row_list(rows)[0] is rows.tensordicts[0]


def test_text_keeps_its_class_and_its_objects():
    text = TensorDict({"prompt": Column.of(["a", "b"])}, batch_size=[2])
    row = split_batch(TensorDict({"text": Text._from_tensordict(text)}, batch_size=[2]))[1]

    assert isinstance(row["text"], Text)
    assert row["text"].prompt == "b"


def test_without_a_batch_there_is_nothing_to_split():
    with pytest.raises(ValueError, match="batch"):
        split_rollout(TensorDict({"x": torch.ones(1)}))
    with pytest.raises(ValueError, match="one batch dimension"):
        split_batch(TensorDict(batch_size=[1, 1]))


def test_sampled_tokens_are_those_of_the_response():
    response = torch.arange(3)
    assert sampled_tokens(TensorDict({"tokens": {"response": response}})) == 3
    # sources of five tokens: a sampled one of an earlier turn, a template, then the response
    source = torch.tensor([3, 0, 3, 2, 3], dtype=torch.int8)
    row = TensorDict({"tokens": {"response": response}, "trace": {"source": source}})
    assert sampled_tokens(row) == 2
    assert sampled_tokens(TensorDict({"x": response})) == 0

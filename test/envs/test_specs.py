"""Specs with a dynamic last dimension."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict
from torchrl.data import Composite

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec


def test_a_column_spec_makes_and_recognises_columns():
    spec = ColumnSpec((3, -1), example_data="hey")
    for value in (spec.zero(), spec.rand(), spec.one()):
        assert value.tolist() == ["hey"] * 3
        assert spec.is_in(value)
    assert spec.is_in(NonTensorStack("a", "b", "c"))
    assert not spec.is_in(Column.of(["a", "b"]))
    assert not spec.is_in(torch.zeros(3))
    assert spec.rand((2,)).batch_size == (2, 3)


def test_a_column_spec_survives_what_torchrl_does_with_specs():
    spec = Composite(a=ColumnSpec((3, -1), example_data="hey"), shape=(3,))
    for copy in (spec.clone(), spec.to("cpu"), spec.expand(3)):
        assert isinstance(copy["a"], ColumnSpec)
        assert copy["a"].shape == (3, -1)
        assert copy.zero()["a"] == ["hey"] * 3


def test_a_ragged_spec_makes_one_token_a_row_and_takes_rows_of_any_length():
    spec = RaggedSpec({"prompt": torch.int64}, shape=(2,))
    zero = spec.zero()
    assert isinstance(zero, LazyStackedTensorDict)
    assert [row.tolist() for row in read_rows(zero, "prompt")] == [[0], [0]]
    assert spec.is_in(ragged_rows({"prompt": [torch.arange(3), torch.arange(0)]}))
    assert spec.is_in(TensorDict(prompt=torch.zeros(2, 5, dtype=torch.int64), batch_size=[2]))
    assert not spec.is_in(ragged_rows({"prompt": [torch.zeros(1), torch.zeros(1)]}))
    assert not spec.is_in(ragged_rows({"other": [torch.arange(3), torch.arange(0)]}))


def test_a_ragged_spec_inside_a_composite_stays_ragged():
    spec = Composite(tokens=RaggedSpec({"full": torch.int64}, shape=(2,)), shape=(2,)).clone()
    assert isinstance(spec["tokens"], RaggedSpec)
    assert isinstance(spec.zero()["tokens"], LazyStackedTensorDict)
    assert spec["tokens", "full"].shape == (2, -1)

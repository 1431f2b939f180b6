"""Flat buffers, planned alike on both ends."""

from __future__ import annotations

import pytest
import torch
from torchrl_llm.weights.broadcast_source import (
    flatten,
    metadata_from_json,
    metadata_to_json,
    plan_buckets,
    split,
)

from torchrl_llm.errors import ConfigError

WEIGHTS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.arange(4.0),
    "half": torch.arange(3).bfloat16(),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 5),
    "turned": torch.arange(6.0).view(2, 3).T,
}
METADATA = {name: (value.dtype, value.shape) for name, value in WEIGHTS.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 16, 40, 1 << 20])
def test_what_is_flattened_is_split_again(bucket_bytes):
    found = {}
    for bucket in plan_buckets(METADATA, bucket_bytes):
        buffer = flatten(bucket, WEIGHTS, torch.device("cpu"))
        assert buffer.shape == (bucket.numel,)
        found.update(split(bucket, buffer))
    assert set(found) == set(WEIGHTS)
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())


def test_a_buffer_holds_one_dtype_and_no_more_bytes_than_allowed():
    buckets = plan_buckets(METADATA, 40)
    # By dtype, then name: bfloat16 half (6 bytes) | float32 a (16) b (24) = 40 |
    # empty (0) scalar (4) turned (24) = 28.
    names = [[piece.name for piece in bucket.pieces] for bucket in buckets]
    assert names == [["half"], ["a", "b", "empty"], ["scalar", "turned"]]
    assert [bucket.numel * bucket.dtype.itemsize for bucket in buckets] == [6, 40, 28]


def test_a_tensor_larger_than_a_buffer_has_one_of_its_own_and_is_not_copied():
    big = torch.zeros(100)
    weights = {"big": big, "small": torch.ones(1)}
    metadata = {name: (value.dtype, value.shape) for name, value in weights.items()}
    first, second = plan_buckets(metadata, 8)
    assert flatten(first, weights, torch.device("cpu")).data_ptr() == big.data_ptr()
    assert [piece.name for piece in second.pieces] == ["small"]


def test_a_buffer_may_be_bounded_by_its_tensors():
    sizes = [len(bucket.pieces) for bucket in plan_buckets(METADATA, 1 << 20, 2)]
    assert sizes == [1, 2, 2, 1]


def test_the_plan_does_not_depend_on_the_order_of_the_weights():
    turned = dict(reversed(METADATA.items()))
    assert plan_buckets(turned, 40) == plan_buckets(METADATA, 40)


def test_metadata_survive_text_and_have_a_name_of_their_own():
    text, name = metadata_to_json(METADATA)
    assert metadata_from_json(text) == METADATA
    assert metadata_to_json(dict(reversed(METADATA.items()))) == (text, name)
    changed = {**METADATA, "a": (torch.float16, torch.Size([4]))}
    assert metadata_to_json(changed)[1] != name


def test_bounds_below_one_are_refused():
    with pytest.raises(ConfigError, match="bucket_bytes"):
        plan_buckets(METADATA, 0)
    with pytest.raises(ConfigError, match="bucket_tensors"):
        plan_buckets(METADATA, 1, -1)

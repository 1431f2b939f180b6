"""Balanced groups out of a replay buffer."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
)

from torchrl_llm import data
from torchrl_llm.data.nodes import cell
from torchrl_llm.data.replay_buffers import PromptGroupSampler, ReplayBuffer
from torchrl_llm.errors import ConfigError, DataError


def _row(group, number=0, reward=0.0, **keys):
    made = TensorDict(
        {
            "number": torch.tensor(number),
            "next": TensorDict({"reward": torch.as_tensor(reward).reshape(-1, 1)}),
        }
    )
    if isinstance(group, str):
        made["query"] = cell(group)
    else:
        made["group_id"] = torch.tensor(group)
    for key, value in keys.items():
        made[key] = value
    return made


def _rows(groups=3, size=4):
    return [_row(i // size, i, float(i % size)) for i in range(groups * size)]


def _buffer(rows, batch_size=4, max_size=100, seed=0, **options):
    buffer = ReplayBuffer(
        storage=LazyStackStorage(max_size),
        sampler=PromptGroupSampler(**options),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    buffer.extend(rows)
    return buffer


def _numbers(buffer):
    return [r["number"].item() for r in buffer.sample().unbind(0)]


def test_it_is_found_where_torchrls_users_look():
    assert data.PromptGroupSampler is PromptGroupSampler


@pytest.mark.parametrize("options", [{"num_groups": 2}, {"samples_per_group": 3}])
def test_a_batch_is_balanced_groups_one_after_the_other(options):
    buffer = _buffer(_rows(), batch_size=6, **options)
    for _ in range(20):
        numbers = _numbers(buffer)
        groups = [n // 4 for n in numbers]
        assert groups[:3] == [groups[0]] * 3 != groups[3:] == [groups[3]] * 3
        assert len(set(numbers)) == 6


def test_every_row_of_every_group_is_drawn_in_the_long_run():
    buffer = _buffer(_rows(), batch_size=2, num_groups=1)
    counts = Counter(n for _ in range(600) for n in _numbers(buffer))
    # 1200 draws over 12 rows: 100 each, deviation about 10
    assert len(counts) == 12
    assert max(abs(count - 100) for count in counts.values()) < 45


def test_a_seed_repeats_the_batches():
    one, two = (_buffer(_rows(), num_groups=2, seed=5) for _ in range(2))
    assert [_numbers(one) for _ in range(5)] == [_numbers(two) for _ in range(5)]


def test_the_last_written_of_a_group_by_hand():
    buffer = _buffer(_rows(groups=1), batch_size=2, num_groups=1, strategy="recency")
    assert _numbers(buffer) == [3, 2]
    buffer.extend([_row(0, 20)])
    assert _numbers(buffer) == [20, 3]


def test_a_place_that_is_written_again_is_recent_and_of_its_new_group():
    buffer = _buffer(_rows(groups=2), batch_size=2, max_size=8, num_groups=1, strategy="recency")
    buffer.extend([_row(0, 20), _row(7, 21), _row(7, 22), _row(7, 23)])  # over rows 0 to 3
    seen = {tuple(_numbers(buffer)) for _ in range(40)}
    assert seen == {(20, 20), (23, 22), (7, 6)}


def test_the_best_of_a_group_by_hand():
    rows = [_row(0, i, r) for i, r in enumerate((1.0, 5.0, float("nan"), 3.0, float("inf")))]
    assert _numbers(_buffer(rows, 2, num_groups=1, strategy="reward")) == [1, 3]


def test_rewards_per_token_are_added_up():
    rows = [_row(0, 0, [3.0]), _row(0, 1, [2.0, 2.0]), _row(0, 2, [0.0, 0.0, 1.0])]
    assert _numbers(_buffer(rows, 2, num_groups=1, strategy="reward")) == [1, 0]


def test_the_widest_choice_of_a_group_by_hand():
    # of 0 1 4 5: {0, 5} has variance 6.25, more than {0, 4} or {1, 5} with 4
    rows = [_row(0, i, r) for i, r in enumerate((1.0, 5.0, 0.0, 4.0))]
    assert set(_numbers(_buffer(rows, 2, num_groups=1, strategy="variance"))) == {1, 2}


def test_of_choices_as_wide_the_one_with_higher_rewards():
    # two of 0 0 1 with one more: {0, 0, 1} and {0, 1, 1} have variance 2/9
    rows = [_row(0, i, r) for i, r in enumerate((0.0, 0.0, 1.0, 1.0))]
    numbers = _numbers(_buffer(rows, 3, num_groups=1, strategy="variance"))
    assert sorted(rows[n]["next", "reward"].item() for n in numbers) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_widest_choice_agrees_with_all_choices(size):
    from itertools import combinations
    from statistics import pvariance

    rewards = torch.randn(8, generator=torch.Generator().manual_seed(size)).tolist()
    rows = [_row(0, i, r) for i, r in enumerate(rewards)]
    numbers = _numbers(_buffer(rows, size, num_groups=1, strategy="variance"))
    best = max(pvariance(choice) for choice in combinations(rewards, size))
    assert pvariance([rewards[n] for n in numbers]) == pytest.approx(best, rel=1e-5)


def test_short_groups_are_completed_with_one_warning(warned):
    for strategy in ("random", "recency", "reward", "variance"):
        buffer = _buffer(_rows(1, 2), 5, num_groups=1, strategy=strategy)
        assert set(_numbers(buffer)) == {0, 1}
        _numbers(buffer)
    assert len(_numbers(_buffer(_rows(2, 2), 6, num_groups=3))) == 6
    assert sum("drawn again" in text for text in warned) == 5


def test_groups_are_told_apart_by_id_else_by_query_else_by_name():
    rows = [_row(text, i) for i, text in enumerate("abab")]
    assert set(_numbers(_buffer(rows, 2, num_groups=1))) in ({0, 2}, {1, 3})
    rows = [_row(0, i, topic=cell("xy"[i % 2])) for i in range(4)]
    assert set(_numbers(_buffer(rows, 2, num_groups=1, group_key="topic"))) in ({0, 2}, {1, 3})
    with pytest.raises(DataError, match="group_key"):
        _numbers(_buffer([TensorDict(number=torch.tensor(0))], 1, num_groups=1))


def test_agents_are_groups_of_their_own():
    rows = [_row(0, i, agent=cell("xo"[i % 2])) for i in range(4)]
    assert set(_numbers(_buffer(rows, 2, num_groups=1))) in ({0, 2}, {1, 3})


def test_rows_of_one_shape_may_lie_in_a_tensor_storage():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PromptGroupSampler(num_groups=2), batch_size=4
    )
    buffer.extend(_rows(3, 2))
    groups = buffer.sample()["group_id"].tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_rows_changed_in_place_are_read_again_when_asked_to():
    for options, fresh in (({}, False), ({"cache_groups": False}, True)):
        buffer = _buffer(_rows(1, 2), 1, num_groups=1, strategy="reward", **options)
        assert _numbers(buffer) == [1]
        buffer.storage.get(0)["next", "reward"] = torch.full((1, 1), 9.0)
        assert _numbers(buffer) == [0 if fresh else 1]


def test_an_emptied_buffer_forgets_its_groups():
    buffer = _buffer(_rows(), num_groups=2, strategy="recency")
    _numbers(buffer)
    buffer.empty()
    with pytest.raises(DataError, match="empty"):
        buffer.sample()
    buffer.extend([_row(50 + i % 2, 100 + i) for i in range(4)])
    assert min(_numbers(buffer)) >= 100


@pytest.mark.parametrize("strategy", ["random", "recency", "variance"])
def test_a_buffer_resumes_with_the_same_batches(strategy, tmp_path):
    buffer = _buffer(_rows(), max_size=10, num_groups=2, strategy=strategy)
    _numbers(buffer)
    buffer.dumps(tmp_path)
    other = _buffer([], max_size=10, seed=9, num_groups=2, strategy=strategy)
    other.loads(tmp_path)
    assert [_numbers(buffer) for _ in range(4)] == [_numbers(other) for _ in range(4)]


def test_the_sampler_has_files_of_its_own(tmp_path):
    buffer = _buffer(_rows(), num_groups=2, strategy="recency")
    buffer.sampler.dumps(tmp_path)
    other = PromptGroupSampler(num_groups=2, strategy="recency")
    other.loads(tmp_path)
    assert other.state_dict() == buffer.sampler.state_dict()


def test_it_takes_the_place_of_any_other_sampler():
    one = _buffer(_rows(1), 4, num_groups=1)
    other = ReplayBuffer(
        storage=LazyStackStorage(4), sampler=SamplerWithoutReplacement(), batch_size=4
    )
    other.extend(_rows(1))
    assert sorted(_numbers(one)) == sorted(_numbers(other)) == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"num_groups": 2, "samples_per_group": 2}])
def test_one_of_two_numbers_is_needed(options):
    with pytest.raises(ConfigError, match="give one of"):
        PromptGroupSampler(**options)


def test_a_batch_is_a_multiple_and_a_reward_is_there():
    with pytest.raises(ConfigError, match="num_groups=3"):
        _numbers(_buffer(_rows(), 4, num_groups=3))
    with pytest.raises(ConfigError, match="samples_per_group=3"):
        _numbers(_buffer(_rows(), 4, samples_per_group=3))
    rows = [made.exclude("next") for made in _rows()]
    with pytest.raises(DataError, match="reward"):
        _numbers(_buffer(rows, 4, num_groups=2, strategy="reward"))


def test_what_a_prioritized_sampler_needs_is_said_by_torchrl():
    with contextlib.suppress(ImportError):
        from torchrl._torchrl import SumSegmentTreeFp32  # noqa: F401

        pytest.skip("TorchRL was built from source")
    with pytest.raises(RuntimeError, match="SumSegmentTreeFp32 is not available"):
        PrioritizedSampler(10, 0.7, 0.9)

import math
import random

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.collectors.staleness import (
    Pacer,
    StalenessRule,
    age_histogram,
    age_metrics,
    sampled_versions,
)
from torchrl_llm.collectors.transport import WorkerCounts
from torchrl_llm.data import MaskReason, Source
from torchrl_llm.errors import DataError


def row(*versions, masked=()):
    """One prompt token, then a sampled token of each version; ``masked`` indices are truncated."""
    source = torch.tensor([0] + [int(Source.SAMPLED)] * len(versions), dtype=torch.int8)
    reason = torch.tensor([1] + [0] * len(versions), dtype=torch.int8)
    for index in masked:
        reason[index + 1] = int(MaskReason.TRUNCATED)
    version = torch.tensor([-1, *versions], dtype=torch.int32)
    trace = {"source": source, "mask_reason": reason, "policy_version": version}
    return TensorDict(trace=trace, next={"reward_valid": torch.tensor(True)})


def reasons(row):
    return row["trace", "mask_reason"].tolist()


def test_the_age_of_a_row_is_that_of_its_oldest_token():
    rule = StalenessRule(max_policy_age=2, on_stale="drop")
    assert rule.verdict(row(5, 4, 3), version=5) == "keep"
    assert rule.verdict(row(5, 4, 2), version=5) == "drop"


def test_weights_that_this_trainer_never_had_are_stale():
    rule = StalenessRule(max_policy_age=2, on_stale="drop")
    assert rule.verdict(row(5, 6), version=5) == "drop"


def test_a_row_that_sampled_nothing_is_never_stale():
    assert StalenessRule(max_policy_age=0).verdict(row(), version=9) == "keep"


def test_mask_takes_the_old_tokens_only_and_keeps_the_reward():
    rule, old = StalenessRule(max_policy_age=1, on_stale="mask"), row(1, 2, 3)
    assert rule.mark(old, version=3) == "mask"
    assert reasons(old) == [1, int(MaskReason.STALE), 0, 0]
    assert old["next", "reward_valid"].item()


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_drop_takes_the_whole_row_and_its_reward(on_stale):
    rule, old = StalenessRule(max_policy_age=1, on_stale=on_stale), row(1, 2, 3)
    assert rule.mark(old, version=3) == "drop"
    assert reasons(old) == [1] + [int(MaskReason.STALE)] * 3
    assert not old["next", "reward_valid"].item()


def test_a_row_without_a_flag_of_validity_gets_one():
    old = row(0)
    del old["next", "reward_valid"]
    StalenessRule(max_policy_age=0, on_stale="drop").mark(old, version=1)
    assert not old["next", "reward_valid"].item()


def test_a_token_that_was_masked_before_keeps_its_reason():
    old = row(1, 1, masked=[0])
    StalenessRule(max_policy_age=0, on_stale="mask").mark(old, version=2)
    assert reasons(old) == [1, int(MaskReason.TRUNCATED), int(MaskReason.STALE)]


def test_marking_leaves_the_tensors_of_the_row_alone():
    old = row(1)
    shared = old.clone(False)
    StalenessRule(max_policy_age=0, on_stale="drop").mark(shared, version=2)
    assert reasons(old) == [1, 0]
    assert old["next", "reward_valid"].item()


def test_a_fresh_row_is_not_touched():
    fresh = row(3)
    before = fresh["trace", "mask_reason"]
    assert StalenessRule(max_policy_age=0).mark(fresh, version=3) == "keep"
    assert fresh["trace", "mask_reason"] is before


def test_ages_count_trained_tokens_only():
    rows = [row(5, 5, 3), row(4, 4, masked=[0])]
    # ages at version 5: 0, 0, 2 and 1 (its other token is truncated)
    assert age_histogram(rows, 5) == {0: 2, 1: 1, 2: 1}
    metrics = age_metrics(age_histogram(rows, 5))
    assert metrics == {"train/policy_age_mean": 0.75, "train/policy_age_max": 2}


def test_nothing_trained_has_no_age():
    assert all(math.isnan(value) for value in age_metrics({}).values())


def test_a_token_of_unknown_version_is_an_error():
    with pytest.raises(DataError, match="no policy version"):
        sampled_versions(row(-1))
    with pytest.raises(DataError, match="trace"):
        sampled_versions(TensorDict({}))


def test_a_pacer_of_age_zero_grants_one_batch_a_version():
    pacer = Pacer(StalenessRule(max_policy_age=0), batch_rows=8)
    assert [pacer.grant(), pacer.grant()] == [8, 0]
    pacer.used(8)
    assert pacer.grant() == 8


def test_rows_thrown_away_are_granted_again():
    pacer = Pacer(StalenessRule(max_policy_age=0), batch_rows=8)
    pacer.grant()
    pacer.used(24)  # a step that was filled up with two more batches
    assert pacer.grant() == 8


def test_who_may_drop_runs_free():
    pacer = Pacer(StalenessRule(max_policy_age=0, on_stale="drop"), batch_rows=8)
    assert pacer.grant() > 1e9


def test_a_continued_trainer_counts_what_is_under_way():
    assert Pacer(StalenessRule(max_policy_age=1), batch_rows=8, outstanding=12).grant() == 4


def test_only_workers_that_are_still_at_old_rows_are_waited_for():
    pacer = Pacer(StalenessRule(max_policy_age=1), batch_rows=8)
    busy = {"a": WorkerCounts(claimed=4, delivered=3), "b": WorkerCounts(claimed=0, delivered=1)}
    assert pacer.stragglers(0, busy) == []
    pacer.next_version(1, busy)
    assert pacer.stragglers(1, busy) == ["a"]
    assert pacer.stragglers(1, {"a": WorkerCounts(claimed=4, delivered=4)}) == []
    assert pacer.stragglers(1, {}) == []  # it was forgotten


def test_with_age_two_a_straggler_has_one_step_more():
    pacer = Pacer(StalenessRule(max_policy_age=2), batch_rows=8)
    busy = {"a": WorkerCounts(claimed=4, delivered=3)}
    pacer.next_version(1, busy)
    assert pacer.stragglers(1, busy) == []
    pacer.next_version(2, {})
    assert pacer.stragglers(2, busy) == ["a"]


@pytest.mark.parametrize("age", [0, 1, 2, 4])
def test_nothing_becomes_too_old_whatever_the_workers_do(age):
    """Workers of random speed, 200 steps: every row is trained, none above the age allowed."""
    chance = random.Random(age)
    batch, portion = 8, 2
    pacer = Pacer(StalenessRule(max_policy_age=age), batch_rows=batch)
    granted, version, waiting, ages = 0, 0, [], []
    workers = {f"w{i}": WorkerCounts() for i in range(7)}
    begun = {}
    speed = {name: 10 ** chance.uniform(-1.5, 0) for name in workers}
    for _ in range(100_000):
        granted += pacer.grant()
        for name, counts in workers.items():
            if name in begun:
                if chance.random() < speed[name]:
                    waiting.append(begun.pop(name))
                    counts.claimed, counts.delivered = 0, counts.delivered + 1
            elif granted >= portion:
                granted -= portion
                begun[name], counts.claimed = version, portion
        if len(waiting) * portion >= batch and not pacer.stragglers(version, workers):
            waiting.sort()
            taken, waiting = waiting[: batch // portion], waiting[batch // portion :]
            ages += [version - u for u in taken]
            version += 1
            pacer.used(batch)
            pacer.next_version(version, workers)
        if version == 200:
            break
    assert version == 200
    assert max(ages) == age

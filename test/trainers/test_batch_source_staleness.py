"""Rows of old weights on their way into a step; three sampled tokens a row."""

import pytest
import torch
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from trainers.test_batch_source import row as row_of_any_age
from trainers.test_batch_source import totals

from torchrl_llm.collectors.staleness import StalenessRule
from torchrl_llm.data import MaskReason
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.trainers.batch_source import BatchSource
from torchrl_llm.trainers.episode_metrics import rollout_metrics


def row(reward, group, *versions, cut=False):
    """Two prompt tokens and three sampled ones, of one version or of three."""
    made = row_of_any_age(reward, group, cut=cut)
    versions = versions if len(versions) == 3 else versions * 3
    made["trace", "policy_version"] = torch.tensor([-1, -1, *versions], dtype=torch.int32)
    return made


class Collector:
    """Yields given batches and has a version that the test sets."""

    def __init__(self, batches):
        self.batches, self.policy_version = batches, 0

    def __iter__(self):
        return iter(lazy_rows(batch) for batch in self.batches)


def build(batches, num_rows, *, age=0, on_stale="drop", group=2, **options):
    credit = MCAdvantage(grpo_size=group)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rows),
        sampler=SamplerWithoutReplacement(),
        batch_size=num_rows,
        transform=credit,
    )
    collector = Collector(batches)
    rule = StalenessRule(max_policy_age=age, on_stale=on_stale)
    options = {"credit": credit, "num_rows": num_rows, "staleness": rule} | options
    return collector, buffer, BatchSource(collector, buffer, **options)


def test_fresh_rows_are_trained_and_their_age_is_reported():
    collector, _, source = build([[row(0, 0, 4, 4, 3), row(1, 0, 4)]], 2, age=1)
    collector.policy_version = 4
    source.fill()
    assert totals(source) == {"generated": 6, "trained": 6}
    assert source.policy_age["train/policy_age_mean"] == pytest.approx(1 / 6)
    assert source.policy_age["train/policy_age_max"] == 1


def test_a_step_takes_batches_until_it_has_rows_enough_that_are_fresh():
    old, new = [row(0, 0, 1), row(1, 0, 1)], [row(0, 1, 3), row(1, 1, 3)]
    collector, buffer, source = build([old, new], 2)
    collector.policy_version = 3
    collected = source.fill()
    assert len(buffer) == 2
    assert totals(source) == {"generated": 12, "trained": 6, "stale": 6}
    # Metrics are of the rows as they came.
    assert rollout_metrics(collected)["train/invalid"] == 0.0


def test_a_dropped_row_fills_its_place_and_leaves_the_baseline():
    batch = [row(9, 0, 1), row(0, 0, 3), row(1, 0, 3), row(0, 1, 3), row(1, 1, 3), row(1, 1, 3)]
    collector, buffer, source = build([batch, []], 5, group=3)
    collector.policy_version = 3
    source.fill()
    assert totals(source) == {"generated": 18, "trained": 15, "stale": 3}
    rows = buffer.storage.get(torch.arange(2))
    # Of 0 and 1 alone: -0.5 / 0.7071, 0.5 / 0.7071.
    assert [a.item() for a in read_rows(rows, "advantage")] == pytest.approx(
        [-0.7071, 0.7071], abs=1e-4
    )


def test_masked_tokens_leave_the_loss_and_the_row_stays():
    collector, buffer, source = build(
        [[row(0, 0, 1, 2, 3), row(1, 0, 3)]], 2, age=1, on_stale="mask"
    )
    collector.policy_version = 3
    source.fill()
    assert totals(source) == {"generated": 6, "trained": 5, "stale": 1}
    assert len(buffer) == 2
    assert source.policy_age["train/policy_age_max"] == 1


def test_rows_that_wait_for_their_group_age():
    first = [row(5, 7, 0), row(0, 0, 0), row(1, 0, 0)]
    second = [row(0, 7, 1), row(2, 7, 1), row(1, 1, 1)]
    collector, buffer, source = build([first, second], 3, group=3)
    source.fill()
    assert totals(source) == {"generated": 9, "pending": 9}
    collector.policy_version = 1
    source.fill()
    # Group 7 is full with a member of version 0, which takes no part; group 0 and 1 wait.
    assert totals(source) == {"generated": 9, "trained": 6, "stale": 3, "pending": 9}
    rows = buffer.storage.get(torch.arange(2))
    assert [a.item() for a in read_rows(rows, "advantage")] == pytest.approx(
        [-0.7071, 0.7071], abs=1e-4
    )


def test_turns_of_an_unfinished_trajectory_age():
    opening, ending = row(0, 0, 0), row(1, 0, 1)
    opening["next", "done"] = torch.zeros(1, dtype=torch.bool)
    for part in (opening, ending):
        part["traj_id"] = torch.tensor(3)
    other = row(0, 0, 1)
    other["traj_id"] = torch.tensor(4)
    third = row(1, 0, 1)
    third["traj_id"] = torch.tensor(5)
    # A step ends with trajectories that do: here those of a group that is complete.
    group = [row(reward, 7, 0) for reward in (0, 1, 1)]
    for number, part in enumerate(group):
        part["traj_id"] = torch.tensor(6 + number)
    collector, _, source = build([[opening, *group], [ending, other, third]], 1, group=3)
    source.fill()
    assert totals(source) == {"generated": 12, "trained": 3, "surplus": 6, "pending": 3}
    collector.policy_version = 1
    source.fill()
    # The storage has room for one of the two fresh trajectories.
    spent = totals(source)
    assert spent == {"generated": 9, "trained": 3, "stale": 3, "invalid": 3, "surplus": 3}


def test_a_stale_row_that_was_cut_is_counted_once():
    batch = [row(0, 0, 0, cut=True), row(0, 0, 2), row(1, 0, 2)]
    collector, _, source = build([batch], 2, group=3, truncated="drop")
    collector.policy_version = 2
    source.fill()
    assert totals(source) == {"generated": 9, "trained": 6, "stale": 3}
    assert source.state_dict()["dropped"] == {"stale": 0, "truncated": 0}


def test_lost_tokens_are_in_the_ledger():
    lost = iter([7, 0])
    batches = [[row(0, g, 0), row(1, g, 0)] for g in range(2)]
    _, _, source = build(batches, 2, lost=lambda: next(lost))
    source.fill()
    assert totals(source) == {"generated": 13, "trained": 6, "lost": 7}
    source.fill()
    assert totals(source) == {"generated": 6, "trained": 6}


def test_workers_that_never_get_the_weights_end_the_run():
    batches = ([row(0, g, 0), row(1, g, 0)] for g in range(1000))
    collector, _, source = build(batches, 2)
    collector.policy_version = 9
    with pytest.raises(DataError, match="do the workers get the weights"):
        source.fill()


def test_a_collector_without_a_version_is_refused():
    credit = MCAdvantage(grpo_size=2)
    buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=credit)
    with pytest.raises(ConfigError, match="policy_version is not an integer"):
        BatchSource([], buffer, credit=credit, num_rows=2, staleness=StalenessRule())


def test_the_state_goes_on_counting_what_was_dropped():
    collector, buffer, source = build([[row(0, 0, 0), row(0, 1, 1), row(1, 1, 1)]], 2)
    collector.policy_version = 1
    source.fill()
    assert totals(source) == {"generated": 9, "trained": 6, "pending": 3}
    other_collector, other_buffer, other = build([[row(1, 0, 1), row(1, 2, 1)]], 2)
    other_collector.policy_version = 1
    other_buffer.load_state_dict(buffer.state_dict())
    other.load_state_dict(source.state_dict())
    other.fill()
    # A group with one valid member trains nothing: its stale half and its fresh half.
    assert totals(other) == {"generated": 6, "stale": 3, "invalid": 3, "pending": 3}


def test_the_rows_that_were_collected_are_left_as_they_are():
    old = row(0, 0, 0)
    collector, _, source = build([[old, row(1, 0, 1), row(0, 0, 1)]], 2, group=3)
    collector.policy_version = 1
    source.fill()
    assert old["trace", "mask_reason"].tolist() == [1, 1, 0, 0, 0]
    assert int(MaskReason.STALE) not in old["trace", "mask_reason"]

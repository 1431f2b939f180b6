import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from collectors.collecting import make_policy
from torchrl._utils import logger
from trainers.test_batch_source import row, source, totals
from trainers.test_batch_source_overlong import CUT, DROP
from trainers.test_batch_source_staleness import build
from trainers.test_batch_source_staleness import row as aged_row
from trainers.test_batch_source_turns import _TURNS, _source
from trainers.test_run import Toy

from torchrl_llm.collectors import StoredCollector
from torchrl_llm.data import MaskReason, RolloutStore, Source
from torchrl_llm.data.overlong import LengthRule
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import DataError
from torchrl_llm.trainers.kept_rollouts import KeptRollouts, RowOutcomes


def numbered(rows, first=0):
    for number, each in enumerate(rows, first):
        each.set("traj_id", torch.tensor(number))
    return rows


def outcomes(batch_source):
    found = batch_source.outcomes()
    return [found.row(index) for index in range(len(found.rows))]


def reasons(row):
    sampled = row["trace", "source"] == Source.SAMPLED
    return set(row["trace", "mask_reason"][sampled].tolist())


def test_each_row_says_what_became_of_it_and_each_token_why():
    batch = [row(0), row(1), row(1, 1), row(1, 1), row(float("nan"), 2), row(1, 2), row(1, 3)]
    _, batch_source = source([numbered(batch)], 8, keep_zero_variance=False)
    before = [each["trace", "mask_reason"].clone() for each in batch]
    batch_source.fill()
    found = outcomes(batch_source)
    # Group 2 has one valid member, so it is dropped; group 3 waits for its second.
    fates = ["trained", "trained", "filtered", "filtered", "invalid", "filtered", "pending"]
    assert [each["fate"] for each in found] == fates
    codes = {"trained": 0, "pending": 0, "filtered": 4, "invalid": 5}
    assert [reasons(each) for each in found] == [{codes[fate]} for fate in fates]
    assert [each["advantage"].item() > 0 for each in found[:2]] == [False, True]
    assert all("advantage" not in each.keys() for each in found[2:])
    for each, fate, old in zip(found, fates, before, strict=True):
        assert ("collected" in each.keys()) == (codes[fate] > 0)
        assert torch.equal(each.get(("collected", "mask_reason"), old), old)
    # The rows themselves are as they were.
    assert all(
        torch.equal(b["trace", "mask_reason"], o) for b, o in zip(batch, before, strict=True)
    )


def test_a_row_that_waited_is_kept_again_when_it_is_decided():
    batches = [numbered([row(0), row(1), row(0, 1)]), numbered([row(1, 1)], 3)]
    _, batch_source = source(batches, 2)
    batch_source.fill()
    assert [each["fate"] for each in outcomes(batch_source)] == ["trained", "trained", "pending"]
    batch_source.fill()
    found = outcomes(batch_source)
    assert [each["traj_id"].item() for each in found] == [3, 2]
    assert [each["fate"] for each in found] == ["trained", "trained"]
    assert [bool(each.get("carried", False)) for each in found] == [False, True]


def test_a_step_with_rows_that_waited_is_computed_again_by_itself(tmp_path):
    batches = [numbered([row(0), row(1), row(0, 1)]), numbered([row(1, 1), row(5, 2)], 3)]
    _, batch_source = source(batches, 2)
    kept = KeptRollouts(tmp_path, "all")
    trained = []
    for step in (1, 2):
        batch_source.fill()
        kept.record(step, batch_source.outcomes())
        trained.append({int(r["traj_id"]): r["advantage"] for r in batch_source.outcomes().trained})
    store = RolloutStore(tmp_path)
    for steps in ([1], [2], [1, 2]):
        _, again = source([], 2)
        again._collector = StoredCollector(store, steps=steps)
        for step in steps:
            again.fill()
            assert {int(r["traj_id"]) for r in again.outcomes().trained} == set(trained[step - 1])
            for each in again.outcomes().trained:
                assert torch.equal(each["advantage"], trained[step - 1][int(each["traj_id"])])
                assert {"fate", "step", "carried", "collected"}.isdisjoint(each.keys())


@pytest.mark.parametrize(("cut", "fate"), [(True, "truncated"), (False, "stale")])
def test_what_was_marked_on_its_way_says_so_and_is_replayed_as_collected(tmp_path, cut, fate):
    if cut:
        _, batch_source = source(
            [numbered([row(0, cut=True), row(1), row(2)])], 3, group=3, truncated="drop"
        )
    else:
        batch = numbered([aged_row(0, 0, 0), aged_row(1, 0, 4), aged_row(2, 0, 4)])
        collector, _, batch_source = build([batch], 3, group=3, staleness=None)
        collector, _, batch_source = build([batch, batch[1:]], 3, group=3)
        collector.policy_version = 4
    batch_source.fill()
    found = outcomes(batch_source)[0]
    assert found["fate"] == fate
    assert reasons(found) == {int(MaskReason[fate.upper()])}
    assert not found["next", "reward_valid"]
    assert found["collected", "reward_valid"]
    assert ("collected", "mask_reason") in found.keys(True)
    KeptRollouts(tmp_path, "all").record(1, batch_source.outcomes())
    (again,) = StoredCollector(RolloutStore(tmp_path))
    assert same_rows(again.unbind(0)[:1], batch_source.outcomes().rows[:1])
    assert again[0]["next", "reward_valid"]


def same_rows(found, expected):
    """Whether rows have the same keys and values."""
    for each, other in zip(found, expected, strict=True):
        keys = set(other.keys(True, True))
        assert set(each.keys(True, True)) == keys
        assert all(torch.equal(each[key], other[key]) for key in keys)
    return True


LONG = {
    # What the rule leaves: 4 tokens. 2 is TRUNCATED, 4 FILTERED, 7 OVERLONG.
    "cut": (
        {"length": CUT},
        ["trained"] * 4,
        [[1, 1, 0, 0, 7, 7], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0, 7, 7]],
        [True] * 4,
    ),
    "dropped": (
        {"length": DROP},
        ["overlong", "filtered", "overlong", "overlong"],
        [[1, 1, 7, 7, 7, 7], [1, 1, 4, 4], [1, 1, 7, 7], [1, 1, 7, 7, 7, 7]],
        [True, True, False, True],
    ),
    "cut, then dropped": (
        {"length": CUT, "truncated": "drop"},
        ["truncated", "truncated", "filtered", "truncated"],
        [[1, 1, 2, 2, 7, 7], [1, 1, 2, 2], [1, 1, 4, 4], [1, 1, 2, 2, 7, 7]],
        [True, False, True, True],
    ),
    "cut, then masked": (
        {"length": CUT, "truncated": "mask"},
        ["trained"] * 4,
        [[1, 1, 2, 2, 7, 7], [1, 1, 2, 2], [1, 1, 0, 0], [1, 1, 2, 2, 7, 7]],
        [True] * 4,
    ),
}


@pytest.mark.parametrize(("rules", "fates", "expected", "valid"), LONG.values(), ids=LONG)
def test_rows_that_were_too_long_are_kept_whole_and_replayed_as_collected(
    tmp_path, rules, fates, expected, valid
):
    batch = [row(1, length=4), row(0, length=2, cut=True), row(1, length=2), row(1, length=4)]
    for each, (trajectory, turn) in zip(batch, [(0, 0), (1, 0), (2, 0), (2, 1)], strict=True):
        each.update({"traj_id": torch.tensor(trajectory), "turn": torch.tensor(turn)})
    batch[2]["next", "done"].fill_(False)
    before = [each.clone() for each in batch]
    _, batch_source = source([batch], 4, group=3, **rules)
    shown = batch_source.fill().unbind(0)
    assert shown[0]["trace", "mask_reason"].tolist()[-2:] == [7, 7]  # metrics see what is too long
    KeptRollouts(tmp_path, "all").record(1, batch_source.outcomes())
    store = RolloutStore(tmp_path)
    found = list(store.iterate())
    assert [each["fate"] for each in found] == fates
    assert [each["trace", "mask_reason"].tolist() for each in found] == expected
    assert [bool(each["next", "reward_valid"]) for each in found] == valid
    (again,) = StoredCollector(store)
    assert same_rows(again.unbind(0), before)
    # A larger limit trains them whole.
    _, whole = source([], 4, group=3, length=LengthRule(max_seq_len=6))
    whole._collector = StoredCollector(store)
    whole.fill()
    assert totals(whole) == {"generated": 12, "trained": 12}


def test_a_reward_that_nothing_called_valid_is_valid_again_when_it_is_replayed(tmp_path):
    batch = numbered([row(1, cut=True), row(0), row(1)])
    for each in batch:
        del each["next", "reward_valid"]
    _, batch_source = source([batch], 3, group=3, truncated="drop")
    batch_source.fill()
    KeptRollouts(tmp_path, "all").record(1, batch_source.outcomes())
    (again,) = StoredCollector(RolloutStore(tmp_path))
    assert again[0]["next", "reward_valid"]
    assert same_rows(again.unbind(0)[1:], batch[1:])


def test_a_turn_gets_its_part_of_the_joined_row(tokenizer):
    _, batch_source = _source(make_policy(tokenizer))
    rows = batch_source.fill()
    for trained in batch_source.outcomes().trained:  # a column that a transform of the buffer adds
        length = trained["tokens", "full"].shape[0]
        trained.set(("scores", "full"), torch.arange(length))
        trained.set(
            ("scores", "response"), torch.arange(length)[trained["tokens", "prompt"].shape[0] :]
        )
    found = outcomes(batch_source)
    assert len(found) == len(rows) == 6 * _TURNS
    for each in found:
        end, start = each["tokens", "full"].shape[0], each["tokens", "prompt"].shape[0]
        assert each["fate"] == "trained"
        assert each["scores", "full"].tolist() == list(range(end))
        assert each["scores", "response"].tolist() == list(range(start, end))
        assert each["trace", "mask_reason"].shape[0] == end
        assert "num_turns" not in each.keys()
    assert batch_source.outcomes().added == {
        ("advantage",),
        ("scores", "full"),
        ("scores", "response"),
    }


@pytest.mark.parametrize("step", [0, 1, 2, 57])
def test_a_sample_is_whole_groups_whatever_the_random_generator(step):
    batch = numbered([row(n, n % 5) for n in range(40)])
    found = RowOutcomes(batch).sample(step, 16)
    torch.manual_seed(step)
    assert found == RowOutcomes(batch).sample(step, 16)
    groups = [int(batch[at]["group_id"]) for at in found]
    assert len(found) == 16
    assert sorted(map(groups.count, set(groups))) == [8, 8]


def test_a_trajectory_is_kept_whole_even_if_it_is_longer_than_the_sample():
    batch = [row(n) for n in range(20)] + [row(1, 1)]
    for each in batch[:20]:
        each.set("traj_id", torch.tensor(0))
    batch[20].set("traj_id", torch.tensor(1))
    assert RowOutcomes(batch).sample(0, 16) == list(range(20))
    assert RowOutcomes(batch).sample(1, 16) == [20]


def test_rows_alone_are_kept_without_a_fate(tmp_path):
    rows = lazy_rows(numbered([row(0), row(1)]))
    Toy(tmp_path, max_steps=2).train(collected=[rows] * 2)
    store = RolloutStore(tmp_path)
    assert store.steps() == [1, 2]
    assert "fate" not in store[0].keys()


def test_a_full_disk_is_told_once_and_loses_neither_the_run_nor_earlier_rows(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", said.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept, rows = KeptRollouts(tmp_path, "all"), RowOutcomes(numbered([row(0), row(1)]))
    kept.record(1, rows)
    (segment,) = kept.folder.iterdir()
    size = segment.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, limits[1]))
    try:
        for step in (2, 3):
            kept.record(step, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept.failures == 2
    assert segment.stat().st_size == size
    kept.record(4, rows)
    assert RolloutStore(tmp_path).steps() == [1, 4]
    assert len(said) == 1
    assert "the rollouts of step 2 could not be written to" in said[0]


def test_a_run_goes_on_where_rollouts_cannot_be_written_and_says_so_at_its_end(tmp_path, capfd):
    (tmp_path / "rollouts").write_text("in the way")
    rows = lazy_rows(numbered([row(0), row(1)]))
    toy = Toy(tmp_path, max_steps=3).train(collected=[rows] * 3)
    toy.run.finish()
    said = capfd.readouterr()
    assert "the rollouts of 3 steps could not be written" in said.out + said.err


def test_damaged_rollouts_are_put_aside_when_a_run_resumes(tmp_path, capfd):
    rows = lazy_rows(numbered([row(0), row(1)]))
    Toy(tmp_path, max_steps=2).train(collected=[rows] * 2)
    (segment,) = (tmp_path / "rollouts").iterdir()
    data = bytearray(segment.read_bytes())
    data[3] ^= 1
    segment.write_bytes(data)
    Toy(tmp_path, max_steps=3, resume="auto").train(collected=[rows] * 3)
    assert f"is now in {tmp_path}/damaged_rollouts_2, and 0 whole steps" in capfd.readouterr().err
    assert (tmp_path / "damaged_rollouts_2" / segment.name).read_bytes() == data
    assert RolloutStore(tmp_path).steps() == [3]


def test_a_folder_or_a_link_in_the_place_of_rollouts_is_put_aside_or_told_of(tmp_path, capfd):
    rows = lazy_rows(numbered([row(0), row(1)]))
    Toy(tmp_path, max_steps=2).train(collected=[rows] * 2)
    (segment,) = (tmp_path / "rollouts").iterdir()
    for number, harm in enumerate((Path.mkdir, lambda path: path.symlink_to("/nowhere"))):
        segment.unlink()
        harm(segment)
        with pytest.raises(DataError, match=f"{segment.name} cannot be read"):
            RolloutStore(tmp_path)
        steps = 3 + number
        Toy(tmp_path, max_steps=steps, resume="auto").train(collected=[rows] * steps)
        assert f"{segment} cannot be read: " in capfd.readouterr().err
        (segment,) = (tmp_path / "rollouts").iterdir()
        assert RolloutStore(tmp_path).steps() == [steps]


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """A run of six steps whose rollouts are in three segments of two steps."""
    monkeypatch.setattr("torchrl_llm.data.rollout_store.SEGMENT_BYTES", 6_000)
    rows = lazy_rows(numbered([row(0), row(1)]))
    Toy(tmp_path, interval=2).train(collected=[rows] * 6)
    segments = sorted((tmp_path / "rollouts").iterdir())
    assert [path.name[:-5] for path in segments] == [f"steps_0000000{n}" for n in (1, 3, 5)]
    return tmp_path, segments, rows


def test_a_flipped_bit_in_any_rollout_is_told_and_costs_no_other_step(long_run, tmp_path, capfd):
    folder, segments, rows = long_run
    draw = random.Random(0)
    for number in range(12):
        segment = segments[number % 3]
        copy = tmp_path.with_name(f"copy_{number}")
        shutil.copytree(folder, copy)
        data = bytearray(segment.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        (copy / "rollouts" / segment.name).write_bytes(data)
        Toy(copy, max_steps=7, resume="auto").train(collected=[rows] * 7)
        aside = copy / "damaged_rollouts_6"
        assert f"it is now in {aside}, and " in capfd.readouterr().err
        assert [path.name for path in aside.iterdir()] == [segment.name]
        assert (aside / segment.name).read_bytes() == data
        store = RolloutStore(copy)
        first = int(segment.name[6:14])
        lost = {*range(1, 8)} - set(store.steps())
        # A head that is damaged hides what follows it in its file.
        assert lost in ({first}, {first + 1}, {first, first + 1})
        assert len(list(store.iterate())) == 2 * len(store.steps())


@pytest.mark.parametrize("place", range(3))
def test_a_rollout_file_that_is_gone_or_shorter_is_told(long_run, place, capfd):
    folder, segments, _ = long_run
    data = segments[place].read_bytes()
    second = data.rindex(b"tensors1")
    segments[place].write_bytes(data[:second])
    Toy(folder, max_steps=6, resume="auto")
    assert f"{segments[place]} is shorter than it was; it is now in" in capfd.readouterr().err
    segments[place].write_bytes(data)
    segments[place].unlink()
    Toy(folder, max_steps=6, resume="auto")
    assert f"{segments[place]} is gone, and with it its rollouts" in capfd.readouterr().err


def test_a_run_that_begins_anew_drops_what_a_killed_one_left(tmp_path):
    rows = RowOutcomes(numbered([row(0), row(1)]))
    KeptRollouts(tmp_path, "all").record(7, rows)
    Toy(tmp_path, max_steps=1).train(collected=[lazy_rows(list(rows.rows))])
    assert RolloutStore(tmp_path).steps() == [1]

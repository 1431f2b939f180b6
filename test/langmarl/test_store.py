"""Stores: what is written is read, what is damaged is named, what fails leaves the old file."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import run_program

from torchrl_llm.errors import CheckpointError, ConfigError, DamagedCheckpointError
from torchrl_llm.langmarl.environment import Trajectory
from torchrl_llm.langmarl.store import (
    LocalStore,
    PolicyCheckpoint,
    TrajectoryStore,
    aggregated_path,
    append_metrics,
    evaluation_path,
    gradients_path,
    read_json,
    read_metrics,
    read_policy_file,
    redacted,
    to_json_text,
    write_policy_file,
)

STATS = {"paradigm": "central_credit", "avg_reward": 0.5, "rewards": [0.0, 1.0]}
CURVE = "runs/one/metrics/training_curve.jsonl"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


class CountingStore(LocalStore):
    """Notes which files are read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.opened = []

    def read_text(self, path):
        self.opened.append(Path(path).name)
        return super().read_text(path)


def episode(reward=1.0, **metadata):
    return Trajectory(
        {"question": "2+2?"}, [{"agent_id": "agent_1", "action": "4"}], reward, metadata
    )


# -- the store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a\r\nb\n", "ü 漢 🙂", "half \ud83d", "x" * 300_000])
def test_a_text_is_read_as_it_was_written(store, text):
    store.write_text("runs/one/a.txt", text)
    assert store.read_text("runs/one/a.txt") == text
    assert store.list("runs/one") == ["a.txt"]


@pytest.mark.parametrize("path", ["../a", "a/../../b", "/etc/passwd", "a\0b"])
def test_a_path_out_of_the_store_is_refused(store, path):
    for use in (store.path, store.read_text, store.exists, store.list):
        with pytest.raises(ConfigError, match="relative"):
            use(path)
    with pytest.raises(ConfigError, match="relative"):
        store.write_text(path, "")


def test_names_are_listed_by_number_and_without_drafts(store):
    for name in ("a10", "a9", "a", "b1", ".a9.12345678"):
        store.write_text(f"f/{name}", "")
    assert store.list("f") == ["a", "a9", "a10", "b1"]
    assert store.list("nothing") == []


def test_a_missing_file_is_told_as_one(store):
    with pytest.raises(FileNotFoundError, match=r"a\.txt is missing") as caught:
        store.read_text("runs/one/a.txt")
    assert isinstance(caught.value, CheckpointError)


def test_a_file_that_is_no_text_is_named(store):
    store.path("a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedCheckpointError, match=r"a\.txt is damaged"):
        store.read_text("a.txt")


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_old_one(store, monkeypatch):
    store.write_text("runs/one/a.txt", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"runs/one/a\.txt cannot be written: No space left"):
        store.write_text("runs/one/a.txt", "new")
    assert store.read_text("runs/one/a.txt") == "old"
    assert os.listdir(store.path("runs/one")) == ["a.txt"]


def test_a_write_that_breaks_off_leaves_the_old_files(store):
    store.write_text("a.txt", "old")
    store.append_line("lines", "first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk with 4 KiB
    try:
        with pytest.raises(CheckpointError, match=r"a\.txt cannot be written: File too large"):
            store.write_text("a.txt", "x" * 100_000)
        with pytest.raises(CheckpointError, match="lines cannot be written: No space left"):
            store.append_line("lines", "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.read_text("a.txt") == "old"
    assert store.read_text("lines") == "first\n"
    assert store.list(".") == ["a.txt", "lines"]


def test_a_folder_that_is_a_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/a\.txt cannot be written"):
        LocalStore(tmp_path / "file").write_text("a.txt", "text")


def test_half_a_line_of_a_killed_process_is_cut_off(store):
    store.path("lines").write_bytes(b"one\ntwo\nhal")
    store.append_line("lines", "three")
    assert store.read_text("lines") == "one\ntwo\nthree\n"
    store.path("lines").write_bytes(b"hal")
    store.append_line("lines", "one")
    assert store.read_text("lines") == "one\n"


def test_threads_append_whole_lines(store):
    def write(thread):
        for number in range(20):
            store.append_line("lines", f"{thread} {number} " + "x" * 9000)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    lines = store.read_text("lines").splitlines()
    found = sorted(tuple(map(int, line.split()[:2])) for line in lines)
    assert found == [(k, n) for k in range(4) for n in range(20)]
    assert all(line.endswith("x" * 9000) for line in lines)


def test_a_second_process_is_kept_out_of_a_run_and_let_in_after(store, tmp_path):
    code = "import sys\nfrom torchrl_llm.langmarl.store import LocalStore\n"
    code += "with LocalStore(sys.argv[1]).lock('one'):\n    print('in')"
    with store.lock("one"):
        done = run_program(code, str(tmp_path))
        assert done.returncode == 1
        assert f"ConfigError: the run 'one' in {tmp_path} is being trained" in done.stderr
        assert f"process {os.getpid()} on" in done.stderr
        with store.lock("two"), pytest.raises(ConfigError, match="being trained"):
            store.lock("one").__enter__()
    assert run_program(code, str(tmp_path)).stdout == "in\n"


def test_a_lock_does_not_stay_with_a_child_that_was_forked(store):
    reading, writing = os.pipe()
    with store.lock("one"):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent lets go
            os._exit(0)
    with store.lock("one"):
        pass
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


# -- JSON -----------------------------------------------------------------------------------------


@dataclass
class Sheet:
    name: str
    api_key: str


def test_json_takes_numpy_tensors_sets_dataclasses_and_what_is_not_finite():
    value = {
        "float": np.float32(0.5),
        "int": np.int64(3),
        "array": np.array([[1, 2]]),
        "tensor": torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True),
        "set": {3, 1, 2},
        "sheet": Sheet("m", "sk-1"),
        "nan": [float("nan"), math.inf, np.float64("-inf"), torch.tensor(math.nan)],
        "path": Path("/a"),
        7: (True, None),
    }
    assert json.loads(to_json_text(value)) == {
        "float": 0.5,
        "int": 3,
        "array": [[1, 2]],
        "tensor": [1.5],
        "set": [1, 2, 3],
        "sheet": {"name": "m", "api_key": None},
        "nan": [None, None, None, None],
        "path": "/a",
        "7": [True, None],
    }


def test_secrets_are_left_out_at_any_depth():
    config = {
        "llm": {"api_key": "sk-1", "api_key_env_var": "KEY", "max_tokens": 9},
        "more": [{"judge": {"API_KEY": "sk-2"}}],
        "headers": {"Authorization": "Bearer sk-3"},
    }
    assert "sk-" not in to_json_text(config)
    assert redacted(config)["llm"] == {"api_key": None, "api_key_env_var": "KEY", "max_tokens": 9}


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[" * 100_000])
def test_json_that_is_damaged_names_its_file(store, text):
    store.write_text("runs/one/a.json", text)
    with pytest.raises(DamagedCheckpointError, match=r"runs/one/a\.json is damaged.*remove it"):
        read_json(store, "runs/one/a.json")


@pytest.mark.parametrize("version", [2, "1.5", None])
def test_a_store_of_a_newer_schema_is_refused(store, version):
    store.write_text("runs/one/run_meta.json", to_json_text({"schema_version": version}))
    for make in (lambda: PolicyCheckpoint(store, "one", 2), lambda: TrajectoryStore(store, "one")):
        with pytest.raises(CheckpointError, match=f"schema_version {version!r}.*reads up to 1"):
            make()


# -- policies -------------------------------------------------------------------------------------


def test_policies_are_read_as_they_were_saved(store):
    policies = PolicyCheckpoint(store, "one", 2)
    assert set(policies.get_policies()) == {"agent_1", "agent_2"}
    assert policies.iterations() == []
    texts = {"agent_1": "Be kind.\n", "agent_2": ""}
    policies.save_policies(1, texts, STATS, metadata={"validation_reward": 0.25})
    policies.save_policies(10, {**texts, "agent_2": "new"})
    policies.save_policies(2, texts)
    assert policies.get_policies(1) == texts
    assert policies.get_policies() == {**texts, "agent_2": "new"}
    assert policies.iterations() == [1, 2, 10]
    assert policies.stats(1) == STATS
    assert policies.metadata(1) == {"validation_reward": 0.25}
    assert policies.stats(2) == policies.metadata(2) == {}
    assert read_json(store, "runs/one/checkpoints/iter_1/meta.json")["schema_version"] == 1


def test_an_iteration_that_is_missing_or_not_complete_is_not_found(store):
    policies = PolicyCheckpoint(store, "one", 1)
    policies.save_policies(3, {"agent_1": "text"})
    store.write_text("runs/one/checkpoints/iter_4/agent_1.txt", "of a process that was killed")
    assert policies.iterations() == [3]
    assert policies.get_policies() == {"agent_1": "text"}
    for number in (1, 4):
        with pytest.raises(FileNotFoundError, match=f"no complete checkpoint {number}, only 3"):
            policies.get_policies(number)
    with pytest.raises(CheckpointError):
        policies.stats(4)


def test_defect_4_the_environment_names_the_agents_and_their_first_policies(store):
    names = ["piston_0", "piston_1", "piston_10"]
    defaults = {name: f"Move {name}." for name in names}
    policies = PolicyCheckpoint(store, "one", 3, agent_names=names, default_policies=defaults)
    assert policies.get_policies() == defaults
    policies.save_policies(1, {**defaults, "piston_1": "Rise."})
    assert policies.get_policies() == {**defaults, "piston_1": "Rise."}
    with pytest.raises(ConfigError, match="the agents are"):
        policies.save_policies(2, {"agent_1": "", "agent_2": "", "agent_3": ""})
    assert policies.iterations() == [1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_agents": 0}, "at least 1"),
        ({"agent_names": ["a"]}, "num_agents=2"),
        ({"agent_names": ["a", "b"], "default_policies": {"a": ""}}, r"lacks \['b'\]"),
        ({"agent_names": ["a", "../b"]}, "name of an agent"),
        ({"agent_names": ["a", ""]}, "name of an agent"),
        ({"agent_names": ["a", "x/y"]}, "name of an agent"),
        ({"agent_names": ["a", "x" * 201]}, "name of an agent"),
        ({"run_id": "a/b"}, "name of a run"),
        ({"run_id": ".."}, "name of a run"),
    ],
)
def test_names_and_numbers_that_cannot_be_are_refused(store, changes, told):
    given = {"run_id": "one", "num_agents": 2, **changes}
    with pytest.raises(ConfigError, match=told):
        PolicyCheckpoint(store, **given)


def test_a_policy_that_is_no_text_or_has_a_bad_name_is_refused(store):
    policies = PolicyCheckpoint(store, "one", 1)
    with pytest.raises(ConfigError, match="got None for 'agent_1'"):
        policies.save_policies(1, {"agent_1": None})
    with pytest.raises(ConfigError, match=r"got '\.\./x'"):
        policies.save_policies(1, {"../x": "text"})


def test_the_file_of_a_policy_that_is_gone_is_named(store):
    policies = PolicyCheckpoint(store, "one", 2, agent_names=["a", "b"])
    policies.save_policies(1, {"a": "A", "b": "B"})
    store.path("runs/one/checkpoints/iter_1/b.txt").unlink()
    with pytest.raises(DamagedCheckpointError, match="iter_1 has no policy of b"):
        policies.get_policies()
    with pytest.raises(DamagedCheckpointError, match="iter_1 has no policy of some agent"):
        PolicyCheckpoint(store, "one", 2).get_policies()


def test_row_26_a_difference_is_the_text_of_a_diff(store):
    policies = PolicyCheckpoint(store, "one", 2, default_policies={"agent_1": "A", "agent_2": "B"})
    policies.save_policies(1, {"agent_1": "A", "agent_2": "B\nand more\n"})
    policies.save_policies(2, {"agent_1": "A", "agent_2": "B\nand more"})
    assert policies.diff_policies(0, 1) == {
        "agent_1": "",
        "agent_2": "--- iter_0/agent_2.txt\n+++ iter_1/agent_2.txt\n"
        "@@ -1 +1,3 @@\n B\n+and more\n+",
    }
    assert policies.diff_policies(1, 2)["agent_2"].endswith(" B\n and more\n-")
    with pytest.raises(FileNotFoundError):
        policies.diff_policies(1, 3)


def test_a_run_of_the_reference_is_read(store):
    folder = "runs/exp_20250101_120000"
    meta = {"timestamp": "2025-01-01T12:00:00", "num_agents": 2, "training_stats": STATS}
    for number in (1, 2):
        for name in ("player_0", "player_1"):
            path = f"{folder}/checkpoints/iter_{number}/{name}.txt"
            store.write_text(path, f"{name} {number}")
        store.write_text(f"{folder}/checkpoints/iter_{number}/meta.json", json.dumps(meta))
    old = {"task": {}, "transitions": [], "reward": 0.5, "metadata": {}}
    for number in (3, 20):
        text = json.dumps({"episode_id": number, **old})
        store.write_text(f"{folder}/trajectories/iter_0/episode_{number:03d}.json", text)
    row = {"type": "iteration", "iteration": 0, **STATS}
    store.append_line(f"{folder}/metrics/training_curve.jsonl", json.dumps(row))
    run = "exp_20250101_120000"
    found = PolicyCheckpoint(store, run, 2).get_policies()
    assert found == {"player_0": "player_0 2", "player_1": "player_1 2"}
    episodes = TrajectoryStore(store, run).load(0)
    assert [one.metadata["episode_id"] for one in episodes] == [3, 20]
    assert read_metrics(store, run) == [STATS, STATS]


# -- policies in files of their own ---------------------------------------------------------------


def test_a_file_of_policies_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "one.json"
    write_policy_file(path, 7, {"agent_1": "A", "agent_2": "B"})
    assert read_policy_file(path) == read_policy_file(path, 7) == {"agent_1": "A", "agent_2": "B"}
    value = json.loads(path.read_text())
    assert value["version"] == "1.0"
    assert value["current_iteration"] == 7
    assert value["policies"]["iteration_7"]["agent_policies"]["agent_1"] == {"policy": "A"}
    with pytest.raises(FileNotFoundError, match="iteration_7"):
        read_policy_file(path, 6)


def test_files_of_the_reference_without_a_level_are_read_too(tmp_path):
    path = tmp_path / "policy.json"
    agents = {"agent_0": {"policy": "A"}, "agent_1": {"policy": "B"}}
    value = {"version": "1.0", "current_iteration": 0, "policies": {"iteration_0": agents}}
    path.write_text(json.dumps(value))
    assert read_policy_file(path) == {"agent_0": "A", "agent_1": "B"}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"current_iteration": 0, "policies": 3}'])
def test_what_is_no_file_of_policies_is_named(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"policy\.json is "):
        read_policy_file(path)
    with pytest.raises(FileNotFoundError):
        read_policy_file(tmp_path / "none.json")


# -- episodes -------------------------------------------------------------------------------------


def test_episodes_are_read_as_they_were_saved(store):
    episodes = TrajectoryStore(store, "one")
    episodes.save(3, 1, episode(0.5, note=np.float64(2.0), episode_id=99))
    episodes.save(3, 0, episode(math.nan, error="no"))
    failed, one = episodes.load(3)
    assert one == episode(0.5, note=2.0, episode_id=1)
    assert math.isnan(failed.reward)
    assert failed.metadata == {"error": "no", "episode_id": 0}
    assert episodes.count(3) == 2
    assert [episodes.has(3, number) for number in (0, 1, 2)] == [True, True, False]
    assert episodes.load(4) == []
    assert episodes.count(4) == 0
    value = json.loads(store.read_text("runs/one/trajectories/iter_3/episode_001.json"))
    names = ["episode_id", "task", "transitions", "reward", "metadata", "blake2b"]
    assert list(value) == names
    assert value["episode_id"] == 1


def test_saving_an_episode_does_not_change_it(store):
    one = episode(episode_id=5)
    TrajectoryStore(store, "one").save(0, 6, one)
    assert one == episode(episode_id=5)


def test_defect_5_episodes_sort_by_number_above_999(store):
    episodes = TrajectoryStore(store, "one")
    numbers = [0, 99, 100, 999, 1000, 1001, 9999, 10000]
    for number in reversed(numbers):
        episodes.save(0, number, episode(float(number)))
    assert [one.metadata["episode_id"] for one in episodes.load(0)] == numbers
    assert [one.reward for one in episodes.load(0, limit=5)] == [0.0, 99.0, 100.0, 999.0, 1000.0]
    assert episodes.has(0, 1000)
    assert not episodes.has(0, 1002)


def test_a_limit_reads_no_other_files(tmp_path):
    store = CountingStore(tmp_path)
    episodes = TrajectoryStore(store, "one")
    for number in range(40):
        episodes.save(0, number, episode())
    for limit, expected in ((10, 10), (0, 0), (None, 40), (100, 40)):
        store.opened.clear()
        assert len(episodes.load(0, limit)) == expected
        assert store.opened == [f"episode_{n:03d}.json" for n in range(expected)]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"task": {}}', '{"task": {}, "transitions": [], "reward": "high"}']
)
def test_a_damaged_episode_is_named(store, text):
    episodes = TrajectoryStore(store, "one")
    episodes.save(0, 0, episode())
    store.write_text("runs/one/trajectories/iter_0/episode_001.json", text)
    with pytest.raises(DamagedCheckpointError, match=r"iter_0/episode_001\.json is .*remove it"):
        episodes.load(0)
    assert len(episodes.load(0, limit=1)) == 1


@pytest.mark.parametrize("number", [-1, 1.0, "7", None, True, math.nan])
def test_a_number_that_no_file_can_have_is_refused(store, number):
    episodes, policies = TrajectoryStore(store, "one"), PolicyCheckpoint(store, "one", 1)
    for use in (
        lambda: episodes.save(0, number, episode()),
        lambda: episodes.save(number, 0, episode()),
        lambda: episodes.has(0, number),
        lambda: episodes.load(number),
        lambda: policies.save_policies(number, {"agent_1": "A"}),
        lambda: evaluation_path("one", 0, number),
        lambda: gradients_path("one", number, "a"),
    ):
        with pytest.raises(ConfigError, match="is a whole number from 0 on, got"):
            use()
    assert not store.exists("runs/one")
    episodes.save(np.int64(0), np.int64(7), episode())
    assert episodes.load(0)[0].metadata["episode_id"] == 7


# -- evaluations, gradients, metrics --------------------------------------------------------------


def test_defect_3_evaluations_of_two_episodes_do_not_overwrite_each_other(store):
    found = {
        evaluation_path("one", iteration, number): f"{iteration} {number}"
        for iteration in (0, 1)
        for number in (0, 1, 1000)
    }
    for path, text in found.items():
        store.write_text(path, text)
    assert len(found) == 6
    assert all(store.read_text(path) == text for path, text in found.items())
    assert store.list("runs/one/evaluations/iter_1")[-1] == "eval_episode_1000.json"


def test_gradients_lie_where_the_reference_has_them():
    assert gradients_path("one", 2, "a_1") == "runs/one/gradients/iter_2/a_1_gradients.json"
    assert aggregated_path("one", 2, "a_1") == "runs/one/gradients/iter_2/a_1_aggregated.txt"
    for path in (gradients_path, aggregated_path):
        with pytest.raises(ConfigError, match="name of an agent"):
            path("one", 2, "../a")


def test_metrics_are_the_statistics_in_their_order(store):
    for number in (0, 2, 1):
        row = {"iteration": number, **STATS, "avg_reward": number / 2, "metadata": {"k": number}}
        append_metrics(store, "one", row)
    assert read_metrics(store, "one") == [{**STATS, "avg_reward": k / 2} for k in range(3)]
    rows = read_metrics(store, "one", whole=True)
    assert [(row["iteration"], row["metadata"]["k"]) for row in rows] == [(0, 0), (1, 1), (2, 2)]
    assert read_metrics(store, "none") == []


def test_of_an_iteration_that_is_there_twice_the_newest_line_counts(store):
    for number, reward in ((0, 0.1), (1, 0.2), (0, 0.9)):
        append_metrics(store, "one", {"iteration": number, "avg_reward": reward})
    assert read_metrics(store, "one") == [{"avg_reward": 0.9}, {"avg_reward": 0.2}]


def test_the_line_of_a_process_that_was_killed_is_ignored(store):
    append_metrics(store, "one", {"iteration": 0, "avg_reward": 0.1})
    with store.path(CURVE).open("a") as file:
        file.write('{"iteration": 1, "avg_re')
    assert read_metrics(store, "one") == [{"avg_reward": 0.1}]
    append_metrics(store, "one", {"iteration": 1, "avg_reward": math.nan})
    assert read_metrics(store, "one") == [{"avg_reward": 0.1}, {"avg_reward": None}]


def test_a_damaged_line_of_metrics_is_named(store):
    append_metrics(store, "one", {"iteration": 0, "avg_reward": 0.5})
    store.append_line(CURVE, '{"itera')
    append_metrics(store, "one", {"iteration": 2, "avg_reward": 0.5})
    with pytest.raises(DamagedCheckpointError, match=r"training_curve\.jsonl, line 2, is damaged"):
        read_metrics(store, "one")


def test_an_iteration_that_was_saved_before_its_line_was_written_counts(store):
    policies = PolicyCheckpoint(store, "one", 1)
    append_metrics(store, "one", {"iteration": 0, "avg_reward": 0.1, "metadata": {}})
    policies.save_policies(1, {"agent_1": "A"}, {"avg_reward": 0.7})
    policies.save_policies(2, {"agent_1": "B"}, {"avg_reward": 0.2}, metadata={"num_fallbacks": 3})
    policies.save_policies(3, {"agent_1": "C"})
    assert read_metrics(store, "one", whole=True) == [
        {"iteration": 0, "avg_reward": 0.1, "metadata": {}},
        {"iteration": 1, "avg_reward": 0.2, "metadata": {"num_fallbacks": 3}},
    ]

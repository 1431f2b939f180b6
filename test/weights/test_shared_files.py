"""A file for each version on a shared disc: no reader ever takes half of anything."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest
import torch
from weights.processes import (
    ChildBackend,
    FolderListener,
    FolderWriter,
    answer,
    fake,
    trained_fake,
)

from torchrl_llm.compat import vllm_weight_sync
from torchrl_llm.errors import ResourceError, WeightUpdateError
from torchrl_llm.weights import (
    CanaryCheck,
    FileWeights,
    FileWriter,
    VLLMDoubleBufferSyncScheme,
    engine_weights,
    shared_files,
)
from torchrl_llm.weights.shared_files import newest_update

WEIGHTS = {
    "model.a.weight": torch.randn(3, 2).bfloat16(),
    "model.a": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def read(folder):
    version, source = newest_update(folder)
    return version, dict(source.receive())


def test_what_the_weights_compute_is_found_with_them(tmp_path):
    told = CanaryCheck(fake()).target()
    writer = FileWriter(tmp_path)
    writer.write(WEIGHTS, version=1)
    assert newest_update(tmp_path)[1].canary is None
    writer.write(WEIGHTS, version=2, canary=told)
    version, source = newest_update(tmp_path)
    assert (version, source.canary.to_json()) == (2, told.to_json())


def test_what_is_written_is_read(tmp_path):
    writer = FileWriter(tmp_path / "new" / "folder")
    for version in (7, 8, 9):
        weights = {name: value * (version - 6) for name, value in WEIGHTS.items()}
        written = writer.write(weights, version=version)
        found_version, source = newest_update(writer.folder)
        found = dict(source.receive())
        assert (found_version, source.digest) == (version, written.digest)
        assert written.path.stat().st_mode == (writer.folder / "writer.lock").stat().st_mode
        assert set(found) == set(weights)
        for name, value in weights.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def test_the_last_two_versions_may_be_read_as_often_as_wanted(tmp_path):
    writer = FileWriter(tmp_path)
    written = [
        writer.write({"a": torch.full((2,), float(version))}, version=version)
        for version in (1, 2, 3)
    ]
    for version in (3, 2, 3):
        found = dict(written[version - 1].receive())
        assert found["a"].tolist() == [version, version]
    with pytest.raises(WeightUpdateError, match="is gone: the sender is two versions ahead"):
        list(written[0].receive())
    assert len(list(tmp_path.glob("weights-*"))) == 2


def test_other_weights_than_before_are_written_like_any(tmp_path):
    writer = FileWriter(tmp_path)
    for number in range(4):
        writer.write({f"a{number}": torch.ones(number + 1)}, version=number)
        version, found = read(tmp_path)
        assert (version, list(found)) == (number, [f"a{number}"])
        assert found[f"a{number}"].tolist() == [1.0] * (number + 1)


def test_bytes_that_are_not_those_of_the_header_are_refused(tmp_path):
    writer = FileWriter(tmp_path)
    weights = engine_weights(trained_fake(1))
    path = writer.write(weights, version=1).path
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    backend = fake()
    with pytest.raises(WeightUpdateError, match="was sent as"):
        backend.update_weights(newest_update(tmp_path)[1], version=1)
    assert answer(backend) == answer(fake())
    # A receiver that polls says so once, and waits for the next version.
    receiver = VLLMDoubleBufferSyncScheme(tmp_path).create_receiver(backend)
    with pytest.raises(WeightUpdateError, match="was sent as"):
        receiver.poll_and_apply(timeout=5)
    assert receiver.poll_and_apply(timeout=0) is False
    writer.write(weights, version=2)
    assert receiver.poll_and_apply(timeout=0) is True
    assert answer(backend) == answer(fake(1))


@pytest.mark.parametrize("content", [b"", b"[1,", b"\x02" + b"\0" * 7 + b"{}"])
def test_a_file_that_is_garbage_is_named(tmp_path, content):
    path = FileWriter(tmp_path).write({"a": torch.zeros(2)}, version=1).path
    path.write_bytes(content)
    with pytest.raises(WeightUpdateError, match=path.name):
        newest_update(tmp_path)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    source = FileWriter(tmp_path).write({"a": torch.zeros(2)}, version=1)
    source.path.write_bytes(source.path.read_bytes()[:-1])
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        list(source.receive())


def test_an_empty_folder_has_nothing_and_is_waited_for(tmp_path):
    assert newest_update(tmp_path) is None
    started = time.monotonic()
    receiver = VLLMDoubleBufferSyncScheme(tmp_path / "none").create_receiver(fake())
    assert receiver.poll_and_apply(timeout=0.2) is False
    assert time.monotonic() - started < 3


def test_the_first_file_of_another_sender_in_an_emptied_folder_is_taken(tmp_path):
    receiver = VLLMDoubleBufferSyncScheme(tmp_path).create_receiver(fake())
    for seed in (1, 2):
        writer = FileWriter(tmp_path)
        path = writer.write(engine_weights(trained_fake(seed)), version=1).path
        writer.close()
        assert receiver.poll_and_apply(timeout=0) is True
        assert answer(receiver.backend) == answer(fake(seed))
        assert receiver.poll_and_apply(timeout=0) is False
        path.unlink()


def test_a_receiver_that_the_sender_has_overtaken_looks_again(tmp_path, monkeypatch):
    writer = FileWriter(tmp_path)
    weights = engine_weights(trained_fake(1))
    late, *_ = [writer.write(weights, version=number) for number in (1, 2, 3)]
    receiver = VLLMDoubleBufferSyncScheme(tmp_path).create_receiver(fake())
    found = iter([(1, late), newest_update(tmp_path)])
    monkeypatch.setattr(vllm_weight_sync, "newest_update", lambda folder: next(found))
    assert receiver.poll_and_apply(timeout=0) is True
    assert receiver.version == 3


def test_only_one_sender_writes_to_a_folder(tmp_path):
    writer = FileWriter(tmp_path)
    with pytest.raises(ResourceError, match="another sender"):
        FileWriter(tmp_path)
    writer.close()
    FileWriter(tmp_path).close()


def test_a_full_disc_is_an_error_and_leaves_what_was_there(tmp_path, monkeypatch):
    writer = FileWriter(tmp_path)
    writer.write({"a": torch.ones(2)}, version=1)
    with monkeypatch.context() as patch:
        free = SimpleNamespace(free=5)
        patch.setattr(shared_files.shutil, "disk_usage", lambda path: free)
        with pytest.raises(ResourceError, match=r"needs 8 more bytes .* has 5"):
            writer.write({"a": torch.zeros(2)}, version=2)

    def full(*args, **options):
        raise shared_files.SafetensorError("No space left on device")

    monkeypatch.setattr(shared_files, "save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        writer.write({"a": torch.zeros(2)}, version=2)
    assert read(tmp_path)[0] == 1
    assert writer.last_version == 1


def test_a_sender_that_is_started_again_goes_on_where_the_last_one_ended(tmp_path):
    writer = FileWriter(tmp_path)
    first = writer.write({"a": torch.ones(1)}, version=5)
    writer.close()
    (tmp_path / f".{first.path.name}.0123abcd").touch()  # what a kill leaves
    again = FileWriter(tmp_path)
    assert again.last_version == 5
    assert again.write({"a": torch.ones(1)}, version=6).path > first.path
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_written_last_is_the_newest_also_where_a_resume_counts_versions_anew(tmp_path):
    for versions in ((5, 6, 1), (2,)):
        writer = FileWriter(tmp_path)
        for version in versions:
            writer.write({"a": torch.full((2,), float(version))}, version=version)
            found, weights = read(tmp_path)
            assert (found, weights["a"].tolist()) == (version, [version, version])
        writer.close()


def test_engines_that_see_the_folder_by_another_name_read_there(tmp_path):
    (tmp_path / "theirs").symlink_to(tmp_path / "ours")
    sampler = fake()
    folders = {"folder": tmp_path / "ours", "reader_folder": tmp_path / "theirs"}
    updater = FileWeights(sampler, **folders)
    updater.push_weights(trained_fake(1))
    assert answer(sampler) == answer(fake(1))
    (tmp_path / "theirs").unlink()
    with pytest.raises(WeightUpdateError, match="theirs"):
        updater.push_weights(trained_fake(2))
    assert (answer(sampler), updater.version) == (answer(fake(1)), 1)


# -- real processes -------------------------------------------------------------------------------


def test_engines_elsewhere_read_what_the_updater_wrote(tmp_path, children):
    engines = [ChildBackend(children(fake)) for _ in range(2)]
    updater = FileWeights(*engines, folder=tmp_path)
    for version in (1, 2, 3):
        updater.push_weights(trained_fake(version))
        assert [receipt.version for receipt in updater.receipts] == [version, version]
        assert [answer(engine) for engine in engines] == [answer(fake(version))] * 2
    updater.close()
    FileWriter(tmp_path).close()


def test_a_reader_never_takes_half_an_update_from_a_writer_that_never_pauses(tmp_path, children):
    writer = children(FolderWriter, tmp_path)
    writer.send("write_for", 3.0, 20)
    seen, late, deadline = set(), 0, time.monotonic() + 60
    while time.monotonic() < deadline and not writer.finished():
        try:
            found = newest_update(tmp_path)
            if found is None:
                continue
            weights = dict(found[1].receive())
        except WeightUpdateError:
            late += 1
            continue
        values = {float(value) for tensor in weights.values() for value in tensor.unique()}
        assert values == {float(found[0])}
        seen |= values
    written = writer.result()
    assert written >= 20
    # The reader was fast enough to have seen several whole ones.
    assert len(seen) > 1, (len(seen), late, written)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_sender_lost_while_it_writes_leaves_the_last_update_to_be_read(tmp_path, children, how):
    writer = children(FolderWriter, tmp_path)
    first = writer.call("write", 1.0, 1)
    writer.send("write_half", 2.0, how)
    _wait_for_draft(tmp_path)

    listener = children(FolderListener, tmp_path)
    assert listener.call("poll", 5) == (True, 1)
    assert listener.call("poll", 0.2) == (False, 1)
    assert read(tmp_path)[1]["head"].unique().tolist() == [1.0]

    writer.kill()
    successor = children(FolderWriter, tmp_path)
    assert successor.call("write", 3.0, 3) > first
    assert listener.call("poll", 5) == (True, 3)
    assert read(tmp_path)[1]["head"].unique().tolist() == [3.0]
    assert not list(tmp_path.glob(".*"))


def _wait_for_draft(folder):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if list(folder.glob(".weights-*")):
            time.sleep(0.2)
            return
        time.sleep(0.01)
    raise AssertionError("the sender never began")

"""Two slots on a shared disc: no reader ever takes half of anything."""

from __future__ import annotations

import json
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torchrl_llm.weights.double_buffer import newest_update
from weights.processes import (
    Child,
    ChildBackend,
    FolderListener,
    FolderWriter,
    answer,
    fake,
    trained_fake,
)

from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError
from torchrl_llm.weights import (
    CanaryCheck,
    DoubleBufferReceiver,
    DoubleBufferSource,
    DoubleBufferWeights,
    DoubleBufferWriter,
    double_buffer,
    engine_weights,
)


@pytest.fixture
def children():
    started = []

    def start(make, *arguments):
        started.append(Child(make, *arguments))
        return started[-1]

    yield start
    for child in started:
        child.kill()


WEIGHTS = {
    "model.a.weight": torch.randn(3, 2).bfloat16(),
    "model.a": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def test_what_the_weights_compute_is_found_with_them(tmp_path):
    told = CanaryCheck(fake()).target()
    writer = DoubleBufferWriter(tmp_path)
    writer.write(WEIGHTS, version=1)
    assert newest_update(tmp_path)[1].canary is None
    writer.write(WEIGHTS, version=2, canary=told)
    version, source = newest_update(tmp_path)
    assert (version, source.canary.to_json()) == (2, told.to_json())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_written_is_read(tmp_path, num_threads):
    writer = DoubleBufferWriter(tmp_path / "new" / "folder", num_threads=num_threads)
    for version in (7, 8, 9):
        weights = {name: value * (version - 6) for name, value in WEIGHTS.items()}
        header = writer.write(weights, version=version)
        source = DoubleBufferSource(writer.folder, num_threads=num_threads)
        found = dict(source.receive())
        assert (header.version, header.sequence) == (version, version - 6)
        assert source.digest == header.digest
        assert set(found) == set(weights)
        for name, value in weights.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
            assert type(found[name]) is torch.Tensor


def test_the_last_two_updates_may_be_read_as_often_as_wanted(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    for version in (1, 2, 3):
        writer.write({"a": torch.full((2,), float(version))}, version=version)
    for sequence in (3, 2, 3):
        found = dict(DoubleBufferSource(tmp_path, sequence=sequence).receive())
        assert found["a"].tolist() == [sequence, sequence]
    with pytest.raises(WeightUpdateError, match=r"update 1 is not in .* any more \(found 3\)"):
        list(DoubleBufferSource(tmp_path, sequence=1).receive())


def test_other_weights_than_before_make_the_slot_anew(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    for number in range(4):
        weights = {f"a{number}": torch.ones(number + 1)}
        writer.write(weights, version=number)
        found = dict(DoubleBufferSource(tmp_path).receive())
        assert {name: value.tolist() for name, value in found.items()} == {
            f"a{number}": [1.0] * (number + 1)
        }


def test_a_reader_that_is_overtaken_says_so_and_takes_nothing(tmp_path, monkeypatch):
    writer = DoubleBufferWriter(tmp_path)
    writer.write({"a": torch.zeros(2), "b": torch.zeros(2)}, version=1)
    backend, real = fake(), double_buffer._each

    def overtaken(num_threads, call, names):
        copies = real(num_threads, call, names)
        for version in (2, 3):
            writer.write({"a": torch.ones(2), "b": torch.ones(2)}, version=version)
        return copies

    source = DoubleBufferSource(tmp_path)
    monkeypatch.setattr(double_buffer, "_each", _once(overtaken, real))
    with pytest.raises(WeightUpdateError, match="overwritten while it was read"):
        backend.update_weights(source, version=1)


def _once(first, then):
    calls = []

    def call(*args):
        calls.append(1)
        return (first if len(calls) == 1 else then)(*args)

    return call


def test_bytes_that_are_not_those_of_the_header_are_refused(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    weights = engine_weights(trained_fake(1))
    writer.write(weights, version=1)
    path = tmp_path / "slot1" / "head.memmap"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    backend = fake()
    with pytest.raises(WeightUpdateError, match="was sent as"):
        backend.update_weights(DoubleBufferSource(tmp_path), version=1)
    assert answer(backend) == answer(fake())
    # A receiver tries a few times, in bounded time, then waits for the next update.
    receiver = DoubleBufferReceiver(backend, tmp_path)
    with pytest.raises(WeightUpdateError, match="was sent as"):
        receiver.poll_and_apply(timeout=5)
    assert receiver.poll_and_apply(timeout=0) is False
    writer.write(weights, version=2)
    assert receiver.poll_and_apply(timeout=0) is True
    assert answer(backend) == answer(fake(1))


def test_a_missing_file_and_a_header_that_is_garbage_are_named(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    writer.write({"a": torch.zeros(2)}, version=1)
    (tmp_path / "slot1" / "a.memmap").unlink()
    with pytest.raises(WeightUpdateError, match=r"update 1 .* cannot be read"):
        list(DoubleBufferSource(tmp_path).receive())
    assert not (tmp_path / "slot1" / "a.memmap").exists()
    (tmp_path / "slot0.json").write_text("[1,")
    with pytest.raises(WeightUpdateError, match=r"slot0.json is no header"):
        list(DoubleBufferSource(tmp_path).receive())


def test_an_empty_folder_has_nothing_and_is_waited_for(tmp_path):
    with pytest.raises(WeightUpdateError, match="nothing was ever written"):
        list(DoubleBufferSource(tmp_path).receive())
    started = time.monotonic()
    assert DoubleBufferReceiver(fake(), tmp_path / "none").poll_and_apply(timeout=0.2) is False
    assert time.monotonic() - started < 3


def test_only_one_sender_writes_to_a_folder(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    with pytest.raises(ResourceError, match="another sender"):
        DoubleBufferWriter(tmp_path)
    writer.close()
    DoubleBufferWriter(tmp_path).close()


def test_a_full_disc_is_an_error_and_not_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(double_buffer.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    with pytest.raises(ResourceError, match=r"needs 8 more bytes .* has 5"):
        DoubleBufferWriter(tmp_path).write({"a": torch.zeros(2)}, version=1)


def test_a_sender_that_is_started_again_goes_on_where_the_last_one_ended(tmp_path):
    writer = DoubleBufferWriter(tmp_path)
    writer.write({"a": torch.ones(1)}, version=5)
    writer.close()
    again = DoubleBufferWriter(tmp_path)
    assert again.last_version == 5
    assert again.write({"a": torch.ones(1)}, version=6).sequence == 2
    with pytest.raises(ConfigError, match="num_threads"):
        DoubleBufferWriter(tmp_path / "b", num_threads=0)


# -- real processes -------------------------------------------------------------------------------


def test_engines_elsewhere_read_what_the_updater_wrote(tmp_path, children):
    engines = [ChildBackend(children(fake)) for _ in range(2)]
    updater = DoubleBufferWeights(tmp_path, *engines)
    for version in (1, 2, 3):
        updater.push_weights(trained_fake(version))
        assert [receipt.version for receipt in updater.receipts] == [version, version]
        assert [answer(engine) for engine in engines] == [answer(fake(version))] * 2


def test_a_reader_never_takes_half_an_update_from_a_writer_that_never_pauses(tmp_path, children):
    writer = children(FolderWriter, tmp_path)
    writer.send("write_for", 3.0, 20)
    seen, torn, deadline = set(), 0, time.monotonic() + 60
    while time.monotonic() < deadline and not writer.finished():
        source = DoubleBufferSource(tmp_path)
        try:
            found = dict(source.receive())
        except WeightUpdateError:
            torn += 1
            continue
        values = {float(value) for tensor in found.values() for value in tensor.unique()}
        assert len(values) == 1, f"one update, {sorted(values)[:4]}"
        seen |= values
    written = writer.result()
    assert written >= 20
    # The reader was fast enough to have seen several whole ones.
    assert len(seen) > 1, (len(seen), torn, written)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_sender_lost_while_it_writes_leaves_the_last_update_to_be_read(tmp_path, children, how):
    writer = children(FolderWriter, tmp_path)
    assert writer.call("write", 1.0, 1) == 1
    writer.send("write_half", 2.0, how)
    _wait_for_header(tmp_path / "slot0.json")

    listener = children(FolderListener, tmp_path)
    assert listener.call("poll", 5) == (True, 1)
    assert listener.call("poll", 0.2) == (False, 1)
    assert dict(DoubleBufferSource(tmp_path).receive())["head"].unique().tolist() == [1.0]

    writer.kill()
    successor = children(FolderWriter, tmp_path)
    assert successor.call("write", 3.0, 3) == 2
    assert listener.call("poll", 5) == (True, 3)
    assert dict(DoubleBufferSource(tmp_path).receive())["head"].unique().tolist() == [3.0]


def _wait_for_header(path):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and json.loads(path.read_text())[-1] is None:
            time.sleep(0.2)
            return
        time.sleep(0.01)
    raise AssertionError("the sender never began")


def test_the_sender_reads_what_receivers_loaded(tmp_path, children):
    listener = children(FolderListener, tmp_path)
    listener.call("listen")
    writer = DoubleBufferWriter(tmp_path)
    header = writer.write(engine_weights(trained_fake(4)), version=11)
    deadline = time.monotonic() + 20
    while not writer.receipts() and time.monotonic() < deadline:
        time.sleep(0.02)
    [receipt] = writer.receipts().values()
    assert (receipt.version, receipt.digest) == (11, header.digest)
    assert listener.call("answer") == answer(fake(4))
    listener.call("stop")

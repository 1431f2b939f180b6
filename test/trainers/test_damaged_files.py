"""What a damaged or foreign file of a run's folder costs when the run goes on, and what is said."""

import json
import os
import random
import shutil
import zlib

import pytest
from trainers.test_run import Toy, rows

from torchrl_llm.errors import DamagedCheckpointError

COPY = "checkpoints/step_000006/metrics.csv"
STATE = "checkpoints/step_000006/trainer_state"


def half(data):
    return b"".join(data.splitlines(keepends=True)[:4])


def flipped_digit(data):
    return data[: data.rindex(b".")] + b"n" + data[data.rindex(b".") + 1 :]


@pytest.mark.parametrize("harm", [half, flipped_digit, lambda data: b""])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_damaged_copy_of_the_metrics_costs_no_step(tmp_path, harm, is_old, capsys):
    """Neither a row nor the checkpoint, also where an earlier version kept no checksum of it."""
    Toy(tmp_path, interval=2).train()
    before = rows(tmp_path)
    copy, manifest = (tmp_path / name for name in (COPY, f"{STATE}/manifest.json"))
    copy.write_bytes(harm(copy.read_bytes()))
    if is_old:
        told = json.loads(manifest.read_text())
        del told["checksums"]["metrics.csv"]
        manifest.write_text(json.dumps(told))
    run = Toy(tmp_path, interval=2, resume="auto").run
    assert run.step == 6
    assert rows(tmp_path) == before
    run.finish()
    said = capsys.readouterr().err
    assert is_old or f"{copy} is damaged or gone, and is not used" in said


def test_a_flipped_digit_in_the_metrics_is_mended_from_the_copy(tmp_path, capsys):
    Toy(tmp_path, interval=2).train()
    file, before = tmp_path / "metrics.csv", rows(tmp_path)
    file.write_bytes(flipped_digit(file.read_bytes()))
    Toy(tmp_path, interval=2, resume="auto").run.finish()
    assert rows(tmp_path) == before
    assert "metrics.csv is broken; mended from the checkpoint, to step 6" in capsys.readouterr().err


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_noticed_and_costs_no_more_than_it(tmp_path):
    """At random places of every file, tokenizer and configuration files too."""
    Toy(tmp_path / "run", interval=2, keep_last=3).train()
    good = rows(tmp_path / "run")
    draw = random.Random(0)
    newest = tmp_path / "run/checkpoints/step_000006"
    names = [file.relative_to(newest) for file in sorted(newest.rglob("*")) if file.is_file()]
    assert {"model.txt", "tokenizer.txt", "metrics.csv"} < set(map(str, names))
    for number, name in enumerate([name for name in names for _ in range(3)]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        file = folder / newest.relative_to(tmp_path / "run") / name
        data = bytearray(file.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        run = Toy(folder, interval=2, keep_last=3, resume="auto").run
        assert run.step == (6 if str(name) == "metrics.csv" else 4), (name, bit)
        assert rows(folder) == good[: run.step]
        assert (folder / "checkpoints/damaged_step_000006").exists() == (run.step == 4)


def as_folder(path):
    path.unlink()
    path.mkdir()
    (path / "left").write_text("by somebody")


def as_link_to_nowhere(path):
    path.unlink()
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("name", ["metrics.csv", "config.yaml", COPY, f"{STATE}/state.json"])
@pytest.mark.parametrize("harm", [as_folder, as_link_to_nowhere])
def test_a_folder_or_a_link_in_the_place_of_a_file_is_set_aside(tmp_path, name, harm, capsys):
    Toy(tmp_path, interval=2, keep_last=3, config={"a": 1}).train()
    before = rows(tmp_path)
    harm(tmp_path / name)
    run = Toy(tmp_path, interval=2, keep_last=3, resume="auto", config={"a": 1}).run
    assert run.step == (4 if name.endswith("state.json") else 6)
    assert rows(tmp_path) == before[: run.step]
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    run.finish()
    if harm is as_folder and "/" not in name:
        assert (tmp_path / f"damaged_{name}" / "left").read_text() == "by somebody"
        aside = f"{tmp_path}/{name} was a folder; it is now {tmp_path}/damaged_{name}"
        assert aside in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.csv", COPY, f"{STATE}/manifest.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    Toy(tmp_path, interval=2, keep_last=3).train()
    before = rows(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    run = Toy(tmp_path, interval=2, keep_last=3, resume="auto").run
    assert rows(tmp_path) == before[: run.step]
    assert run.step == (4 if name.endswith("manifest.json") else 6)


def value(plain, key):
    """The list ``[key, value]`` of a state's JSON."""
    return next(pair for pair in plain[1:] if pair[0] == key)


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: ["dict", ["hello", 1]],
        lambda plain: [*plain[:1], *(pair for pair in plain[1:] if pair[0] != "models")],
        lambda plain: value(plain, "step").__setitem__(1, 5) or plain,
        lambda plain: value(plain, "watch").__setitem__(1, "x") or plain,
        lambda plain: value(plain, "parts").__setitem__(1, ["list", 1]) or plain,
    ],
)
def test_a_foreign_state_with_the_right_checksum_is_set_aside_as_damaged(tmp_path, change, capsys):
    Toy(tmp_path, interval=2, keep_last=3).train()
    write_state(tmp_path, change)
    assert Toy(tmp_path, interval=2, keep_last=3, resume="auto").run.step == 4
    assert f"it is now {tmp_path}/checkpoints/damaged_step_000006" in capsys.readouterr().err


def test_a_part_that_gets_a_foreign_state_says_that_the_checkpoint_is_damaged(tmp_path):
    """The optimizer's state is a list: torch's own error would be a TypeError."""
    Toy(tmp_path, interval=2).train()

    def change(plain):
        value(value(plain, "parts")[1], "optimizer")[1] = ["dict", ["state", ["list", 1]]]
        return plain

    write_state(tmp_path, change)
    with pytest.raises(DamagedCheckpointError, match=r"step_000006 \(\w+: .*Rename that folder"):
        Toy(tmp_path, interval=2, resume="auto")


def write_state(folder, change):
    file, manifest = folder / STATE / "state.json", folder / STATE / "manifest.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    told = json.loads(manifest.read_text())
    told["checksums"]["trainer_state/state.json"] = zlib.crc32(file.read_bytes())
    manifest.write_text(json.dumps(told))

import errno
import json
import os
import pickle
import random
import zlib

import numpy
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import ContentBase, History
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import CheckpointError, DamagedCheckpointError
from torchrl_llm.trainers import checkpoint
from torchrl_llm.trainers.checkpoint import (
    CheckpointStore,
    load_rng_state,
    rng_state,
    save_pretrained,
)


def test_a_state_comes_back_bit_for_bit(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    weights = torch.randn(5)
    store.save(3, {"weights": weights, "nested": {"count": 7}})
    state = store.load()
    assert torch.equal(state["weights"], weights)
    assert state["nested"] == {"count": 7}
    assert store.steps() == [3]


def test_the_newest_are_kept_and_the_step_orders_them_not_the_name(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (9, 10, 1_000_000):
        store.save(step, {"step": step})
    assert store.steps() == [10, 1_000_000]
    assert store.load()["step"] == 1_000_000
    assert store.load(10)["step"] == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_half_one(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"step": 1})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    message = "step 2 could not be written.*No space left.*step 1 is intact.*resume=auto"
    with pytest.raises(CheckpointError, match=message):
        store.save(2, {"step": 2}, write_model=lambda path: (path / "w").touch())
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert store.load()["step"] == 1


def test_a_disk_that_fills_while_the_model_is_written_is_the_same_clear_error(tmp_path):
    store = CheckpointStore(tmp_path)

    def write(path):
        (path / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"No space left.*there is no earlier one"):
        store.save(1, {}, write_model=write)
    assert store.steps() == []
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_file_system_is_survived(tmp_path):
    import os
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root: sudo pytest test/trainers")
    try:
        store = CheckpointStore(mount / "checkpoints")
        store.save(1, {"weights": torch.ones(100_000)})
        with pytest.raises(CheckpointError, match="step 1 is intact"):
            store.save(2, {"weights": torch.ones(200_000)})
        assert torch.equal(store.load()["weights"], torch.ones(100_000))
        assert store.steps() == [1]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_what_a_killed_process_left_behind_is_never_taken_for_a_checkpoint(tmp_path):
    (tmp_path / ".partial_step_000005").mkdir()
    (tmp_path / ".deleted_step_000004").mkdir()
    (tmp_path / "step_x").mkdir()
    store = CheckpointStore(tmp_path)
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        store.load()
    store.save(5, {"step": 5})
    assert store.steps() == [5]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"value": 1})
    store.save(1, {"value": 2})
    assert store.load()["value"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


FILES = ("manifest.json", "state.json", "state.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_cut_short_or_of_something_else_is_a_clear_error(tmp_path, name):
    store = CheckpointStore(tmp_path)
    file = store.save(1, {"weights": torch.ones(3)}) / "trainer_state" / name
    data = file.read_bytes()
    for damaged in (b"", data[:-1], data[: len(data) // 2], b"[" * 100_000, b"not a checkpoint"):
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"cannot read the checkpoint|checksum"):
            store.load()
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"cannot read.*{name}"):
        store.load()


def test_every_flipped_bit_of_a_state_is_noticed(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = store.save(1, {"weights": torch.ones(3)}) / "trainer_state"
    for name in FILES[1:]:
        data = (folder / name).read_bytes()
        for bit in range(0, 8 * len(data), 7):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(flipped)
            with pytest.raises(DamagedCheckpointError):
                store.load()
        (folder / name).write_bytes(data)
    assert torch.equal(store.load()["weights"], torch.ones(3))


def rewrite(folder, plain=None, **manifest):
    """A checkpoint whose checksums are right, whatever was written into it."""
    file = folder / "trainer_state" / "manifest.json"
    if plain is not None:
        (folder / "trainer_state" / "state.json").write_text(json.dumps(plain))
    written = json.loads(file.read_text())
    for name in written["checksums"]:
        written["checksums"][name] = zlib.crc32((folder / name).read_bytes())
    file.write_text(json.dumps(written | manifest))


@pytest.mark.parametrize(
    "plain",
    [
        *([], {}, 7, ["list"], ["dict", ["a"]], ["dict", [["list"], 1]], ["tensor", 0], ["eval"]),
        ["dict", ["a", ["tensor", 0]], ["b", ["tensor", 0]]],  # one tensor in two places
        ["dict", ["a", ["tensor", -1]]],
        ["dict", ["a", ["rows", 0]]],
        ["dict", ["a", ["node", 0]]],
        ["dict", ["a", ["array", "O", [1], 0]]],
        ["dict", ["a", ["array", "float32", [1 << 60], 0]]],
        ["dict", ["a", ["spread", "x", [1], "load"]]],
        ["dict", ["a", ["enum", "os", 1]]],
    ],
)
def test_a_state_that_was_made_up_is_no_state_and_costs_nothing(tmp_path, plain):
    store = CheckpointStore(tmp_path)
    rewrite(store.save(1, {"weights": torch.ones(3)}), plain)
    with pytest.raises(DamagedCheckpointError):
        store.load()


def test_a_checkpoint_names_no_file_outside_of_it(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    (tmp_path / "secret").write_text("x")
    for name in ("../../secret", str(tmp_path / "secret")):
        rewrite(store.save(1, {}), checksums={name: zlib.crc32(b"x")})
        with pytest.raises(DamagedCheckpointError, match="which is not in it"):
            store.load()


def test_a_checkpoint_of_another_version_is_told_and_left_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    rewrite(store.save(1, {}), format=2)
    with pytest.raises(CheckpointError, match=r"format 2.*reads 1.*the version that wrote it"):
        store.load_newest_whole()
    old = store.save(1, {})
    (old / "trainer_state.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"earlier version.*model.name={old}"):
        store.load_newest_whole()
    assert store.steps() == [1]


def test_all_random_generators_continue_where_they_were():
    state = rng_state()

    def draw():
        return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()

    first = draw()
    draw()
    load_rng_state(state)
    assert draw() == first


def test_the_folder_opens_as_a_hugging_face_model_and_tokenizer(
    tmp_path, make_tiny_model, tokenizer
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_tiny_model()
    path = CheckpointStore(tmp_path).save(
        1, {}, write_model=lambda folder: save_pretrained(folder, model, tokenizer)
    )
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    text = "héllo\n wörld"
    assert AutoTokenizer.from_pretrained(path)(text).input_ids == tokenizer(text).input_ids


def test_a_lora_checkpoint_opens_without_peft_as_the_merged_model(
    tmp_path, make_tiny_model, tokenizer
):
    peft = pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    from transformers import AutoModelForCausalLM

    model = make_tiny_model()
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_pretrained(tmp_path, model, tokenizer)
    ids = torch.tensor([[1, 2, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded, "peft_config")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    # Saving must not round the weights that go on training.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_resuming_passes_over_a_damaged_checkpoint_and_keeps_it_apart(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"step": step, "weights": torch.ones(1000)})
    cut = tmp_path / "step_000003" / "trainer_state" / "state.safetensors"
    cut.write_bytes(cut.read_bytes()[:-500])
    flipped = tmp_path / "step_000002" / "trainer_state" / "state.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-2000] ^= 1  # safetensors itself reads this
    flipped.write_bytes(data)
    step, state, damaged = store.load_newest_whole()
    assert (step, state["step"]) == (1, 1)
    assert ["step_000003" in line for line in damaged] == [True, False]
    assert "checksum" in damaged[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("damaged_step_000002", "damaged_step_000003", "step_000001")
    ]


class Planted:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {self.folder}/planted",)


def test_reading_a_checkpoint_runs_no_code_that_was_planted_in_it(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for name in FILES:
        folder = store.save(1, {"weights": torch.ones(1)}) / "trainer_state"
        for write in (torch.save, lambda it, file: file.write_bytes(pickle.dumps(it))):
            write({"step": 1, "parts": Planted(tmp_path)}, folder / name)
            if name != "manifest.json":
                rewrite(folder.parent)
            with pytest.raises(CheckpointError):
                store.load()
    assert not (tmp_path / "planted").exists()
    pickle.loads(pickle.dumps(Planted(tmp_path)))
    assert (tmp_path / "planted").exists(), "or this test could not fail"


class Board:
    def __init__(self, cells):
        self.cells = cells


def test_a_state_that_could_not_be_read_again_is_refused_when_it_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    for state in ({"env": [1, Board([1])]}, {"env": [1, NonTensorData(Board([1]))]}):
        with pytest.raises(CheckpointError, match=r"state of env.1 cannot.*Board.*state_dict\(\)"):
            store.save(1, state)
    assert store.steps() == []
    store.save(1, {"env": [1, vars(Board([1]))]})
    assert store.load()["env"] == [1, {"cells": [1]}]


def test_values_of_every_kind_come_back_as_they_were(tmp_path):
    state = {
        "none": None,
        "floats": [0.1, float("inf"), -0.0, 1e-320],
        "big": 1 << 70,
        "text": "\ud800 é",
        "bytes": b"\x00\xff",
        (1, 2): {3, 4},
        "frozen": frozenset({"a"}),
        "numbers": [numpy.float32(0.1), numpy.int64(3), numpy.bool_(True)],
        "array": numpy.arange(6, dtype=numpy.uint32).reshape(2, 3)[:, ::2],
        "bf16": torch.tensor([0.1], dtype=torch.bfloat16),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "cut": torch.arange(6).view(2, 3).T,
    }
    store = CheckpointStore(tmp_path)
    store.save(1, state)
    back = store.load()
    assert list(back) == [*state, "ranks"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(back[name], value), name
            assert back[name].dtype == value.dtype
        elif isinstance(value, numpy.ndarray):
            assert (back[name] == value).all(), name
            assert back[name].dtype == value.dtype
        else:
            assert back[name] == value, name
    assert [type(number) for number in back["numbers"]] == [*map(type, state["numbers"])]


def test_rows_of_every_form_come_back_from_a_checkpoint(tmp_path):
    record = TokenRecord.from_prompt(torch.tensor([5]), torch.ones(1, dtype=torch.int8), 1)
    part = ContentBase(type="text", text="é")
    message = {"role": "user", "content": [part]}
    chat = History.from_chats([message]).chats[0].with_record(record)
    rows = ragged_rows({"ids": [torch.tensor([1, 2]), torch.tensor([3])]})
    rows.set("text", Column.of(["a", "b"]))
    rows.set("chat", Column.of([chat] * 2))
    board = TensorDict({"cells": torch.arange(6).view(2, 3)}, [2, 3])
    typed = History(messages=Column.of([chat] * 2), batch_size=[2])
    one = rows.clone(recurse=False)
    packed = pack_rows(lazy_stack([r.set("board", b) for r, b in zip(rows, board, strict=True)]))
    state = {"rows": one, "packed": packed, "typed": typed, "why": FinishReason.LENGTH}
    store = CheckpointStore(tmp_path)
    store.save(1, state)
    back = store.load()
    unpacked = back["packed"].unpack()
    for i in range(2):
        for other in (back["rows"][i], unpacked[i]):
            assert torch.equal(other["ids"], rows[i]["ids"])
            assert (other["text"], other["chat"]) == (rows[i]["text"], chat)
            assert torch.equal(other["chat"].record.token_ids, record.token_ids)
        assert torch.equal(unpacked[i]["board", "cells"], board[i]["cells"])
        assert back["typed"][i, -1].content[0].text == "é"
    assert back["why"] is FinishReason.LENGTH


def test_what_a_killed_process_left_behind_is_swept_away(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {})
    for name in (".partial_step_000002", ".deleted_step_000000", ".replaced_step_000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    store.sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert store.load() == {"ranks": [{}]}
    os.replace(store.path(1), tmp_path / ".replaced_step_000001")  # killed before the new one
    store.sweep()
    assert store.steps() == [1]

"""The buffer of rows, against TorchRL's where they must agree."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    SamplerWithoutReplacement,
)
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer
from torchrl.envs import Transform

from torchrl_llm.data import Chat, TokenRecord
from torchrl_llm.data.nodes import cell
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import MCAdvantage


def _row(i: int, *, group: int = 0, reward: float = 0.0, done: bool = True) -> TensorDict:
    record = TokenRecord.from_prompt(torch.arange(i + 1), torch.ones(i + 1), 1)
    return TensorDict(
        {
            "tokens": TensorDict({"response": torch.arange(i + 1), "full": torch.arange(i + 1)}),
            "chat": cell(Chat([{"role": "user", "content": f"q{i}"}], record)),
            "group_id": torch.tensor(group),
            "traj_id": torch.tensor(i),
            "next": TensorDict(
                {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
            ),
        }
    )


class _CountClones(Transform):
    """An inverse transform of another package, which changes what it is given."""

    def _inv_call(self, tensordict):
        tensordict.set("group_id", tensordict.get("group_id") + 100)
        return tensordict


def test_ragged_rows_and_text_come_back_from_a_sample():
    buffer = ReplayBuffer(batch_size=4)
    assert buffer.extend([_row(i) for i in range(4)]).tolist() == [0, 1, 2, 3]
    sample = buffer.sample()

    for ids, row in zip(read_rows(sample, ("tokens", "full")), sample.unbind(0), strict=True):
        assert row["chat"][0]["content"] == f"q{len(ids) - 1}"
        assert row["chat"].record.token_ids.tolist() == ids.tolist()


@pytest.mark.parametrize("form", ["lazy", "list", "rollout", "packed"])
def test_rows_are_taken_in_any_form(form):
    rows = [_row(i) for i in range(4)]
    data = {
        "lazy": lazy_rows(rows),
        "list": rows,
        "rollout": lazy_stack([lazy_rows(rows[:2]), lazy_rows(rows[2:])], 0),
        "packed": pack_rows(rows),
    }[form]
    buffer = ReplayBuffer()
    buffer.extend(data)

    assert [len(ids) for ids in read_rows(buffer[:], ("tokens", "full"))] == [1, 2, 3, 4]


def test_add_writes_one_row_or_tells_that_it_waits():
    buffer = ReplayBuffer()
    assert buffer.add(_row(0)) == 0
    waiting = ReplayBuffer(transform=MCAdvantage(2))
    assert waiting.add(_row(0)).numel() == 0
    assert waiting.add(_row(1)).tolist() == [0, 1]


def test_no_rows_written_means_no_index():
    buffer = ReplayBuffer(transform=MCAdvantage(4))
    assert buffer.extend([_row(0)]).tolist() == []
    assert len(buffer) == 0


def test_sampling_while_all_rows_wait_says_what_they_wait_for():
    buffer = ReplayBuffer(transform=MCAdvantage(grpo_size=3), batch_size=1)
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()
    buffer.extend([_row(0), _row(1)])
    with pytest.raises(RuntimeError, match=r"2 trajectories wait in MCAdvantage.*repeats=3"):
        buffer.sample()


def test_kept_rows_do_not_keep_their_batch_alive():
    whole = torch.arange(10_000)
    rows = [TensorDict({"x": part}) for part in whole.split(10)[:2]]
    buffer = ReplayBuffer()
    buffer.extend(rows)

    assert buffer[0]["x"].untyped_storage().nbytes() == 80


def test_keys_that_transforms_add_are_not_seen_by_the_caller():
    rows = [_row(0), _row(1)]
    ReplayBuffer(transform=MCAdvantage(2)).extend(lazy_rows(rows))
    assert "advantage" not in rows[0].keys()


def test_a_foreign_transform_does_not_change_the_callers_rows():
    rows = [_row(0, group=1), _row(1, group=2)]
    buffer = ReplayBuffer(transform=_CountClones())
    buffer.extend(lazy_rows(rows))

    assert buffer[:]["group_id"].tolist() == [101, 102]
    assert [row["group_id"].item() for row in rows] == [1, 2]


def test_inverse_transforms_run_last_appended_first_as_in_torchrl():
    for kind in (ReplayBuffer, TorchRLReplayBuffer):
        calls = []

        class Note(Transform):
            def __init__(self, name, calls=calls):
                super().__init__()
                self.name, self.calls = name, calls

            def _inv_call(self, tensordict):
                self.calls.append(self.name)
                return tensordict

        buffer = kind(storage=LazyStackStorage(), transform=Note("first"))
        buffer.append_transform(Note("second"))
        buffer.extend(lazy_rows([_row(0)]))
        assert calls == ["second", "first"]


def test_our_transforms_also_work_in_torchrls_own_buffer():
    buffer = TorchRLReplayBuffer(storage=LazyStackStorage(), transform=MCAdvantage(2))
    assert buffer.extend(lazy_rows([_row(0)])).numel() == 0
    buffer.extend(lazy_rows([_row(1, reward=1.0)]))
    # rewards 0 and 1: mean 1/2, sample deviation 1/sqrt 2
    assert torch.allclose(buffer[:]["advantage"].flatten(), torch.tensor([-1.0, 1.0]) / 2**0.5)
    stock = TorchRLReplayBuffer(storage=ListStorage(10), batch_size=2)
    stock.extend([_row(0), _row(0)])
    assert stock.sample()["tokens", "full"].shape == (2, 1)


def test_a_storage_that_would_lose_text_is_refused(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"LazyMemmapStorage would lose .*'text'"):
        ReplayBuffer(storage=storage).extend([TensorDict({"text": NonTensorData("a")})] * 2)
    with pytest.raises(ConfigError, match=r"LazyTensorStorage holds rows of one shape"):
        ReplayBuffer(storage=LazyTensorStorage(4)).extend(
            [TensorDict({"ids": torch.ones(2)}), TensorDict({"ids": torch.ones(3)})]
        )


def test_dense_rows_may_go_to_a_memmap_storage(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path), batch_size=2)
    buffer.extend([TensorDict({"ids": torch.full((3,), i)}) for i in range(4)])
    assert buffer[:]["ids"].tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]


def test_a_list_storage_hands_out_lazy_rows():
    buffer = ReplayBuffer(storage=ListStorage(4), batch_size=3)
    buffer.extend([_row(i) for i in range(3)])
    assert len(read_rows(buffer.sample(), ("tokens", "full"))) == 3


def test_an_argument_without_effect_is_an_error():
    with pytest.raises(ConfigError, match="update_priority"):
        ReplayBuffer().extend([_row(0)], update_priority=True)
    with pytest.raises(TypeError):
        ReplayBuffer(batchsize=3)


def _filled(storage_size: int = 8) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyStackStorage(storage_size),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
        generator=torch.Generator().manual_seed(3),
        transform=MCAdvantage(2),
    )
    buffer.append_transform(JoinTurns())
    buffer.extend([_row(i, group=i // 2, reward=float(i)) for i in range(6)])
    buffer.extend([_row(6, group=9), _row(7, done=False)])  # one waits for its group, one for done
    return buffer


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_restored_buffer_goes_on_exactly(way, tmp_path):
    buffer = _filled()
    buffer.sample()
    other = ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
        generator=torch.Generator().manual_seed(99),
        transform=MCAdvantage(2),
    )
    other.append_transform(JoinTurns())
    if way == "dumps":
        buffer.dumps(tmp_path / "rb")
        other.loads(tmp_path / "rb")
    else:
        path = tmp_path / "state.pt"
        torch.save(buffer.state_dict(), path)
        other.load_state_dict(torch.load(path, weights_only=False))

    assert other[:]["advantage"].tolist() == buffer[:]["advantage"].tolist()
    assert [row["chat"] for row in other[:].unbind(0)] == [
        row["chat"] for row in buffer[:].unbind(0)
    ]
    assert other[2]["chat"].record.token_ids.tolist() == [0, 1, 2]
    for one in (buffer, other):  # the waiting row finds its group, the open trajectory ends
        one.extend([_row(8, group=9, reward=1.0), _row(7, group=5)])
    for _ in range(5):  # over the end of an epoch and over the wrap of the storage
        got, expected = other.sample(), buffer.sample()
        assert got["traj_id"].tolist() == expected["traj_id"].tolist()
    assert len(other) == len(buffer) == 8
    assert other.transform[0].get_stats() == buffer.transform[0].get_stats()
    assert other.transform[1].get_stats() == buffer.transform[1].get_stats()


def test_an_empty_buffer_has_a_state_too():
    other = _filled()
    other.load_state_dict(ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
        generator=torch.Generator(),
        transform=MCAdvantage(2),
    ).append_transform(JoinTurns()).state_dict())  # fmt: skip
    assert len(other) == 0


def test_a_failed_dump_leaves_the_earlier_one(tmp_path, monkeypatch):
    buffer = _filled()
    buffer.dumps(tmp_path)

    def full_disk(state, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("torchrl_llm.data.replay_buffers.buffer.torch.save", full_disk)
    with pytest.raises(OSError, match="space"):
        buffer.dumps(tmp_path)
    monkeypatch.undo()
    other = _filled()
    other.loads(tmp_path)
    assert len(other) == 6


def test_a_shared_buffer_refuses_transforms_with_queues():
    with pytest.raises(RuntimeError, match="share_memory_"):
        ReplayBuffer(shared=True, transform=MCAdvantage(2))

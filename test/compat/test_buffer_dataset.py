"""A replay buffer as a dataset for other trainers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data import ListStorage
from torchrl.data import ReplayBuffer as TorchRLBuffer

from torchrl_llm.data import ChatHistory, History, TorchRLBufferDataset
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture
def buffer():
    history = ChatHistory(full=History.from_chats([CHAT, CHAT]), batch_size=[2])
    rows = TensorDict(
        {
            "tokens": TensorDict({"full": torch.tensor([[1, 2, 3], [4, 5, 6]])}, batch_size=[2]),
            "prompt": ["a", "b"],
            "history": history,
            "advantage": torch.tensor([[[1.0]], [[-1.0]]]),
        },
        batch_size=[2],
    )
    buffer = ReplayBuffer()
    buffer.extend(rows)
    return buffer


def test_rows_come_one_by_one_as_flat_dicts(buffer):
    rows = list(TorchRLBufferDataset(buffer, batch_size=8))
    assert len(rows) == 8
    seen = {row["prompt"]: row for row in rows}
    assert seen.keys() <= {"a", "b"}
    for prompt, row in seen.items():
        assert row["tokens.full"].tolist() == ([1, 2, 3] if prompt == "a" else [4, 5, 6])
        assert row["advantage"].item() == (1.0 if prompt == "a" else -1.0)
        assert row["history.full.messages"] == CHAT
        assert isinstance(row["prompt"], str)


def test_rows_keep_their_own_length():
    buffer = ReplayBuffer()
    buffer.extend([TensorDict(ids=torch.arange(n)) for n in (2, 5)])
    lengths = {len(row["ids"]) for row in TorchRLBufferDataset(buffer, batch_size=32)}
    assert lengths == {2, 5}


def test_the_columns_can_be_chosen_and_must_be_there(buffer):
    data = TorchRLBufferDataset(buffer, 1, keys=[("tokens", "full"), "prompt"])
    assert [sorted(row) for row in data] == [["prompt", "tokens.full"]]
    with pytest.raises(DataError, match=r"completion.*history\.full"):
        list(TorchRLBufferDataset(buffer, 1, keys=["completion"]))


def test_draws_end_or_do_not(buffer):
    assert len(list(TorchRLBufferDataset(buffer, 3, num_batches=2))) == 6
    endless = iter(TorchRLBufferDataset(buffer, 3, num_batches=None))
    assert len([next(endless) for _ in range(50)]) == 50


def test_torchs_loader_and_torchrls_own_buffer_work(buffer):
    data = TorchRLBufferDataset(buffer, 4, keys=[("tokens", "full")], device="cpu")
    (batch,) = DataLoader(data, batch_size=4)
    assert batch["tokens.full"].shape == (4, 3)
    other = TorchRLBuffer(storage=ListStorage(4), batch_size=2)
    other.extend(TensorDict({"x": torch.arange(4)}, batch_size=[4]))
    assert all(row["x"].shape == () for row in TorchRLBufferDataset(other, 2))


def test_hugging_face_reads_it(buffer):
    pytest.importorskip("datasets")
    data = TorchRLBufferDataset(buffer, 4, keys=["prompt"]).as_hf_dataset()
    assert {row["prompt"] for row in data} <= {"a", "b"}


def test_what_is_no_buffer_is_refused():
    with pytest.raises(ConfigError, match="replay_buffer"):
        TorchRLBufferDataset([], 4)

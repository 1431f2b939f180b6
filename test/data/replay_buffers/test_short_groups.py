"""Groups of which not every member comes, as of players who need not act."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.objectives.credit import MCAdvantage


def row(group, number, reward):
    ends = {"reward": torch.full((1, 1), reward), "done": torch.ones(1, dtype=torch.bool)}
    ids = {"group_id": torch.tensor(group), "traj_id": torch.tensor(number)}
    return TensorDict(**ids, agent=NonTensorData("B"), next=TensorDict(**ends))


@pytest.mark.parametrize("whole", [False, True])
def test_a_group_that_is_short_is_given_up_where_nothing_more_comes(whole):
    credit = MCAdvantage(3)
    credit.whole_groups = whole
    buffer = ReplayBuffer(transform=credit)
    buffer.extend(lazy_rows([row(n // 3, n, float(n)) for n in range(5)]))
    stats = credit.get_stats()
    assert len(buffer) == 3
    assert stats["queued_trajectories"] == (0 if whole else 2)
    assert stats["unfilled_trajectories"] == (2 if whole else 0)
    assert stats["unfilled_groups"] == whole

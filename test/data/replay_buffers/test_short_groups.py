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


@pytest.mark.parametrize("short", [False, True])
def test_a_group_that_is_short_is_compared_as_it_is_where_nothing_more_comes(short):
    rows = [row(0, n, float(n)) for n in range(3)] + [row(1, 3, 1.0)]
    credit = MCAdvantage(4)
    credit.short_groups = short
    buffer = ReplayBuffer(transform=credit)
    buffer.extend(lazy_rows(rows))
    stats = credit.get_stats()
    if not short:
        assert (len(buffer), stats["queued_trajectories"]) == (0, 4)
        return
    whole = ReplayBuffer(transform=MCAdvantage(3))
    whole.extend(lazy_rows(rows[:3]))
    expected, found = (
        torch.stack([r["advantage"] for r in b[:].unbind(0)]) for b in (whole, buffer)
    )
    torch.testing.assert_close(found, expected)
    # One that has nobody to be compared with is given up, and nothing waits.
    assert (stats["queued_groups"], stats["unfilled_trajectories"]) == (0, 1)

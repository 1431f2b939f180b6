"""Only the best answers to a prompt are kept."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data import TopKRewardSelector
from torchrl_llm.data.nodes import cell
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.errors import ConfigError


def _row(reward, *, group=0, done=True, traj=None, text=None):
    row = TensorDict(
        {
            "tokens": TensorDict({"response": torch.arange(2)}),
            "next": TensorDict(
                {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
            ),
        }
    )
    if text is None:
        row["group_id"] = torch.tensor(group)
    else:
        row["text"] = TensorDict({"prompt": cell(text)})
    if traj is not None:
        row["traj_id"] = torch.tensor(traj)
    return row


def _kept(rows, total, topk, **options):
    selector = TopKRewardSelector(total, topk, verbose=False, **options)
    buffer = ReplayBuffer(transform=selector)
    buffer.extend(rows)
    kept = [r["next", "reward"].item() for r in buffer[:].unbind(0)] if len(buffer) else []
    return kept, selector


def test_the_best_above_the_median_are_written():
    # median of 1 2 3 4 5 is 3: of the best three only 5 and 4 are above it
    kept, selector = _kept([_row(float(r)) for r in (3, 1, 5, 2, 4)], 5, 3)
    assert kept == [5.0, 4.0]
    assert selector.get_stats()["filtered_tokens"] == 6


def test_with_an_even_number_the_median_lies_between():
    # median of 0 0 1 1 is 0.5
    kept, _ = _kept([_row(float(r)) for r in (0, 1, 0, 1)], 4, 4)
    assert kept == [1.0, 1.0]


def test_equal_rewards_keep_nothing():
    kept, selector = _kept([_row(1.0)] * 4, 4, 2)
    assert kept == []
    assert selector.get_stats()["filtered_groups"] == 1


def test_turns_count_and_a_trajectory_is_kept_whole():
    rows = [
        _row(0.0, traj=0, done=False),
        _row(3.0, traj=0),  # return 3 in two turns
        _row(1.0, traj=1),
        _row(2.0, traj=2),
    ]
    assert _kept(rows, 4, 1)[0] == [0.0, 3.0]


def test_groups_are_apart_and_wait_until_they_are_full():
    rows = [_row(float(i), group=i % 2) for i in range(5)]
    kept, selector = _kept(rows, 3, 1)
    assert kept == [4.0]  # rewards 0, 2, 4 of group 0
    assert selector.get_stats()["queued_trajectories"] == 2


def test_without_group_id_the_prompt_text_groups():
    kept, _ = _kept([_row(float(i), text="ab"[i % 2]) for i in range(4)], 2, 1)
    assert kept == [2.0, 3.0]


def test_invalid_answers_are_never_the_best():
    kept, selector = _kept([_row(float("inf")), _row(0.0), _row(1.0)], 3, 1)
    assert kept == [1.0]
    assert selector.get_stats()["invalid_tokens"] == 2


def test_more_than_there_is_cannot_be_kept():
    with pytest.raises(ConfigError, match="topk_size"):
        TopKRewardSelector(2, 3)

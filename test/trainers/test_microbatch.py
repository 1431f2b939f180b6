from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.trainers.optim import (
    micro_batches,
    plan_micro_batches,
    plan_packed_batches,
)


def test_every_row_appears_once_and_pieces_stay_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    pieces = plan_micro_batches(lengths, 128)
    assert sorted(row for piece in pieces for row in piece) == list(range(200))
    for piece in pieces:
        assert len(piece) * max(lengths[row] for row in piece) <= 128


def test_rows_of_like_length_go_together_longest_first():
    # budget 18: 9 + 8 pad to 2 x 9 = 18; a third row would need 27.
    assert plan_micro_batches([2, 9, 3, 8], 18) == [[1, 3], [2, 0]]


@pytest.mark.parametrize("plan", [plan_micro_batches, plan_packed_batches])
def test_a_row_longer_than_the_budget_goes_alone_and_a_budget_below_one_is_refused(plan):
    assert plan([5, 100, 5], 10) == [[1], [0, 2]]
    assert plan([], 10) == []
    with pytest.raises(ValueError, match="at least 1"):
        plan([1], 0)


def test_pieces_share_the_rows_of_the_batch():
    rows = lazy_rows([TensorDict({("tokens", "full"): torch.arange(n)}) for n in (4, 2, 3)])
    pieces = micro_batches(rows, budget=6)
    lengths = [[ids.shape[0] for ids in read_rows(p, ("tokens", "full"))] for p in pieces]
    assert lengths == [[4], [3, 2]]
    assert pieces[0].unbind(0)[0] is rows.unbind(0)[0]
    assert micro_batches(rows) == [rows] or micro_batches(rows)[0] is rows


def test_packed_pieces_count_tokens_and_hold_every_row_once():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    groups = [row % 25 for row in range(200)]
    pieces = plan_packed_batches(lengths, 128, groups)
    assert sorted(row for piece in pieces for row in piece) == list(range(200))
    assert max(sum(lengths[row] for row in piece) for piece in pieces) <= 128
    assert len(pieces) < len(plan_packed_batches(lengths, 64, groups))


def test_rows_of_a_group_stay_together_in_packed_pieces():
    # Group b has the longest row (9) and comes first: 9 + 3 = 12, and 8 more would pass 15.
    assert plan_packed_batches([4, 9, 3, 8], 15, groups=["a", "b", "b", "a"]) == [[1, 2], [3, 0]]
    # Without groups rows go by length: 9, then 8 + 4 + 3 = 15.
    assert plan_packed_batches([4, 9, 3, 8], 15) == [[1], [3, 0, 2]]


def test_micro_batches_of_a_packed_layout_follow_the_groups_of_their_rows():
    rows = lazy_rows(
        [
            TensorDict({("tokens", "full"): torch.arange(n), "group_id": torch.tensor(group)})
            for n, group in ((4, 7), (2, 8), (3, 7), (1, 8))
        ]
    )
    pieces = micro_batches(rows, budget=7, layout="auto")
    assert [[int(g) for g in read_rows(p, "group_id")] for p in pieces] == [[7, 7], [8, 8]]

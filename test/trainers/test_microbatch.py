from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.trainers.microbatch import micro_batches, plan_micro_batches


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


def test_a_row_longer_than_the_budget_goes_alone():
    assert plan_micro_batches([5, 100, 5], 10) == [[1], [0, 2]]


def test_no_budget_means_one_piece_in_the_given_order():
    assert plan_micro_batches([3, 1, 2], None) == [[0, 1, 2]]
    assert plan_micro_batches([], None) == []
    assert plan_micro_batches([], 10) == []


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([1], 0)


def test_pieces_share_the_rows_of_the_batch():
    rows = lazy_rows([TensorDict({("tokens", "full"): torch.arange(n)}) for n in (4, 2, 3)])
    pieces = micro_batches(rows, budget=6)
    lengths = [[ids.shape[0] for ids in read_rows(p, ("tokens", "full"))] for p in pieces]
    assert lengths == [[4], [3, 2]]
    assert pieces[0].unbind(0)[0] is rows.unbind(0)[0]
    assert micro_batches(rows) == [rows] or micro_batches(rows)[0] is rows

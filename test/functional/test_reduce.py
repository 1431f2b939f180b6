from __future__ import annotations

import itertools

import pytest
import torch

from torchrl_llm.functional import Normalizer, aggregate, token_weights
from torchrl_llm.functional.reduce import MODES

# Rows of 3, 1 and 0 tokens.
VALUES = torch.tensor([1.0, 2.0, 6.0, 11.0])
ROWS = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 20 / 4),
        ("sequence_mean", (9 / 3 + 11) / 2),
        ("sequence_sum", (9 + 11) / 2),
        ("constant", (9 + 11) / (2 * 5)),
    ],
)
def test_modes_by_hand(mode, expected):
    length = 5 if mode == "constant" else None
    got = aggregate(VALUES, ROWS, 3, mode, constant_length=length)
    assert got.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_micro_batches_adds_up(mode):
    torch.manual_seed(1)
    lengths = [3, 1, 5, 2]
    values = torch.randn(sum(lengths))
    parts = values.split(lengths)
    length = 5 if mode == "constant" else None
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    whole = aggregate(values, rows, 4, mode, constant_length=length)
    normalizer = Normalizer.of(lengths)
    for split in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0, 2], [1]]):
        total = 0.0
        for group in split:
            index = torch.cat([torch.full((lengths[b],), i) for i, b in enumerate(group)])
            total += aggregate(
                torch.cat([parts[b] for b in group]),
                index,
                len(group),
                mode,
                normalizer=normalizer,
                constant_length=length,
            )
        torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_rows_does_not_matter(mode):
    lengths = torch.tensor([2, 3, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    parts = values.split(lengths.tolist())
    results = []
    for order in itertools.permutations(range(3)):
        index = torch.repeat_interleave(torch.arange(3), lengths[list(order)])
        shuffled = torch.cat([parts[b] for b in order])
        results.append(aggregate(shuffled, index, 3, mode, constant_length=4).item())
    assert results == pytest.approx([results[0]] * 6)


def test_rows_without_tokens_do_not_count_as_sequences():
    assert Normalizer.of([3, 0, 1]) == Normalizer(num_tokens=4, num_sequences=2)
    got = aggregate(VALUES, ROWS, 3, "sequence_mean")
    assert got == aggregate(VALUES, ROWS, 2, "sequence_mean")


def test_each_sequence_has_the_same_gradient_mass_under_sequence_mean():
    values = VALUES.clone().requires_grad_()
    aggregate(values, ROWS, 3, "sequence_mean").backward()
    torch.testing.assert_close(values.grad, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match="nothing to average"):
        aggregate(torch.zeros(0), torch.zeros(0, dtype=torch.long), 2, "token_mean")
    with pytest.raises(ValueError, match="constant_length"):
        aggregate(VALUES, ROWS, 3, "constant")
    with pytest.raises(ValueError, match="mode must be one of"):
        token_weights(None, "mean", Normalizer(1, 1))
    with pytest.raises(ValueError, match="length of each token"):
        token_weights(None, "sequence_mean", Normalizer(1, 1))

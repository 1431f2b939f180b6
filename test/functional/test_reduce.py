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
        # Rows 0 and 2 share a prompt: (9 / 3 + 11) / 2 again, for row 2 has no token.
        ("prompt_mean", (9 / 3 + 11) / 2),
        ("sequence_mean", (9 / 3 + 11) / 2),
        ("sequence_sum", (9 + 11) / 2),
        ("constant", (9 + 11) / (2 * 5)),
    ],
)
def test_modes_by_hand(mode, expected):
    length = 5 if mode == "constant" else None
    groups = torch.tensor([4, 9, 4])
    got = aggregate(VALUES, ROWS, 3, mode, constant_length=length, group_S=groups)
    assert got.item() == pytest.approx(expected)


def test_prompt_mean_by_hand():
    # Prompt 7 has the rows of 3 and 1 tokens, (1 + 2 + 6 + 11) / 4; prompt 8 has (3 - 1) / 2.
    values = torch.cat([VALUES, torch.tensor([3.0, -1.0])]).double().requires_grad_()
    rows, groups = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([7, 7, 8])
    got = aggregate(values, rows, 3, "prompt_mean", group_S=groups)
    assert got.item() == pytest.approx((5 + 1) / 2, abs=1e-12)
    got.backward()
    expected = torch.tensor([1 / 8] * 4 + [1 / 4] * 2, dtype=torch.double)
    torch.testing.assert_close(values.grad, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_micro_batches_adds_up(mode):
    torch.manual_seed(1)
    lengths = [3, 1, 5, 2]
    values = torch.randn(sum(lengths))
    parts = values.split(lengths)
    length = 5 if mode == "constant" else None
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    groups = torch.tensor([5, 6, 5, 6])
    whole = aggregate(values, rows, 4, mode, constant_length=length, group_S=groups)
    normalizer = Normalizer.of(lengths, groups.tolist())
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
                group_S=groups[group],
            )
        torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_rows_does_not_matter(mode):
    lengths = torch.tensor([2, 3, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    parts = values.split(lengths.tolist())
    groups = torch.tensor([5, 6, 5])
    results = []
    for order in itertools.permutations(range(3)):
        index = torch.repeat_interleave(torch.arange(3), lengths[list(order)])
        shuffled = torch.cat([parts[b] for b in order])
        got = aggregate(shuffled, index, 3, mode, constant_length=4, group_S=groups[list(order)])
        results.append(got.item())
    assert results == pytest.approx([results[0]] * 6)


def test_rows_without_tokens_do_not_count_as_sequences():
    assert Normalizer.of([3, 0, 1]) == Normalizer(num_tokens=4, num_sequences=2)
    got = aggregate(VALUES, ROWS, 3, "sequence_mean")
    assert got == aggregate(VALUES, ROWS, 2, "sequence_mean")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 20 / 4),
        # Row 2 has a prompt of its own, 9 / 3 + 11 + 0 over three.
        ("prompt_mean", 14 / 3),
        ("sequence_mean", (9 / 3 + 11) / 3),
        ("sequence_sum", (9 + 11) / 3),
        ("constant", (9 + 11) / (3 * 5)),
    ],
)
def test_rows_without_tokens_may_count_as_sequences(mode, expected):
    length = 5 if mode == "constant" else None
    groups = torch.tensor([4, 9, 7])
    settings = {"constant_length": length, "group_S": groups}
    got = aggregate(VALUES, ROWS, 3, mode, count_empty=True, **settings)
    assert got.item() == pytest.approx(expected)
    normalizer = Normalizer.of([3, 1, 0], groups.tolist(), count_empty=True)
    assert normalizer == (4, 3, {4: 3, 9: 1, 7: 0})
    got = aggregate(VALUES, ROWS, 3, mode, normalizer=normalizer, **settings)
    assert got.item() == pytest.approx(expected)
    # The same of two pieces, the second of which has nothing.
    parts = [Normalizer.of([3, 1], [4, 9], count_empty=True)]
    parts.append(Normalizer.of([0], [7], count_empty=True))
    assert parts[0].plus(parts[1]) == normalizer


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
    with pytest.raises(ValueError, match="prompt group of each row"):
        aggregate(VALUES, ROWS, 3, "prompt_mean")
    with pytest.raises(ValueError, match="counts prompt groups"):
        token_weights(torch.ones(1), "prompt_mean", Normalizer(1, 1))
    # Rows of prompt 2, and the counts of a batch that has none.
    other, groups = Normalizer(4, 2, {0: 4}), torch.tensor([0, 0, 2])
    with pytest.raises(ValueError, match=r"does not count the prompt groups \[2\]"):
        aggregate(
            VALUES, torch.tensor([0, 0, 0, 2]), 3, "prompt_mean", normalizer=other, group_S=groups
        )


def test_counts_of_prompts_add_up_as_the_others_do():
    parts = Normalizer.of([3, 0], [5, 6]), Normalizer.of([2, 4], [5, 7])
    assert parts[0].plus(parts[1]) == Normalizer.of([3, 0, 2, 4], [5, 6, 5, 7])
    assert parts[0].group_tokens == {5: 3}
    with pytest.raises(ValueError, match="the other does not"):
        parts[0].plus(Normalizer.of([1]))


@pytest.mark.parametrize("mode", MODES)
def test_float64_stays_exact(mode):
    values = torch.linspace(-1, 1, 4, dtype=torch.double)
    groups, w = torch.tensor([0, 0, 0]), {"prompt_mean": [1 / 4] * 4, "token_mean": [1 / 4] * 4}
    w |= {"sequence_mean": [1 / 6] * 3 + [1 / 2], "sequence_sum": [1 / 2] * 4}
    w["constant"] = [1 / 14] * 4
    got = aggregate(values, ROWS, 3, mode, constant_length=7, group_S=groups)
    assert got.dtype == torch.double
    expected = sum(x * y for x, y in zip(values.tolist(), w[mode], strict=True))
    assert got.item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_it_compiles_in_one_graph(mode):
    compiled = torch.compile(aggregate, fullgraph=True, backend="eager")
    groups = torch.tensor([4, 9, 4])
    got = compiled(VALUES, ROWS, 3, mode, constant_length=5, group_S=groups)
    assert got == aggregate(VALUES, ROWS, 3, mode, constant_length=5, group_S=groups)

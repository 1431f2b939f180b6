"""Weights of rows in supervised losses."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import TableActor, make_row, make_rows, pad
from tensordict import TensorDict

from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import CompositeLoss, DistillationLoss, SFTLoss, check_invariance

MEANS = [
    {"reduction": "mean"},
    {"reduction": "mean", "normalize_by_seq_length": False},
    {"reduction": "token_mean"},
    {"reduction": "mean", "loss_function": "minor_sft"},
    {"reduction": "mean", "kl_to_ref_coeff": 0.7},
    {"reduction": "token_mean", "kl_to_ref_coeff": 0.7},
]
every_mean = pytest.mark.parametrize("settings", MEANS)


def weigh(rows, *weights):
    for row, weight in zip(rows.tensordicts, weights, strict=True):
        row["loss_weight"] = torch.as_tensor(weight)
    return rows


def two_rows(*weights, **settings):
    """Assistant tokens: ids 1 and 2 in the first row, id 3 in the second."""
    rows = make_rows(make_row([5, 1, 2], 1, **settings), make_row([5, 6, 3], 2, **settings))
    return weigh(rows, *weights) if weights else rows


def actor():
    return TableActor([-9.0, -1.0, -3.0, -5.0, -9.0, -9.0, -9.0, -9.0])


def many_rows(lengths=(3, 1, 7, 2, 5, 4, 11)):
    """Rows without weights, of random ids and references."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 20, (length + 1,), generator=generator).tolist()
        ref = torch.randn(length + 1, generator=generator) - 3
        rows.append(make_row(ids, 1, ref=ref))
    return make_rows(*rows)


def random_actor():
    return TableActor(torch.randn(20, generator=torch.Generator().manual_seed(1)) - 3)


def outcome(settings, rows, make=SFTLoss):
    model = random_actor()
    total = make(model, **settings)(rows).total_loss()
    total.backward()
    return total.detach(), model.table.grad


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Rows of 2 and 5 a token, of 4 and 5 in sum, with the weights 3 and 1/2.
        ({}, (3 * 2 + 0.5 * 5) / 3.5),
        ({"normalize_by_seq_length": False}, (3 * 4 + 0.5 * 5) / 3.5),
        # Tokens of 1, 3 (weight 3) and 5 (weight 1/2).
        ({"reduction": "token_mean"}, (3 * 1 + 3 * 3 + 0.5 * 5) / 6.5),
        ({"reduction": "sum"}, 3 * 2 + 0.5 * 5),
        ({"reduction": "none"}, [3 * 2, 0.5 * 5]),
    ],
)
def test_values_by_hand(settings, expected):
    for dtype in [torch.float32, torch.float64, torch.bfloat16]:
        rows = two_rows(*torch.tensor([3.0, 0.5], dtype=dtype))
        loss = SFTLoss(actor(), **settings)(rows).loss_sft
        assert loss.dtype is torch.float32
        assert loss.tolist() == pytest.approx(expected)


def test_gradients_by_hand():
    model = actor()
    SFTLoss(model)(two_rows(3.0, 0.5)).total_loss().backward()
    expected = torch.zeros(8)
    expected[1] = expected[2] = -3 / 3.5 / 2
    expected[3] = -0.5 / 3.5
    torch.testing.assert_close(model.table.grad, expected)


def test_minor_sft_and_the_divergence_are_weighted():
    output = SFTLoss(actor(), loss_function="minor_sft", beta=0.1)(two_rows(3.0, 0.5, ref=-2.0))
    # Means per token: -2 and -5 against -2 and -2.
    first, second = math.log(2), -math.log(1 / (1 + math.exp(0.3)))
    assert output.loss_sft.item() == pytest.approx((3 * first + 0.5 * second) / 3.5)
    rows = make_rows(
        make_row([5, 1, 2], 1, ref=[0.0, -1.0, -3.0 + math.log(2)]),
        make_row([5, 6, 3], 2, ref=[0.0, 0.0, -5.0]),
    )
    output = SFTLoss(actor(), kl_to_ref_coeff=0.5)(weigh(rows, 3.0, 0.5))
    # k3 of log 2 is 1 - log 2, of the two others 0; two tokens of weight 3 and one of 1/2.
    assert output.kl_to_ref.item() == pytest.approx(3 * (1 - math.log(2)) / 6.5)
    assert output.loss_kl_to_ref.item() == pytest.approx(0.5 * 3 * (1 - math.log(2)) / 6.5)


@every_mean
def test_equal_weights_are_no_weights_to_the_last_bit(settings):
    for weight in [1.0, 0.3, 7.0, 1e-6, 1e6, 3]:
        plain = outcome(settings, many_rows())
        weighted = outcome(settings, weigh(many_rows(), *[weight] * 7))
        assert torch.equal(plain[0], weighted[0])
        assert torch.equal(plain[1], weighted[1])


@every_mean
def test_a_row_of_weight_0_is_left_out(settings):
    rows = weigh(many_rows(), 1.0, 0.0, 0.5, 2.0, 0.0, 1.5, 0.25)
    kept = weigh(many_rows(), 1.0, 0.0, 0.5, 2.0, 0.0, 1.5, 0.25)
    kept = make_rows(*[row for row in kept.tensordicts if row["loss_weight"] > 0])
    # Nothing of it is read, nor need it have a token of the assistant.
    rows[1]["next", "ref_log_probs", "full"] = torch.full((2,), math.nan)
    rows[4]["masks", "all_assistant_mask"] = torch.zeros(6, dtype=torch.bool)
    for got, expected in zip(outcome(settings, rows), outcome(settings, kept), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    loss = SFTLoss(random_actor(), **settings)
    loss(rows)
    assert [int(mask.sum()) for mask in loss.actor_network.seen["select"]] == [3, 0, 7, 2, 0, 4, 11]


@every_mean
def test_a_row_of_weight_2_is_two_rows(settings):
    rows = many_rows()
    twice = make_rows(*many_rows().tensordicts, many_rows()[2])
    got = outcome(settings, weigh(rows, 1, 1, 2, 1, 1, 1, 1))
    for mine, other in zip(got, outcome(settings, twice), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@every_mean
def test_layouts_splits_orders_and_junk_have_no_influence(settings, make_tiny_model):
    # The second and the fifth are not trained: a piece may have nothing but these.
    rows = weigh(many_rows(), 1.0, 0.0, 0.5, 2.0, 0.0, 1.5, 0.1)
    loss = SFTLoss(CausalScorer(make_tiny_model(), chunk_size=2048), **settings)
    normalizer = loss.normalizer(rows)
    assert normalizer.num_sequences == pytest.approx(5.1)
    assert normalizer.num_tokens == pytest.approx(3 + 3.5 + 4 + 6 + 1.1)
    check_invariance(loss, rows)


def test_counts_of_ranks_add_up_with_and_without_weights():
    loss = SFTLoss(actor())
    weighted = loss.normalizer(two_rows(3.0, 0.5))
    assert weighted == Normalizer(6.5, 3.5)
    # Rows without a weight count once.
    assert weighted.plus(loss.normalizer(two_rows())) == Normalizer(9.5, 5.5)
    assert loss.normalizer(two_rows()) == Normalizer(3, 2)


def test_padded_rows_have_weights_too():
    for shape in [(2,), (2, 1)]:
        for side in ["left", "right"]:
            rows = [make_row([5, 1, 2], 1), make_row([5, 6, 6, 3], 3)]
            padded = pad(rows, side)
            padded["loss_weight"] = torch.tensor([3.0, 0.0]).view(shape)
            expected = SFTLoss(actor())(make_rows(rows[0])).loss_sft
            assert SFTLoss(actor())(padded).loss_sft == expected


def test_the_key_can_be_another():
    rows = two_rows(3.0, 0.5)
    for row in rows.tensordicts:
        row["info"] = TensorDict({"weight": row.pop("loss_weight")})
    loss = SFTLoss(actor())
    assert loss(rows).loss_sft.item() == pytest.approx(3.5)
    loss.set_keys(loss_weight=("info", "weight"))
    assert loss(rows).loss_sft.item() == pytest.approx((3 * 2 + 0.5 * 5) / 3.5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, -0.5), r"loss_weight must be finite and at least 0, got -0.5 in rows \[1\]"),
        ((math.nan, 1.0), r"at least 0, got nan in rows \[0\]"),
        ((math.inf, 1.0), r"at least 0, got inf in rows \[0\]"),
        (([1.0, 2.0], [1.0, 2.0]), "loss_weight must be one number per row"),
        ((0.0, 0.0), "all 2 rows have weight 0"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    for call in (SFTLoss(actor()), SFTLoss(actor()).normalizer):
        with pytest.raises(DataError, match=message):
            call(two_rows(*weights))


def test_a_weight_that_some_rows_lack_is_refused():
    rows = two_rows(3.0, 0.5)
    del rows.tensordicts[1]["loss_weight"]
    with pytest.raises(DataError, match=r"rows \[1\] have no loss_weight and others do"):
        SFTLoss(actor())(rows)


def test_a_trained_row_needs_a_token_of_the_assistant():
    rows = two_rows(3.0, 0.5)
    rows[1]["masks", "all_assistant_mask"] = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(DataError, match=r"rows \[1\] have no token of the assistant"):
        SFTLoss(actor())(rows)


@pytest.mark.parametrize("settings", [{}, {"reduction": "token_mean"}])
def test_distillation_weighs_rows_alike(settings):
    def rows(*weights):
        made = two_rows(*weights)
        for row, gap in zip(made.tensordicts, (0.2, -0.4), strict=True):
            base = actor().table.detach()[row["tokens", "full"]]
            row["next"] = TensorDict({"teacher_log_probs": TensorDict({"full": base + gap})})
        return made

    loss = DistillationLoss(actor(), **settings)
    alone = [loss(rows()[b : b + 1]).loss_distill.item() for b in (0, 1)]
    assert alone[0] != pytest.approx(alone[1])
    # Two tokens in the first row and one in the second.
    first = 6.0 if settings else 3.0
    expected = (first * alone[0] + 0.5 * alone[1]) / (first + 0.5)
    output = loss(rows(3.0, 0.5))
    assert output.loss_distill.item() == pytest.approx(expected)
    by_token = (6.0 * alone[0] + 0.5 * alone[1]) / 6.5
    assert output.kl_to_teacher.item() == pytest.approx(by_token)
    assert loss(rows(3.0, 0.0)).loss_distill.item() == pytest.approx(alone[0])


def test_a_composite_weighs_its_supervised_term():
    model = actor()
    loss = CompositeLoss({"imitate": (0.5, SFTLoss(model))})
    rows = two_rows(3.0, 0.0)
    assert loss(rows).total_loss().item() == pytest.approx(0.5 * 2)
    normalizer = loss.normalizer(rows)
    parts = [loss(rows[b : b + 1], normalizer=normalizer).total_loss().item() for b in (0, 1)]
    assert parts == pytest.approx([1.0, 0.0])

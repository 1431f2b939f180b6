"""Losses that compare answers: values by hand, gradients, pieces, and what they refuse."""

import math

import pytest
import torch
from objectives.rows_helper import TableActor
from tensordict import TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import bradley_terry, kto_loss, log_odds, pair_loss
from torchrl_llm.modules import load_model
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    CPOLoss,
    DPOLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
    answer_log_probs,
    mismatched,
)
from torchrl_llm.trainers import make_optimizer, micro_batches, optimize

# Token n has log-prob -n / 10.
TABLE = [-n / 10 for n in range(10)]


def softplus(x):
    return math.log1p(math.exp(x))


def row(prompt, answer, *, pair=0, chosen=True, ref=0.0, kl=0.0):
    ids = torch.tensor([*prompt, *answer])
    return TensorDict(
        tokens={"full": ids},
        masks={"all_assistant_mask": torch.arange(len(ids)) >= len(prompt)},
        pair_id=torch.tensor(pair),
        group_id=torch.tensor(pair),
        is_chosen=torch.tensor(chosen),
        ref_log_prob=torch.tensor(ref),
        kl=torch.tensor(kl),
    )


def rows():
    """Two pairs; sums -0.3 and -0.9 (two tokens and one), and -0.5 and -0.4 (one and two)."""
    return lazy_rows(
        [
            row([9, 9], [1, 2], pair=7, ref=-0.2),
            row([8], [5], pair=3, ref=-0.6),
            row([9, 9], [9], pair=7, chosen=False, ref=-0.5),
            row([8], [1, 3], pair=3, chosen=False, ref=-0.9),
        ]
    )


def total(loss, batch=None):
    return loss(rows() if batch is None else batch).total_loss().item()


def mean(*values):
    return sum(values) / len(values)


def test_dpo_by_hand():
    # Log-ratios: -0.1 and -0.4, 0.1 and 0.5.
    first, second = 0.3, -0.4
    assert total(DPOLoss(TableActor(TABLE), beta=2.0)) == pytest.approx(
        mean(softplus(-2 * first), softplus(-2 * second))
    )
    assert total(DPOLoss(TableActor(TABLE), beta=2.0, form="hinge")) == pytest.approx(
        mean(1 - 2 * first, 1 - 2 * second)
    )
    smooth = [
        0.9 * softplus(-2 * d) + sign * 0.1 * softplus(2 * d)
        for sign in (1, -1)
        for d in (first, second)
    ]
    settings = {"beta": 2.0, "label_smoothing": 0.1}
    assert total(DPOLoss(TableActor(TABLE), **settings)) == pytest.approx(mean(*smooth[:2]))
    assert total(DPOLoss(TableActor(TABLE), form="robust", **settings)) == pytest.approx(
        mean(*smooth[2:]) / 0.8
    )
    # Means per token: -0.05 and -0.4, 0.1 and 0.25.
    assert total(DPOLoss(TableActor(TABLE), beta=2.0, form="ipo")) == pytest.approx(
        mean((0.35 - 0.25) ** 2, (-0.15 - 0.25) ** 2)
    )


def test_what_is_said_of_pairs():
    output = DPOLoss(TableActor(TABLE), beta=2.0)(rows())
    found = {name: round(float(value), 6) for name, value in output.metrics().items()}
    assert found["accuracy"] == 0.5
    assert found["margin"] == pytest.approx(2 * mean(0.3, -0.4))
    assert found["reward_chosen"] == pytest.approx(2 * mean(-0.1, 0.1))
    assert found["reward_rejected"] == pytest.approx(2 * mean(-0.4, 0.5))


def test_losses_without_a_reference_by_hand():
    sft = (0.3 + 0.5) / 3
    assert total(CPOLoss(TableActor(TABLE), beta=2.0, sft_coeff=0.5)) == pytest.approx(
        mean(softplus(-2 * 0.6), softplus(-2 * -0.1)) + 0.5 * sft
    )
    # Means per token: -0.15 and -0.9, -0.5 and -0.2.
    assert total(SimPOLoss(TableActor(TABLE), beta=2.0, target_margin=0.4)) == pytest.approx(
        mean(softplus(0.4 - 2 * 0.75), softplus(0.4 - 2 * -0.3))
    )
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in (-0.15, -0.9, -0.5, -0.2)]
    assert total(ORPOLoss(TableActor(TABLE), odds_coeff=0.3)) == pytest.approx(
        0.3 * mean(softplus(odds[1] - odds[0]), softplus(odds[3] - odds[2])) + sft
    )
    # The prompts have tokens 9 and 8, of which the first stands behind nothing.
    whole = ORPOLoss(TableActor(TABLE), odds_coeff=0.3, sft_tokens="conversation")
    assert total(whole) - total(ORPOLoss(TableActor(TABLE), odds_coeff=0.3)) == pytest.approx(
        (0.9 + 0.3 + 0.5) / 4 - sft
    )


def test_kto_by_hand():
    # Log-ratios: -0.1 and 0.1 of good answers, -0.4 and 0.5 of bad ones.
    batch = rows()
    batch["kl"] = torch.full((4,), 0.3)
    sigmoid = [1 / (1 + math.exp(-x)) for x in (0.8, 0.4, -1.4, 0.4)]
    loss = KTOLoss(TableActor(TABLE), beta=2.0, bad_weight=0.5)
    expected = (sigmoid[0] + sigmoid[1] + 0.5 * (sigmoid[2] + sigmoid[3])) / 4
    output = loss(batch)
    assert float(output.total_loss()) == pytest.approx(expected)
    assert float(output.accuracy) == 0.5
    assert float(output.kl) == pytest.approx(0.3)
    batch["kl"] = torch.full((4,), -0.3)  # an estimate below 0 counts as 0
    other = rows()
    assert total(loss, batch) == pytest.approx(total(loss, other))


def test_mismatched_answers():
    ids = [torch.tensor([9, 9, 1, 2]), torch.tensor([8, 5]), torch.tensor([7, 3, 4])]
    masks = [torch.tensor([0, 0, 1, 1]).bool(), *(torch.arange(n) > 0 for n in (2, 3))]
    made, answers = mismatched(ids, masks)
    assert [each.tolist() for each in made] == [[9, 9, 3, 4], [8, 1, 2], [7, 5]]
    assert [each.tolist() for each in answers] == [
        [False, False, True, True],
        [False, True, True],
        [False, True],
    ]


def test_the_other_answer_to_a_prompt_is_no_mismatched_one():
    # Pairs: each prompt twice in a row, as the rows of a batch stand.
    ids = [
        torch.tensor([prompt, prompt, said]) for prompt, said in ((9, 1), (9, 2), (8, 3), (8, 4))
    ]
    masks = [torch.arange(3) > 1] * 4
    made, _ = mismatched(ids, masks)
    assert [each.tolist() for each in made] == [[9, 9, 4], [9, 9, 4], [8, 8, 2], [8, 8, 2]]
    assert mismatched(ids[:2], masks[:2]) == ([], [])


def test_maths_near_the_ends():
    x = torch.tensor([-1e-6, -0.5, -50.0], dtype=torch.float64, requires_grad=True)
    exact = [math.log(math.exp(v) / -math.expm1(v)) for v in x.tolist()]
    assert log_odds(x).tolist() == pytest.approx(exact, rel=1e-9)
    log_odds(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([1 / -math.expm1(v) for v in x.tolist()], rel=1e-9)
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).sum().backward()
    assert bool(certain.grad.isfinite().all())
    far = torch.tensor([1e4, -1e4])
    assert pair_loss(far, beta=1.0).tolist() == [0.0, 1e4]
    assert kto_loss(far, torch.tensor([True, True]), torch.tensor(0.0), beta=1.0).tolist() == [0, 1]
    scores = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 1.0])
    margins = torch.tensor([0.5, 0.0])
    assert bradley_terry(*scores, margins_P=margins, centering=0.1).tolist() == pytest.approx(
        [softplus(-0.5) + 0.9, softplus(0.5) + 0.225]
    )
    with pytest.raises(ValueError, match="form"):
        pair_loss(far, "sigmoidal", beta=1.0)


@pytest.mark.parametrize("make", [DPOLoss, CPOLoss, SimPOLoss, ORPOLoss, KTOLoss])
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_pieces_and_shared_prompts_give_the_gradient_of_the_batch(make, layout):
    def gradients(layout, budget):
        model = load_model()
        scorer = CausalScorer(model, layout=layout)
        optimizer = make_optimizer(model.parameters(), name="SGD", lr=1.0)
        before = [p.detach().clone() for p in model.parameters()]
        metrics = optimize(make(scorer), [rows()], optimizer, budget=budget, layout=layout)
        steps = zip(before, model.parameters(), strict=True)
        return metrics, torch.cat([(b - p.detach()).flatten() for b, p in steps])

    whole, expected = gradients("padded", None)
    found, gradient = gradients(layout, 8)
    assert len(micro_batches(rows(), budget=8, layout=layout)) == 2
    assert found == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert float((gradient - expected).norm()) < 1e-5 * float(expected.norm())


def test_a_pair_is_never_parted():
    batch = lazy_rows(
        [
            row([1], [2] * n, pair=pair, chosen=chosen)
            for chosen in (True, False)
            for pair, n in enumerate((3, 9, 2, 5))
        ]
    )
    for layout in ("padded", "packed", "shared"):
        for budget in (1, 12, 21, 30, 1000):
            pieces = micro_batches(batch, budget=budget, layout=layout)
            pairs = [sorted(piece["pair_id"].tolist()) for piece in pieces]
            assert all(ids[::2] == ids[1::2] for ids in pairs)
            assert sorted(pair for ids in pairs for pair in ids) == [0, 0, 1, 1, 2, 2, 3, 3]
            if layout == "padded":
                sizes = [
                    (len(p), max(len(r["tokens", "full"]) for r in p.unbind(0))) for p in pieces
                ]
                assert all(n * longest <= budget for n, longest in sizes if n > 2)


def test_the_log_prob_of_answers_does_not_depend_on_the_budget():
    scorer = CausalScorer(load_model())
    ids = [each["tokens", "full"] for each in rows().unbind(0)]
    masks = [each["masks", "all_assistant_mask"] for each in rows().unbind(0)]
    whole = answer_log_probs(scorer, ids, masks)
    assert whole.shape == (4,)
    assert not whole.requires_grad
    torch.testing.assert_close(answer_log_probs(scorer, ids, masks, token_budget=4), whole)
    tokens = scorer.token_scores(ids, masks).log_probs
    torch.testing.assert_close(whole[0], tokens[:2].sum().detach())


BAD = {
    "one side": (lambda b: b[:3], "one chosen and one rejected.*3"),
    "two chosen": (
        lambda b: lazy_rows([*b.unbind(0), row([9], [1], pair=7)]),
        "one chosen and one rejected.*7",
    ),
    "no pair": (lambda b: b.exclude("pair_id"), "no pair_id"),
    "no side": (lambda b: b.exclude("is_chosen"), "no is_chosen"),
    "no reference": (lambda b: b.exclude("ref_log_prob"), "no ref_log_prob"),
    "no answer": (
        lambda b: lazy_rows([*b.unbind(0)[:3], row([8, 1, 3], [], pair=3, chosen=False)]),
        "no token of an answer",
    ),
    "NaN": (
        lambda b: lazy_rows([row([8], [1], ref=math.nan), *b.unbind(0)]),
        "ref_log_prob is NaN.*0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused(case):
    change, expected = BAD[case]
    with pytest.raises(DataError, match=expected):
        DPOLoss(TableActor(TABLE))(change(rows()))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (DPOLoss, {"beta": 0.0}),
        (DPOLoss, {"form": "simpo"}),
        (DPOLoss, {"form": "ipo", "label_smoothing": 0.1}),
        (DPOLoss, {"form": "ipo", "target_margin": 0.1}),
        (DPOLoss, {"form": "robust", "label_smoothing": 0.5}),
        (DPOLoss, {"sft_tokens": "conversation"}),
        (SimPOLoss, {"target_margin": math.inf}),
        (ORPOLoss, {"odds_coeff": 0.0}),
        (KTOLoss, {"bad_weight": -1.0}),
    ],
)
def test_impossible_settings_are_refused(make, settings):
    with pytest.raises(ConfigError):
        make(TableActor(TABLE), **settings)

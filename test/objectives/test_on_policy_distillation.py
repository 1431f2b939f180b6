"""On-policy distillation: by hand, and that the expected gradient is that of the divergence."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import BOTH, TableActor, double, make_row, make_rows
from tensordict import NonTensorData
from torch import nn

from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import divergence_from_logits, k1
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    CompositeLoss,
    Correction,
    GRPOLoss,
    OnPolicyDistillationLoss,
    OnPolicyDistillationLossOutput,
    check_invariance,
)

SAMPLED = ("advantage", "k2")


def taught(ids, prompt, teacher=None, domain=None, **settings):
    row = make_row(ids, prompt, **settings)
    if teacher is not None:
        row["next", "teacher_log_probs", "full"] = torch.tensor(teacher)
    if domain is not None:
        row["domain"] = NonTensorData(domain)
    return row


def batch(dtype=torch.float32):
    """Sampled at -1; teacher at -0.5, -2 and -1.25; a masked row of junk."""
    nan = math.nan
    rows = make_rows(
        taught([5, 1, 2], 1, [nan, -0.5, -2.0], advantage=2.0),
        taught([5, 6, 3], 2, [nan, nan, -1.25], advantage=-1.0),
        taught([5, 4], 1, [nan, nan], advantage=nan, old=nan, reason=[1, 5]),
    )
    return double(rows) if dtype is torch.float64 else rows


def run(dtype, **settings):
    """Ratios 1.21, 1 and 0.64."""
    model = TableActor([-9.0] * 8).to(dtype)
    with torch.no_grad():
        for token, ratio in {1: 1.21, 2: 1.0, 3: 0.64}.items():
            model.table[token] = -1 + math.log(ratio)
    output = OnPolicyDistillationLoss(model, **settings)(batch(dtype))
    output.total_loss().backward()
    assert not model.table.grad[[0, 4, 5, 6, 7]].any()
    return output, model.table.grad[1:4].tolist()


@BOTH
def test_as_an_advantage_it_is_what_is_worked_by_hand(dtype, tolerance):
    output, gradient = run(dtype)
    # A = teacher - sampled = 0.5, -1, -0.25; loss -r A, whose slope in log pi is itself.
    terms = [-1.21 * 0.5, 1.0, 0.64 * 0.25]
    assert output.loss_objective.item() == pytest.approx(sum(terms) / 3, abs=tolerance)
    assert gradient == pytest.approx([term / 3 for term in terms], abs=tolerance)
    assert output.loss_distill is None
    # Student minus teacher: log 1.21 - 0.5, 1, log 0.64 + 0.25.
    kl = math.log(1.21) - 0.5 + 1 + math.log(0.64) + 0.25
    assert output.kl_to_teacher.item() == pytest.approx(kl / 3, abs=tolerance)
    assert isinstance(output, OnPolicyDistillationLossOutput)


@BOTH
def test_the_outcome_is_added_and_the_ratio_clipped_where_it_is_asked_for(dtype, tolerance):
    output, gradient = run(dtype, coeff=2.0, outcome_coeff=0.5, clip_epsilon=0.2)
    # A = 2 * 0.5 + 1, 2 * -1 + 1, 2 * -0.25 - 0.5 = 2, -1, -1:
    # min(1.21 * 2, 1.2 * 2), -1, min(-0.64, -0.8).
    assert output.loss_objective.item() == pytest.approx(-(2.4 - 1 - 0.8) / 3, abs=tolerance)
    assert gradient == pytest.approx([0.0, 1 / 3, 0.0], abs=tolerance)


@BOTH
def test_k2_is_what_is_worked_by_hand(dtype, tolerance):
    output, gradient = run(dtype, estimator="k2", coeff=2.0)
    # Student minus teacher as above; half its square, weighted by the ratio as a constant.
    gaps = [math.log(1.21) - 0.5, 1.0, math.log(0.64) + 0.25]
    ratios = [1.21, 1.0, 0.64]
    terms = [r * g**2 / 2 for r, g in zip(ratios, gaps, strict=True)]
    assert output.loss_distill.item() == pytest.approx(2 * sum(terms) / 3, abs=tolerance)
    assert output.loss_objective.item() == 0.0
    slopes = [2 * r * g / 3 for r, g in zip(ratios, gaps, strict=True)]
    assert gradient == pytest.approx(slopes, abs=tolerance)


class Softmax(nn.Module, TokenScorer):
    """One distribution for every state; its logits are parameters."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def token_scores(self, sequences, select, *, entropy=False, **_):
        ids = torch.cat([s[m] for s, m in zip(sequences, select, strict=True)])
        log_probs = self.logits.log_softmax(0)[ids]
        return TokenScores(log_probs, log_probs.detach() * 0 if entropy else None)


def distributions():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def expected_gradient(loss_of, student, sampler, teacher):
    """Mean over all tokens that the sampler may draw, by its probabilities."""
    log_old, log_teacher = sampler.log_softmax(0), teacher.log_softmax(0)
    total = torch.zeros_like(student)
    for token, weight in enumerate(log_old.exp()):
        model = Softmax(student)
        row = double(taught([0, token], 1, [0.0, 0.0]))
        row["log_probs", "full"] = log_old[[0, token]]
        row["next", "teacher_log_probs", "full"] = log_teacher[[0, token]]
        loss_of(model)(make_rows(row)).total_loss().backward()
        total += weight * model.logits.grad
    return total


@pytest.mark.parametrize("estimator", SAMPLED)
def test_the_expected_gradient_is_that_of_the_reverse_divergence(estimator):
    student, _, teacher = distributions()
    logits = student.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(divergence_from_logits(logits, teacher), logits)
    got = expected_gradient(
        lambda model: OnPolicyDistillationLoss(model, estimator=estimator),
        student,
        student,
        teacher,
    )
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-9)
    # A small step against it comes closer to the teacher.
    before, after = (divergence_from_logits(x, teacher) for x in (student, student - 0.1 * got))
    assert after < before


def test_k2_on_old_samples_still_has_the_gradient_of_the_divergence():
    student, sampler, teacher = distributions()
    logits = student.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(divergence_from_logits(logits, teacher), logits)
    got = expected_gradient(
        lambda model: OnPolicyDistillationLoss(model, estimator="k2"), student, sampler, teacher
    )
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-9)


def test_k1_differentiated_on_samples_does_not_see_the_teacher():
    student, _, teacher = distributions()
    logits = student.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    loss = (student.softmax(0) * k1(teacher.log_softmax(0) - log_p)).sum()
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-12, rtol=0)


def rows_of_two_domains():
    return make_rows(
        taught([5, 1, 2, 7], 1, domain="add", old=-5.5, advantage=1.0),
        taught([5, 6, 3], 2, domain="subtract", old=-5.9, advantage=-2.0),
        taught([5, 9, 4], 1, domain="add", reason=[1, 0, 5], old=-5.7, advantage=0.5),
    )


def places(rows):
    """Row and position of the states that predict the tokens that count."""
    return [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)]


def logits_of(model, rows):
    found = [model(row["tokens", "full"][None]).logits[0] for row in rows.unbind(0)]
    return torch.stack([found[row][position] for row, position in places(rows)])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_over_the_vocabulary_it_is_the_divergence_and_its_gradient(make_tiny_model, direction):
    student, teacher = make_tiny_model(seed=0), make_tiny_model(seed=1)
    rows = rows_of_two_domains()
    loss = OnPolicyDistillationLoss(
        CausalScorer(student),
        estimator="full_vocabulary",
        teachers=CausalScorer(teacher),
        divergence=direction,
        coeff=2.0,
    )
    output = loss(rows)
    expected = divergence_from_logits(
        logits_of(student, rows), logits_of(teacher, rows), direction=direction
    )
    torch.testing.assert_close(output.loss_distill, 2 * expected.mean())
    torch.testing.assert_close(output.kl_to_teacher, expected.mean().detach())
    assert output.loss_objective.item() == 0.0
    parameters = list(student.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(output.total_loss(), parameters),
        torch.autograd.grad(2 * expected.mean(), parameters),
        atol=1e-5,
        rtol=1e-4,
    )
    assert not any(p is q for p in loss.parameters() for q in teacher.parameters())
    assert all(p.grad is None for p in teacher.parameters())


def test_each_row_is_compared_with_the_teacher_that_it_names(make_tiny_model):
    student, add, subtract = (make_tiny_model(seed=seed) for seed in range(3))
    teachers = {"unused": CausalScorer(subtract), "subtract": CausalScorer(subtract)}
    teachers["add"] = CausalScorer(add)
    rows = rows_of_two_domains()
    loss = OnPolicyDistillationLoss(
        CausalScorer(student), estimator="full_vocabulary", teachers=teachers
    )
    logits = torch.stack([logits_of(model, rows) for model in (add, subtract)])
    own = logits[torch.tensor([0, 0, 0, 1, 0]), torch.arange(5)]
    expected = divergence_from_logits(logits_of(student, rows), own)
    torch.testing.assert_close(loss(rows).loss_distill, expected.mean())
    assert set(loss.teachers) == {"unused", "subtract", "add"}


def test_the_outcome_is_a_policy_gradient_beside_the_divergence(make_tiny_model):
    student, teacher = (CausalScorer(make_tiny_model(seed=seed)) for seed in range(2))
    settings = {"estimator": "full_vocabulary", "teachers": teacher}
    rows = rows_of_two_domains()
    with_outcome = OnPolicyDistillationLoss(student, outcome_coeff=0.5, **settings)(rows)
    alone = OnPolicyDistillationLoss(student, **settings)(rows)
    outcome = GRPOLoss(student, clip_epsilon=(0.999, 1e9))(rows)
    torch.testing.assert_close(with_outcome.loss_distill, alone.loss_distill)
    torch.testing.assert_close(with_outcome.loss_objective, 0.5 * outcome.loss_objective)


def test_over_the_vocabulary_log_probs_have_a_gradient_only_where_a_term_needs_it(make_tiny_model):
    student, teacher = (CausalScorer(make_tiny_model(seed=seed)) for seed in range(2))
    rows = rows_of_two_domains()
    asked = {"estimator": "full_vocabulary", "teachers": teacher}
    for settings, expected in (
        ({}, False),
        ({"outcome_coeff": 1.0}, True),
        ({"entropy_coeff": 0.1}, True),
    ):
        loss = OnPolicyDistillationLoss(student, **asked, **settings)
        scores = loss.score(rows, loss.read(rows))
        assert scores.log_probs.requires_grad is expected
        assert scores.divergence.requires_grad


@pytest.mark.parametrize("estimator", [*SAMPLED, "full_vocabulary"])
def test_layouts_splits_orders_and_junk_have_no_influence(make_tiny_model, estimator):
    rows = rows_of_two_domains()
    for number, row in enumerate(rows.unbind(0)):
        length = row["tokens", "full"].shape[0]
        row["next", "teacher_log_probs", "full"] = torch.full((length,), -5.0 - number / 4)
    teachers = None
    if estimator == "full_vocabulary":
        models = [make_tiny_model(seed=seed) for seed in (1, 2)]
        teachers = dict(zip(("add", "subtract"), map(CausalScorer, models), strict=True))
    loss = OnPolicyDistillationLoss(
        CausalScorer(make_tiny_model(seed=0)), estimator=estimator, teachers=teachers
    )
    check_invariance(loss, rows)


def test_a_correction_weighs_the_advantage():
    # The proximal policy is the current one: ratio 1, weight min(r, 1.1).
    output, _ = run(
        torch.float64, correction=Correction(type="tis", bounds=(0.0, 1.1), proximal="current")
    )
    terms = [-1.1 * 0.5, 1.0, 0.64 * 0.25]
    assert output.loss_objective.item() == pytest.approx(sum(terms) / 3)


def test_it_shares_a_forward_with_other_losses(make_tiny_model):
    student, teacher = (CausalScorer(make_tiny_model(seed=seed)) for seed in range(2))
    distill = OnPolicyDistillationLoss(student, estimator="full_vocabulary", teachers=teacher)
    policy = GRPOLoss(student)
    rows = rows_of_two_domains()
    both = CompositeLoss({"policy": (1.0, policy), "distill": (0.5, distill)})(rows)
    apart = policy(rows).total_loss() + 0.5 * distill(rows).total_loss()
    torch.testing.assert_close(both.total_loss(), apart)


def test_teachers_that_cannot_serve_are_refused(make_tiny_model):
    student = CausalScorer(make_tiny_model())
    asked = {"estimator": "full_vocabulary"}

    class Mute(TokenScorer):
        def token_scores(self, sequences, select, *, extras=None, **_):
            assert extras == ScoreExtras(states=True, log_probs=False)
            return TokenScores(torch.zeros(0))

    with pytest.raises(ConfigError, match="does not show its states"):
        OnPolicyDistillationLoss(student, teachers=Mute(), **asked)(rows_of_two_domains())
    other = CausalScorer(make_tiny_model())
    other.model.resize_token_embeddings(student.vocab_size + 8)
    with pytest.raises(ConfigError, match="one vocabulary"):
        OnPolicyDistillationLoss(student, teachers=other, **asked)
    with pytest.raises(ConfigError, match="are not TokenScorers"):
        OnPolicyDistillationLoss(student, teachers={"add": nn.Linear(1, 1)}, **asked)
    loss = OnPolicyDistillationLoss(student, teachers={"add": student}, **asked)
    with pytest.raises(DataError, match="'subtract'"):
        loss(rows_of_two_domains())
    with pytest.raises(DataError, match="names its own"):
        loss(make_rows(make_row([5, 1], 1)))


def test_rows_without_the_teachers_log_probs_are_an_error_that_says_what_to_do():
    model = TableActor([-1.0] * 8)
    for estimator in SAMPLED:
        with pytest.raises(DataError, match="RetrieveTeacherLogProb"):
            OnPolicyDistillationLoss(model, estimator=estimator)(make_rows(make_row([5, 1], 1)))
    rows = make_rows(taught([5, 1], 1, [0.0, -1.0]))
    del rows[0]["advantage"]
    OnPolicyDistillationLoss(model)(rows)
    with pytest.raises(DataError, match="advantage"):
        OnPolicyDistillationLoss(model, outcome_coeff=1.0)(rows)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"estimator": "full_vocabulary"}, "teachers belong"),
        ({"teachers": TableActor([0.0])}, "teachers belong"),
        ({"divergence": "forward"}, "full_vocabulary"),
        ({"estimator": "k2", "clip_epsilon": 0.2}, "clip_epsilon"),
        ({"clip_epsilon": (2.0, 0.2)}, "clip_epsilon"),
    ],
)
def test_impossible_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        OnPolicyDistillationLoss(TableActor([0.0] * 8), **settings)

"""Distillation from stored log-probs of a teacher."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import BOTH, TableActor, double, make_row, make_rows

from torchrl_llm.envs.transforms import RetrieveLogProb, RetrieveTeacherLogProb
from torchrl_llm.errors import DataError
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    DistillationLoss,
    DistillationLossOutput,
    GRPOLoss,
    OnPolicyDistillationLoss,
    k3_kl_token_estimate,
)

E = math.exp


def taught(ids, prompt, teacher, **settings):
    row = make_row(ids, prompt, **settings)
    row["next", "teacher_log_probs", "full"] = torch.tensor(teacher)
    return row


def batch():
    """Student at -1. Teacher minus student: 0.5 and -0.5 in the first row, 1 in the second."""
    nan = math.nan
    return make_rows(taught([5, 1, 2], 1, [nan, -0.5, -1.5]), taught([5, 6, 3], 2, [nan, nan, 0.0]))


def k3(d):
    return E(d) - 1 - d


def run(dtype, **settings):
    model = TableActor([-1.0] * 8).to(dtype)
    rows = double(batch()) if dtype is torch.float64 else batch()
    output = DistillationLoss(model, **settings)(rows)
    output.total_loss().backward()
    return output, model.table.grad[1:4].tolist()


@BOTH
@pytest.mark.parametrize(("direction", "sign"), [("reverse", 1), ("forward", -1)])
def test_both_directions_are_those_worked_by_hand(dtype, tolerance, direction, sign):
    output, gradient = run(dtype, kl_direction=direction)
    # With d = teacher - student: reverse is e^d - 1 - d with slope 1 - e^d, forward is
    # e^-d - 1 + d with slope e^-d - 1, so that s = 1 or -1 in k3(s d) and s (1 - e^(s d)).
    first, second = (k3(sign * 0.5) + k3(-sign * 0.5)) / 2, k3(sign * 1.0)
    assert output.loss_distill.item() == pytest.approx((first + second) / 2, abs=tolerance)
    expected = [
        sign * (1 - E(sign * 0.5)) / 4,
        sign * (1 - E(-sign * 0.5)) / 4,
        sign * (1 - E(sign * 1.0)) / 2,
    ]
    assert gradient == pytest.approx(expected, abs=tolerance)
    tokens = (k3(sign * 0.5) + k3(-sign * 0.5) + k3(sign * 1.0)) / 3
    assert output.kl_to_teacher.item() == pytest.approx(tokens, abs=tolerance)
    assert isinstance(output, DistillationLossOutput)
    assert not output.kl_to_teacher.requires_grad


@BOTH
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reduction": "sum"}, (k3(0.5) + k3(-0.5)) / 2 + k3(1.0)),
        ({"normalize_by_seq_length": False}, (k3(0.5) + k3(-0.5) + k3(1.0)) / 2),
        ({"reduction": "token_mean"}, (k3(0.5) + k3(-0.5) + k3(1.0)) / 3),
    ],
)
def test_the_averages_are_those_worked_by_hand(dtype, tolerance, settings, expected):
    assert run(dtype, **settings)[0].loss_distill.item() == pytest.approx(expected, abs=tolerance)


def test_without_reduction_there_is_a_loss_a_row():
    loss = DistillationLoss(TableActor([-1.0] * 8), reduction="none")(batch()).loss_distill
    torch.testing.assert_close(loss, torch.tensor([(k3(0.5) + k3(-0.5)) / 2, k3(1.0)]))


def test_the_prompt_counts_where_it_is_asked_for():
    rows = make_rows(taught([5, 1, 2], 2, [0.0, -0.5, -1.5]))
    output = DistillationLoss(TableActor([-1.0] * 8), assistant_only=False)(rows)
    assert output.loss_distill.item() == pytest.approx((k3(0.5) + k3(-0.5)) / 2, abs=1e-6)
    alone = DistillationLoss(TableActor([-1.0] * 8))(rows)
    assert alone.loss_distill.item() == pytest.approx(k3(-0.5), abs=1e-6)


def everything(rows):
    """The same rows without a trace, so that prompts count too."""
    return make_rows(*(row.exclude("trace") for row in rows))


@pytest.mark.parametrize("loss_of_all", [True, False])
@pytest.mark.parametrize("scored_all", [True, False])
def test_a_teacher_of_the_assistants_tokens_does_not_teach_all(
    make_tiny_model, loss_of_all, scored_all
):
    model = make_tiny_model()
    rows = everything([make_row([5, 1, 2, 7, 4], 3), make_row([5, 6, 3], 2)])
    actor = CausalScorer(model)
    rows = RetrieveTeacherLogProb(actor, assistant_only=not scored_all)(rows)
    loss = DistillationLoss(actor, assistant_only=not loss_of_all)
    if loss_of_all and not scored_all:
        with pytest.raises(DataError, match=r"teacher_log_probs.*0\.0.*assistant_only=False"):
            loss(rows)  # e^5 - 1 - 5 a prompt token, where the student is its teacher
        return
    assert loss(rows).loss_distill.item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("scored_all", [True, False])
def test_a_reference_of_the_assistants_tokens_holds_no_others(make_tiny_model, scored_all):
    model = make_tiny_model()
    rows = everything([make_row([5, 1, 2, 7, 4], 3), make_row([5, 6, 3], 2)])
    actor, asked = CausalScorer(model), {"assistant_only": not scored_all}
    rows = RetrieveTeacherLogProb(actor, **asked)(rows)
    rows = RetrieveLogProb(actor, log_probs_full_key=("ref_log_probs", "full"), **asked)(rows)
    everywhere = {"masking_strategy": "generic"}
    for loss, name in (
        (GRPOLoss(actor, kl_to_ref_coeff=1.0, **everywhere), "kl_to_ref"),
        (OnPolicyDistillationLoss(actor, **everywhere), "kl_to_teacher"),
    ):
        if scored_all:
            assert getattr(loss(rows), name).item() == pytest.approx(0.0, abs=1e-6)
            continue
        with pytest.raises(DataError, match=r"0\.0.*assistant_only=False"):
            loss(rows)  # a divergence of e^5 - 1 - 5 nats a prompt token


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    rows = make_rows(taught([5, 1, 2], 1, [0.0, -1.0, -1.0]))
    model = TableActor([-1.0] * 8)
    output = DistillationLoss(model)(rows)
    output.total_loss().backward()
    assert output.loss_distill.item() == 0.0
    assert not model.table.grad.any()


def test_its_expected_gradient_on_the_students_samples_is_that_of_the_forward_divergence():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    log_p, log_q = student.log_softmax(0), teacher.log_softmax(0)
    weights = log_p.detach().exp()
    (got,) = torch.autograd.grad(weights @ k3_kl_token_estimate(log_q, log_p), student)
    torch.testing.assert_close(got, student.detach().softmax(0) - teacher.softmax(0))


def test_conversations_alone_are_encoded_first():
    tokenizer = load_tokenizer()
    policy = TransformersWrapper(load_model(), tokenizer=tokenizer)
    from tensordict import TensorDict

    from torchrl_llm.data import ChatHistory, History

    chat = [{"role": "user", "content": "What is 1+2?"}, {"role": "assistant", "content": "3"}]
    history = ChatHistory(full=History.from_chats([chat]), batch_size=[1])
    rows = TensorDict({"history": history}, batch_size=[1])
    length = policy.formatter.encode_batch(history.full.chats, add_generation_prompt=False)[
        0
    ].token_ids.shape[0]
    rows["next"] = TensorDict(
        {"teacher_log_probs": TensorDict({"full": torch.full((1, length), -1.0)}, [1])}, [1]
    )
    assert DistillationLoss(policy)(rows).loss_distill > 0


def test_what_cannot_be_is_refused():
    with pytest.raises(TypeError, match="loss_function"):
        DistillationLoss(TableActor([-1.0] * 8), loss_function="sft")
    with pytest.raises(ValueError, match="one shape"):
        k3_kl_token_estimate(torch.zeros(2), torch.zeros(3))


def test_the_teachers_key_may_be_set():
    rows = batch()
    for row in rows.unbind(0):
        row["mine"] = row["next", "teacher_log_probs", "full"]
    loss = DistillationLoss(TableActor([-1.0] * 8))
    expected = loss(rows).loss_distill
    for row in rows.unbind(0):
        del row["next"]
    loss.set_keys(teacher_log_prob="mine")
    assert loss.in_keys[-1] == "mine"
    assert loss(rows).loss_distill == expected

import math
from contextlib import contextmanager

import pytest
import torch
from objectives.rows_helper import ratio_actor, three_rows
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.trainers.optim import (
    clipped_step,
    make_scheduler,
    optimize,
    schedule_factor,
)
from torchrl_llm.trainers.optimizers import make_optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_defect_21_the_named_optimizer_is_the_one_that_is_built(name):
    optimizer = make_optimizer(nn.Linear(2, 2).parameters(), name=name, lr=0.1)
    assert type(optimizer) is getattr(torch.optim, name)


def test_an_unknown_name_and_an_argument_without_effect_are_refused():
    parameters = list(nn.Linear(2, 2).parameters())
    for name, options, message in (
        ("AdmW", {}, "'AdamW'"),
        ("SGD", {"betas": (0.9, 0.99)}, r"optimizer.betas has no effect: SGD"),
        ("LBFGS", {}, "LBFGS"),
        ("AdamW", {"betas": (1.5, 0.9)}, r"optimizer\.name=AdamW .*beta parameter"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_optimizer(parameters, name=name, lr=0.1, **options)


def test_none_means_the_optimizers_own_default():
    optimizer = make_optimizer(nn.Linear(2, 2).parameters(), name="Adam", lr=0.1, eps=None)
    assert optimizer.defaults["eps"] == 1e-8


def test_frozen_parameters_are_left_out_and_nothing_to_train_is_an_error():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    assert (
        len(make_optimizer(layer.parameters(), name="SGD", lr=1.0).param_groups[0]["params"]) == 1
    )
    with pytest.raises(ConfigError, match="nothing to optimize"):
        make_optimizer(layer.requires_grad_(False).parameters(), name="SGD", lr=1.0)


def test_schedules_by_hand():
    def factors(name):
        return [
            schedule_factor(step, name=name, warmup_steps=2, total_steps=6) for step in range(7)
        ]

    assert factors("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    # Half a cosine over four steps: (1 + cos(pi * k / 4)) / 2.
    expected = [0.5, 1] + [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert factors("cosine") == pytest.approx(expected)
    with pytest.raises(ConfigError, match="constant, linear or cosine"):
        factors("steps")


def test_a_step_clips_measures_and_clears():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer([weight], name="SGD", lr=1.0)
    scheduler = make_scheduler(optimizer, name="linear", total_steps=2)
    weight.grad = torch.tensor([3.0, 4.0])
    norm = clipped_step(optimizer, scheduler, max_norm=1.0)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=1e-5)
    assert weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_gradient_that_is_not_finite_changes_no_parameter():
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([weight], name="SGD", lr=1.0)
    weight.grad = torch.tensor([1.0, float("nan")])
    assert math.isnan(clipped_step(optimizer, max_norm=1.0))
    assert weight.tolist() == [1.0, 1.0]


def test_a_learning_rate_of_zero_changes_nothing():
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([weight], name="AdamW", lr=0.0, weight_decay=0.1)
    weight.grad = torch.tensor([1.0, 2.0])
    clipped_step(optimizer)
    assert weight.tolist() == [1.0, 1.0]


def plain_update(model, rows, optimizer):
    """What an update is, in five lines and one piece."""
    output = GRPOLoss(model)(rows)
    output.total_loss().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return {"train/loss_objective": output.loss_objective.item(), "train/grad_norm": norm.item()}


@pytest.mark.parametrize("budget", [None, 1, 6])
def test_an_update_is_one_clipped_step_however_the_batch_is_cut(budget):
    rows, entered = three_rows(torch.float64), []

    @contextmanager
    def context():
        entered.append(True)
        yield

    models = ratio_actor(torch.float64), ratio_actor(torch.float64)
    plain, other = (torch.optim.SGD(model.parameters(), lr=0.5) for model in models)
    expected = plain_update(models[0], rows, plain)
    scheduler = make_scheduler(other, name="linear", total_steps=2)
    found = optimize(
        GRPOLoss(models[1]), [rows], other, scheduler, max_norm=0.1, budget=budget, context=context
    )
    assert torch.allclose(models[0].table, models[1].table, rtol=1e-12, atol=0)
    assert found.items() >= {k: pytest.approx(v, rel=1e-12) for k, v in expected.items()}.items()
    assert found["train/lr"] == 0.25
    assert models[1].table.grad is None
    assert len(entered) == {None: 1, 1: 3, 6: 2}[budget]


def test_metrics_are_means_over_updates_and_without_a_batch_nothing_happens():
    model = ratio_actor(torch.float64)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.0), model.table.detach().clone()
    assert optimize(GRPOLoss(model), [], optimizer) == {}
    halves = [three_rows(torch.float64, first=a) for a in (2.0, 4.0)]
    each = [optimize(GRPOLoss(model), [rows], optimizer)["train/loss_objective"] for rows in halves]
    both = optimize(GRPOLoss(model), halves, optimizer)
    assert both["train/loss_objective"] == pytest.approx(sum(each) / 2, rel=1e-12)
    assert "train/lr" not in both
    assert torch.equal(model.table, before)

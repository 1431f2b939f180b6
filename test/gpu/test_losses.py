"""Losses on the device against the same losses on the CPU: rows live there, the model does not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from gpu.exactness import assert_all_near, distance
from gpu.models import small_model
from objectives.every_loss import LOSSES, full_rows, make_actor, make_loss

from torchrl_llm.errors import DataError
from torchrl_llm.objectives import GRPOLoss, SFTLoss
from torchrl_llm.trainers import make_optimizer, micro_batches, optimize

pytestmark = pytest.mark.gpu


def outcome(loss, rows):
    """All fields of the output and all gradients of the loss, by name."""
    loss.actor_network.zero_grad(set_to_none=True)
    output = loss(rows)
    output.total_loss().backward()
    fields = {name: value.detach() for name, value in output.items() if name != "ess_moments"}
    named = loss.actor_network.named_parameters()
    grads = {name: p.grad for name, p in named if p.grad is not None}
    return fields, grads


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_the_device_is_the_loss_on_the_cpu(device, name, layout):
    rows, results = full_rows(), []
    for place in ("cpu", device):
        actor = make_actor(small_model("cpu"))
        actor.to(place)
        actor.layout = layout
        results.append(outcome(make_loss(name, actor), rows))
    (expected, expected_grads), (fields, grads) = results
    assert fields.keys() == expected.keys()
    for field, value in fields.items():
        torch.testing.assert_close(value.cpu(), expected[field], atol=2e-5, rtol=2e-4, msg=field)
    assert_all_near(grads, expected_grads, 1e-4)


@pytest.mark.parametrize("kind", [GRPOLoss, SFTLoss])
def test_under_autocast_a_loss_is_the_float32_one_to_its_rounding(device, kind):
    rows, results = full_rows(), []
    for low in (False, True):
        loss = kind(make_actor(small_model(device)))
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            output = loss(rows)
        output.total_loss().backward()
        grads = [p.grad for p in loss.actor_network.model.parameters()]
        results.append((output.total_loss(), torch.cat([g.flatten() for g in grads])))
    assert results[1][0].dtype is results[1][1].dtype is torch.float32
    assert distance(results[1][1], results[0][1]) < 0.08  # twenty roundings


@pytest.mark.parametrize("budget", [None, 12])
def test_an_update_on_the_device_is_that_on_the_cpu(device, budget):
    """Micro-batches, clipping and AdamW: where the weights go."""
    rows, results = full_rows(), []
    start = small_model("cpu")
    for place in ("cpu", device):
        actor = make_actor(copy.deepcopy(start))
        actor.to(place)
        loss = GRPOLoss(actor, masking_strategy="rlhf")
        assert (len(micro_batches(rows, budget=budget)) > 1) == (budget is not None)
        optimizer = make_optimizer(actor.parameters(), name="AdamW", lr=1e-3, eps=1e-3)
        metrics = optimize(loss, [rows, rows], optimizer, max_norm=1.0, budget=budget)
        moved = {
            name: p.detach().cpu() - start.get_parameter(name)
            for name, p in actor.model.named_parameters()
        }
        results.append((metrics, moved))
    (expected, expected_moved), (metrics, moved) = results
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_all_near(moved, expected_moved, 1e-2)


def test_a_policy_that_has_diverged_is_refused_and_stays_as_it_is(device):
    actor = make_actor(small_model("cpu"))
    torch.nn.init.constant_(actor.model.model.norm.weight, torch.nan)
    actor.to(device)
    before = copy.deepcopy(actor.model.state_dict())
    optimizer = make_optimizer(actor.parameters(), name="AdamW", lr=1e-3)
    with pytest.raises(DataError, match="NaN or infinite"):
        optimize(GRPOLoss(actor), [full_rows()], optimizer, max_norm=1.0)
    for name, value in actor.model.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_forward_and_backward_wait_for_the_device_at_most_once(device, layout):
    """transformers looks whether padded rows are packed, which waits; nothing else does."""
    if device.type == "cpu":
        pytest.skip("nothing waits for a CPU; test/objectives/test_waits.py pretends a device")
    rows, actor = full_rows(), make_actor(small_model("cpu"))
    actor.to(device)
    actor.layout = layout
    loss = GRPOLoss(actor)
    normalizer = loss.normalizer(rows)
    loss(rows, normalizer=normalizer).total_loss().backward()  # whatever waits the first time
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss(rows, normalizer=normalizer).total_loss().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in found if "synchroniz" in str(w.message)]
    assert len(waits) <= (layout == "padded"), waits

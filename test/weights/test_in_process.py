"""Weights in one process: shared, or copied in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.weights import InProcessWeights, named_weights


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


class _Policy(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def _bound(updater, policy):
    updater.register_collector(SimpleNamespace(policy=policy))
    return updater


@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: _Policy(model),
        lambda model: model.state_dict(),
        lambda model: _Policy(model).state_dict(),
        lambda model: TensorDict.from_module(model),
        lambda model: {"embed.weight": model.embed.weight},  # one of two names of a tied weight
    ],
)
def test_weights_are_taken_in_any_form(form):
    policy, trained = _Policy(_Tied()), _Tied()
    pointer = policy.model.embed.weight.data_ptr()
    _bound(InProcessWeights(), policy).push_weights(form(trained))

    assert torch.equal(policy.model.head.weight, trained.embed.weight)
    assert policy.model.embed.weight.data_ptr() == pointer
    assert policy.model.embed.weight.requires_grad


def test_buffers_travel_and_dtypes_are_cast():
    policy, trained = nn.BatchNorm1d(2), nn.BatchNorm1d(2).double()
    trained.running_mean += 3
    _bound(InProcessWeights(), policy).push_weights(trained)
    assert policy.running_mean.tolist() == [3.0, 3.0]
    assert policy.weight.dtype == torch.float32


def test_wrong_names_and_shapes_leave_the_policy_as_it_was():
    policy = nn.Linear(2, 2)
    before = policy.weight.clone()
    updater = _bound(InProcessWeights(), policy)
    with pytest.raises(ConfigError, match="1 of its weights were not given"):
        updater.push_weights({"weight": torch.ones(2, 2)})
    with pytest.raises(ConfigError, match="1 were given that it does not have"):
        updater.push_weights({**policy.state_dict(), "scale": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) in the policy and \(3, 2\)"):
        updater.push_weights({"bias": torch.ones(2), "weight": torch.ones(3, 2)})
    assert torch.equal(policy.weight, before)
    with pytest.raises(ConfigError, match="got int"):
        updater.push_weights(3)


def test_an_updater_serves_one_collector():
    updater = InProcessWeights()
    with pytest.raises(ConfigError, match="weight_updater="):
        updater.push_weights({})
    _bound(updater, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="another collector"):
        _bound(updater, nn.Linear(1, 1))


def test_extra_states_are_no_weights():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": 3}

        def set_extra_state(self, state):
            pass

    assert sorted(named_weights(Counting(1, 1))) == ["bias", "weight"]

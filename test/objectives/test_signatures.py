"""What a class takes is written once, and inspect, help and the docs show all of it."""

from __future__ import annotations

import inspect

import pytest

from torchrl_llm import objectives
from torchrl_llm._registry import find, names
from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.objectives import PolicyGradientLoss, PolicyLossSettings
from torchrl_llm.objectives.credit import (
    ComparingCredit,
    ComparingOptions,
    CreditAssigner,
    CreditOptions,
)


def arguments(function):
    kinds = inspect.Parameter
    found = inspect.signature(function).parameters.values()
    nameless = (kinds.VAR_KEYWORD, kinds.POSITIONAL_ONLY)
    return {p.name for p in found if p.kind not in nameless} - {"self"}


def test_the_shared_arguments_are_listed_once_and_each_of_them_is_taken():
    grouping, credit = arguments(GroupTransform.__init__), arguments(CreditAssigner.__init__)
    assert CreditOptions.__annotations__.keys() == grouping | credit
    own = ComparingOptions.__annotations__.keys() - CreditOptions.__annotations__.keys()
    assert own == arguments(ComparingCredit.__init__)
    settings = arguments(PolicyGradientLoss.__init__) - {"actor_network", "aggregation"}
    assert PolicyLossSettings.__annotations__.keys() == settings


@pytest.mark.parametrize("kind", ["losses", "advantages"])
def test_a_signature_hides_no_argument(kind):
    shared = {"losses": PolicyLossSettings, "advantages": CreditOptions}[kind].__annotations__
    for name in names(kind):
        if kind == "losses" and not issubclass(find(kind, name), PolicyGradientLoss):
            continue  # a loss of pairs
        found = inspect.signature(find(kind, name)).parameters
        assert found.keys() >= shared.keys(), name
        assert not any(p.kind is p.VAR_KEYWORD for p in found.values()), name


def test_the_estimator_in_an_actor_shows_the_arguments_that_it_hands_on():
    found = inspect.signature(objectives.RayMCAdvantage).parameters
    plain = inspect.signature(objectives.MCAdvantage).parameters
    assert found.keys() - plain.keys() == {
        "ray_init_config",
        "remote_config",
        "actor_name",
        "timeout_s",
    }
    assert plain["trajectory_return"].default == "sum"


def test_names_that_are_imported_when_asked_for_are_listed_before():
    assert set(objectives.__all__) <= set(dir(objectives))
    assert all(hasattr(objectives, name) for name in objectives.__all__)

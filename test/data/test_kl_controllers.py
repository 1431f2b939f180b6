"""Controllers of the KL coefficient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_llm.data import AdaptiveKLController, ConstantKLController
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import adapted_kl_coefficient


def test_the_step_is_that_of_the_paper_by_hand():
    # arXiv:1909.08593 section 2.2, K = 0.1: e = (7 - 6) / 6 = 1/6; 12 and 0 are clipped to +-0.2.
    assert adapted_kl_coefficient(0.5, 7.0, target=6.0, gain=0.1) == pytest.approx(
        0.5 * (1 + 0.1 / 6), abs=1e-12
    )
    assert adapted_kl_coefficient(0.5, 12.0, target=6.0, gain=0.1) == pytest.approx(0.51, abs=1e-12)
    assert adapted_kl_coefficient(0.5, 0.0, target=6.0, gain=0.1) == pytest.approx(0.49, abs=1e-12)


def test_at_the_target_nothing_changes():
    controller = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=10)
    assert controller.update([1.0, 3.0]) == 0.3


def test_an_update_counts_for_what_it_has_seen():
    one = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=1000)
    many = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=1000)
    one.update([5.0] * 8)
    for _ in range(8):
        many.update([5.0])
    assert one.coef == pytest.approx(many.coef, rel=1e-5)


def test_the_coefficient_never_turns_its_sign():
    controller = AdaptiveKLController(init_kl_coef=1.0, target=1.0, horizon=1)
    assert controller.update([0.0] * 100) == pytest.approx(0.8)


def test_it_holds_a_divergence_at_its_target():
    """A policy whose divergence falls with the coefficient: kl = 1 / coef settles at the target."""
    controller = AdaptiveKLController(init_kl_coef=5.0, target=2.0, horizon=10)
    for _ in range(2000):
        controller.update([1.0 / controller.coef])
    assert 1.0 / controller.coef == pytest.approx(2.0, rel=1e-3)


def test_no_divergences_change_nothing_and_impossible_ones_raise():
    controller = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=10)
    assert controller.update([]) == 0.3
    with pytest.raises(DataError, match="NaN"):
        controller.update([float("nan")])
    assert controller.coef == 0.3


def test_the_model_that_is_controlled_follows():
    model = SimpleNamespace(kl_coef=None)
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10, model=model)
    assert model.kl_coef == 0.1
    controller.update([12.0])
    assert model.kl_coef == controller.coef != 0.1
    ConstantKLController(kl_coef=0.7, model=model)
    assert model.kl_coef == 0.7
    with pytest.raises(ConfigError, match="kl_coef"):
        ConstantKLController(kl_coef=0.7, model=object())


def test_state_goes_on_where_it_was():
    first = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    first.update([12.0])
    second = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    second.load_state_dict(first.state_dict())
    assert second.update([3.0]) == first.update([3.0])


def test_penalties_in_place_of_divergences_are_spoken_of(warned):
    AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100).update([-0.3])
    assert "takes the divergences themselves" in warned[0]

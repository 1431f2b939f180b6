"""The canary: loads that return without an error and are wrong."""

from __future__ import annotations

import pytest
import torch
from weight_update.learner import FAULTS, Faulty, Learner, does_nothing, loads_half

from torchrl_llm.data.scoring import TokenScores
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends import FakeBackend, TransformersBackend
from torchrl_llm.modules.backends.weights import TensorSource
from torchrl_llm.weight_update import CanaryCheck, EngineWeights


def _sampler(make_tiny_model, **options):
    return TransformersBackend(make_tiny_model(**options), eos_token_ids=(2,))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_is_wrong_without_an_error_is_caught(make_tiny_model, fault):
    learner = Learner(make_tiny_model())
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    updater = EngineWeights(engine, model=learner.model, canary=CanaryCheck(learner.reference))
    learner.step()
    updater.push_weights()
    assert updater.version == 1

    engine.fault = fault
    learner.step()
    with pytest.raises(WeightUpdateError, match="the engine does not compute with version 2"):
        updater.push_weights()

    engine.fault = lambda weights: None
    updater.push_weights()
    assert updater.receipts[0].version == updater.version == 3


@pytest.mark.parametrize("fault", [does_nothing, loads_half])
def test_a_step_far_below_the_tolerance_that_never_arrived_is_caught(make_tiny_model, fault):
    learner = Learner(make_tiny_model(), lr=1e-5)
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    canary = CanaryCheck(learner.reference, tolerance=0.1)
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    updater.push_weights()
    learner.step()
    assert 1e-5 < canary.observe(engine).max_difference < 0.05  # the step alone
    engine.fault = fault
    with pytest.raises(WeightUpdateError, match="of the trainer's last move"):
        updater.push_weights()


def test_an_engine_in_bfloat16_passes_and_is_still_watched(make_tiny_model):
    learner = Learner(make_tiny_model(), lr=1e-2)
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    engine.backend.model.to(torch.bfloat16)
    canary = CanaryCheck(learner.reference, tolerance=3.0)
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    for _ in range(3):
        updater.push_weights()
        learner.step()
    assert canary.observe(engine).max_difference > 1e-3  # bfloat16 is no float32
    engine.fault = does_nothing
    with pytest.raises(WeightUpdateError, match="of the trainer's last move"):
        updater.push_weights()


def test_the_message_names_the_worst_token_and_the_report_says_how_far():
    class Fixed(FakeBackend):
        log_probs = torch.zeros(5)

        def token_scores(self, sequences, select, **options):
            return TokenScores(self.log_probs)

    trainer, engine = (Fixed(vocab_size=64, eos_token_ids=(2,)) for _ in range(2))
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10, 11])]
    canary = CanaryCheck(trainer, rows, tolerance=0.01)
    trainer.log_probs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    engine.log_probs = torch.tensor([-1.0, -2.005, -3.0, -4.5, -5.2])
    with pytest.raises(
        WeightUpdateError,
        match=r"token 10 at position 2 of canary row 1 has log-prob -4.5 there and -4 in the "
        r"trainer \(apart by 0.5 nats\), and 0.01 is tolerated",
    ):
        canary.check(engine, version=3)
    engine.log_probs = torch.tensor([-1.0, -2.0, float("nan"), -4.5, -5.2])
    with pytest.raises(WeightUpdateError, match="token 9 at position 1 of canary row 1"):
        canary.check(engine)
    engine.log_probs = trainer.log_probs + 0.001
    report = canary.check(engine)
    assert report.max_difference == pytest.approx(0.001, abs=1e-6)
    assert report.followed is None
    # The trainer moves by 0.01 everywhere, the engine by 0.0095: it made 95 % of the move.
    trainer.log_probs = trainer.log_probs + 0.01
    engine.log_probs = trainer.log_probs - 0.01 + 0.0095
    assert canary.check(engine).followed == pytest.approx(0.95, abs=1e-3)


def test_rounding_is_not_taken_for_a_move_that_was_missed():
    # Engine and trainer differ by noise half as large as the trainer's moves.
    class Noisy(FakeBackend):
        log_probs = torch.zeros(60)
        noise = 0.0

        def token_scores(self, sequences, select, **options):
            return TokenScores(self.log_probs + self.noise * torch.randn(60))

    trainer, engine = (Noisy(vocab_size=64, eos_token_ids=(2,)) for _ in range(2))
    engine.noise = 0.01
    canary = CanaryCheck(trainer, tolerance=0.1)
    for _ in range(200):
        trainer.log_probs = trainer.log_probs + 0.02 * torch.randn(60)
        engine.log_probs = trainer.log_probs
        canary.check(engine)


def test_settings_that_would_prove_nothing_are_refused():
    fake = FakeBackend(vocab_size=16, eos_token_ids=(2,))
    with pytest.raises(ConfigError, match="tolerance"):
        CanaryCheck(fake, tolerance=0)
    with pytest.raises(ConfigError, match=r"2 tokens or more each; these have less: \[1\]"):
        CanaryCheck(fake, [torch.tensor([1, 2]), torch.tensor([1])])
    with pytest.raises(ConfigError, match="2 tokens"):
        CanaryCheck(fake, [])
    fake.update_weights(TensorSource(dict(fake.module.state_dict())), version=1)
    assert CanaryCheck(fake).check(fake) == (0.0, None)

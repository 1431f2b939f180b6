"""The canary: loads that return without an error and are wrong."""

import pytest
import torch
from weights.learner import (
    FAULTS,
    Faulty,
    Learner,
    does_nothing,
    loads_half,
    permutes,
    push_and_step,
)

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends import FakeBackend, TransformersBackend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import CanaryCheck, EngineWeights
from torchrl_llm.weights.weight_source import TensorSource


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
def test_one_small_step_that_never_arrived_is_caught(make_tiny_model, fault):
    learner = Learner(make_tiny_model(), lr=1e-5)
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    canary = CanaryCheck(learner.reference)
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    updater.push_weights()
    learner.step()
    step = canary.scores(engine) - canary.scores(learner.reference)
    assert 1e-5 < step.abs().median() < 0.05
    engine.fault = fault
    with pytest.raises(WeightUpdateError, match="does not compute with version 2"):
        updater.push_weights()


def _in_bfloat16(make_tiny_model, lr):
    learner = Learner(make_tiny_model(), lr=lr)
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    engine.backend.model.to(torch.bfloat16)
    canary = CanaryCheck(learner.reference, dtype=torch.bfloat16)
    return learner, engine, EngineWeights(engine, model=learner.model, canary=canary)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_in_bfloat16_passes_and_is_still_watched(make_tiny_model, fault):
    learner, engine, updater = _in_bfloat16(make_tiny_model, lr=1e-3)
    for _ in range(10):
        updater.push_weights()
        assert 0.1 < updater.canary.report.rounding < 4
        learner.step()
    assert updater.canary.report.followed == pytest.approx(1.0, abs=0.2)
    engine.fault = fault
    with pytest.raises(WeightUpdateError, match="does not compute with version 1"):
        push_and_step(updater, learner, 5)


@pytest.mark.parametrize("fault", [does_nothing, permutes])
def test_steps_below_the_rounding_are_not_told_apart_and_faults_are(make_tiny_model, fault):
    learner, engine, updater = _in_bfloat16(make_tiny_model, lr=1e-6)
    for _ in range(5):
        updater.push_weights()
        assert updater.canary.report.followed is None  # which is no error
        learner.step()
    engine.fault = fault
    with pytest.raises(WeightUpdateError, match=r"no bit of its log-probs|as rounding explains"):
        push_and_step(updater, learner, 4)


@pytest.mark.parametrize(("quantization", "package"), [(None, "peft"), ("4bit", "bitsandbytes")])
def test_an_adapter_of_another_type_does_not_hide_how_its_base_rounds(quantization, package):
    for name in ("peft", package):
        pytest.importorskip(name)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    model = load_model(dtype="bfloat16", quantization=quantization, lora=lora).eval()
    adapter = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert {p.dtype for p in adapter} == {torch.float32}
    canary = CanaryCheck(TransformersBackend(model), dtype=torch.bfloat16)
    with torch.no_grad():
        bare = canary.target().spread.median()
        for parameter in adapter:
            parameter.fill_(2e-4)
        assert canary.target().spread.median() > bare / 2 > 1e-4


def test_a_trainer_in_bfloat16_is_measured_too(make_tiny_model):
    learner = Learner(make_tiny_model().to(torch.bfloat16), lr=1e-3)
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    engine.backend.model.to(torch.bfloat16)
    # The same kernels over the same weights differ in nothing; others would in what is measured.
    canary = CanaryCheck(learner.reference, dtype=torch.bfloat16)
    spread = canary.target().spread
    assert 1e-4 < float(spread.median()) < 1e-1
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    for _ in range(3):
        updater.push_weights()
        learner.step()
    engine.fault = permutes
    with pytest.raises(WeightUpdateError, match="does not compute with version 4"):
        updater.push_weights()


def test_the_rows_are_likely_tokens_and_drawing_them_moves_no_other_draw(make_tiny_model):
    reference = Learner(make_tiny_model(initializer_range=0.3)).reference
    state = torch.get_rng_state()
    canary = CanaryCheck(reference)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(row) for row in canary.prompts] == [4 + 16] * 4
    random = CanaryCheck(reference, list(torch.randint(292, (4, 20)).unbind()))
    assert canary.scores(reference).mean() > random.scores(reference).mean() + 2


def test_whatever_autocast_holds_outside_the_trainer_is_scored_as_it_is(make_tiny_model):
    canary = CanaryCheck(Learner(make_tiny_model()).reference, dtype=torch.bfloat16)
    plain = canary.target()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = canary.target()
    assert all(torch.equal(a, b) for a, b in zip(plain[3:], inside[3:], strict=True))
    assert not torch.equal(plain.exact, plain.rounded)


def test_settings_that_would_prove_nothing_are_refused():
    fake = FakeBackend(vocab_size=16, eos_token_ids=(2,))
    with pytest.raises(ConfigError, match=r"2 tokens or more each; these have less: \[1\]"):
        CanaryCheck(fake, [torch.tensor([1, 2]), torch.tensor([1])])
    with pytest.raises(ConfigError, match="2 tokens"):
        CanaryCheck(fake, [])
    fake.update_weights(TensorSource(dict(fake.module.state_dict())), version=1)
    assert CanaryCheck(fake).check(fake) == (0.0, 0.0, None)

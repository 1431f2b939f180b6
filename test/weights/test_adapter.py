"""The LoRA adapter alone, to a sampler that is a PEFT model or has none."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from weights.learner import Learner, assert_same_model

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends import TransformersBackend
from torchrl_llm.weights import AdapterWeights, CanaryCheck, DeltaWeights, EngineWeights
from torchrl_llm.weights.weight_source import AdapterSource, TensorSource, load_into


def _with_lora(model, **options):
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(options.pop("seed", 0))
        return get_peft_model(model, LoraConfig(**{**settings, **options})).eval()


@pytest.mark.parametrize("kind", [AdapterWeights, DeltaWeights])
def test_a_sampler_follows_ten_steps_of_an_adapter(make_tiny_model, kind):
    learner, merged = Learner(_with_lora(make_tiny_model())), kind is DeltaWeights
    own = make_tiny_model() if merged else _with_lora(make_tiny_model(), seed=3)
    sampler = TransformersBackend(own, eos_token_ids=(2,))
    base = own.model.norm.weight if merged else own.get_base_model().model.norm.weight
    before = base.clone()
    canary = CanaryCheck(learner.reference, tolerance=1e-4)
    updater = kind(sampler, model=learner.model, canary=canary)
    for _ in range(10):
        learner.step()
        updater.push_weights()
        assert_same_model(sampler, learner.reference, tolerance=2e-5 if merged else 0.0)
    # Two layers, two adapted modules each: A and B, or the merged weight.
    assert updater.receipts[0].num_tensors == (4 if merged else 8)
    assert torch.equal(base, before)


@pytest.mark.parametrize("kind", [AdapterWeights, DeltaWeights])
def test_a_compiled_model_is_looked_into(make_tiny_model, kind):
    learner = Learner(_with_lora(make_tiny_model()))
    own = make_tiny_model() if kind is DeltaWeights else _with_lora(make_tiny_model(), seed=3)
    sampler = TransformersBackend(own, eos_token_ids=(2,))
    wrapped = torch.compile(learner.model)  # compiles when it is called, which it is not here
    kind(sampler, model=wrapped).push_weights()
    assert_same_model(sampler, learner.reference)


def test_a_layer_trained_as_a_whole_beside_the_adapter_is_sent_merged(make_tiny_model):
    options = {"tie_word_embeddings": False}
    learner = Learner(_with_lora(make_tiny_model(**options), modules_to_save=["lm_head"]))
    sampler = TransformersBackend(make_tiny_model(**options), eos_token_ids=(2,))
    updater = DeltaWeights(sampler, model=learner.model)
    for num_sent in (27, 5):  # all, then the merged weights of two layers and the head
        learner.step()
        updater.push_weights()
        assert_same_model(sampler, learner.reference)
        assert updater.num_sent == num_sent


def test_an_adapter_for_a_sampler_without_one_is_refused(make_tiny_model):
    trained = _with_lora(make_tiny_model())
    bare = TransformersBackend(make_tiny_model(), eos_token_ids=(2,))
    with pytest.raises(WeightUpdateError, match=r"no PEFT model .*\(EngineWeights or DeltaWeights"):
        AdapterWeights(bare, model=trained).push_weights()
    other = _with_lora(make_tiny_model(), target_modules=["q_proj", "down_proj", "v_proj"])
    with pytest.raises(WeightUpdateError, match="4 weights of the sampler's adapter were not sent"):
        AdapterWeights(TransformersBackend(other, eos_token_ids=(2,)), model=trained).push_weights()
    with pytest.raises(ConfigError, match="PEFT model with one active adapter, got Qwen2"):
        AdapterWeights(bare, model=make_tiny_model()).push_weights()


def test_an_adapter_travels_with_its_digest_and_its_configuration(make_tiny_model):
    sent = []

    class Recording(TransformersBackend):
        def update_weights(self, source, *, version):
            sent.append(pickle.loads(pickle.dumps(source)))
            return super().update_weights(sent[-1], version=version)

    trained = _with_lora(make_tiny_model())
    sampler = Recording(_with_lora(make_tiny_model(), seed=9), eos_token_ids=(2,))
    updater = AdapterWeights(sampler, model=trained)
    updater.push_weights()
    [source] = sent
    assert isinstance(source, AdapterSource)
    assert source.digest == updater.receipts[0].digest
    read = json.loads(json.dumps(source.config))
    assert (read["r"], read["lora_alpha"], read["peft_type"]) == (4, 8, "LORA")
    assert sorted(read["target_modules"]) == ["down_proj", "q_proj"]


def test_full_weights_of_a_model_with_adapter_are_merged(make_tiny_model):
    learner = Learner(_with_lora(make_tiny_model()))
    sampler = TransformersBackend(make_tiny_model(seed=4), eos_token_ids=(2,))
    EngineWeights(sampler, model=learner.model).push_weights()
    assert_same_model(sampler, learner.reference)


def test_a_source_that_was_changed_on_the_way_is_refused():
    source = pickle.loads(pickle.dumps(TensorSource({"weight": torch.ones(1, 1)})))
    next(source.receive())[1][0, 0] = 2
    module = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(WeightUpdateError, match="1 tensors, 4 bytes"):
        load_into(module, source, version=1)

"""Weights into a real vLLM engine of two worker processes: each takes its part, or none does.

One engine for the module: the embedded model over two CPU workers, with LoRA.
"""

import os
import shutil
import signal

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("peft")

from modules.backends.vllm.engine_helper import small_backend
from peft import LoraConfig, get_peft_model
from redis_server import RedisServer
from weights.learner import Faulty, Learner, assert_same_model, does_nothing, scores

from torchrl_llm.errors import BackendError, ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import SamplingParams
from torchrl_llm.modules.model_loading import load_model, load_tokenizer
from torchrl_llm.weights import (
    AdapterWeights,
    CanaryCheck,
    DeltaWeights,
    EngineWeights,
    FileWeights,
    SharedEngineWeights,
    WeightLedger,
    engine_weights,
)
from torchrl_llm.weights.redis_weights import RedisWeightReader, RedisWeightWriter
from torchrl_llm.weights.weight_source import TensorSource

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine():
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    return small_backend(engine_options={"num_devices": 2, **lora})


def _model():
    return load_model(dtype="float32").eval()


def _follow(learner, updater, engine, steps=3):
    """After every step the engine is the trained model, and was not before the push."""
    updater.version = engine.version
    for _ in range(steps):
        old = scores(engine)
        learner.step()
        assert float((scores(learner.reference) - old).abs().max()) > 1e-3
        updater.push_weights(learner.model)
        assert engine.version == updater.version == updater.receipts[0].version
        assert_same_model(engine, learner.reference, tolerance=1e-5)


MAKERS = {
    "load": lambda engine, folder, **proofs: EngineWeights(engine, **proofs),
    "unhashed": lambda engine, folder, **proofs: EngineWeights(engine, fingerprint=False, **proofs),
    "delta": lambda engine, folder, **proofs: DeltaWeights(engine, **proofs),
    "files": lambda engine, folder, **proofs: FileWeights(engine, folder=folder, **proofs),
}


@pytest.mark.parametrize("way", MAKERS)
def test_two_workers_follow_every_optimizer_step(engine, tmp_path, way):
    learner, ledger = Learner(_model()), WeightLedger()
    proofs = {"canary": CanaryCheck(learner.reference), "ledger": ledger}
    updater = MAKERS[way](engine, tmp_path, **proofs)
    try:
        _follow(learner, updater, engine)
    finally:
        getattr(updater, "close", lambda: None)()
    assert updater.receipts[0].num_tensors == len(engine_weights(learner.model))
    ledger.check({updater.version: updater.receipts[0].digest})


def test_two_workers_sample_as_a_new_engine_of_the_same_weights(engine, tmp_path):
    learner, updater = Learner(_model()), EngineWeights(engine)
    learner.step()
    updater.version = engine.version
    updater.push_weights(learner.model)
    learner.model.save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    assert_same_model(engine, small_backend(tmp_path), tolerance=1e-5)


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server")
def test_two_workers_take_a_version_out_of_redis(engine, tmp_path):
    learner = Learner(_model())
    learner.step()
    with RedisServer(tmp_path) as server:
        digest = RedisWeightWriter(server.url, "run").publish(learner.model, engine.version + 1)
        version, source = RedisWeightReader(server.url, "run").newest()
        [receipt] = engine.update_weights(source, version=version)
    assert (receipt.version, receipt.digest) == (engine.version, digest) == (version, digest)
    assert_same_model(engine, learner.reference, tolerance=1e-5)


def test_two_workers_take_only_what_changed(engine):
    model = _model()
    some = [value for name, value in model.named_parameters() if "down_proj" in name]
    learner, updater = Learner(model, parameters=some), DeltaWeights(engine)
    updater.version = engine.version
    updater.push_weights(model)
    _follow(learner, updater, engine, steps=2)
    assert updater.num_sent == len(some)


@pytest.mark.parametrize("updater_class", [AdapterWeights, DeltaWeights])
def test_two_workers_follow_an_adapter(engine, updater_class):
    base = _model()
    updater = EngineWeights(engine, model=base)
    updater.version = engine.version
    updater.push_weights()
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    learner = Learner(get_peft_model(base, settings).eval(), lr=3e-3)
    canary = CanaryCheck(learner.reference)
    _follow(learner, updater_class(engine, canary=canary), engine)


def test_what_one_worker_refuses_no_worker_takes(engine):
    model = _model()
    updater = EngineWeights(engine, model=model)
    updater.version = engine.version
    updater.push_weights()
    before = scores(engine)
    weights = {name: value + 1 for name, value in engine_weights(model).items()}
    # The last column is the second worker's.
    name = "model.layers.1.self_attn.o_proj.weight"
    bad = [
        ({**weights, name: weights[name][:, :-1]}, "keep the weights that they had.*vLLM could"),
        ({k: v for k, v in weights.items() if k != name}, "o_proj.weight'"),
    ]
    for given, message in bad:
        with pytest.raises(WeightUpdateError, match=message):
            engine.update_weights(TensorSource(given), version=99)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"], "odd": weights[name]}
    with pytest.raises(WeightUpdateError, match="keep the weights that they had"):
        engine.update_weights(TensorSource(tied), version=99)
    with pytest.raises(WeightUpdateError, match="was sent as 00"):
        engine.update_weights(TensorSource(weights, digest="00"), version=99)
    assert torch.equal(scores(engine), before)
    assert engine.version == updater.version


def test_weights_that_no_worker_loaded_are_found(engine):
    learner = Learner(_model())
    faulty = Faulty(engine, fault=does_nothing)
    updater = EngineWeights(faulty, canary=CanaryCheck(learner.reference))
    learner.step()
    with pytest.raises(WeightUpdateError, match="does not compute with version 1"):
        updater.push_weights(learner.model)


def test_a_worker_that_died_is_an_error_of_the_engine():
    lost = small_backend(engine_options={"num_devices": 2})
    os.kill(lost.engine.llm_engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="build the engine again"):
        EngineWeights(lost).push_weights(_model())
    assert lost.version == 0


def test_one_memory_for_trainer_and_workers_is_refused_with_what_works_instead(engine):
    with pytest.raises(ConfigError, match=r"2 worker processes.*type=load, delta or adapter"):
        SharedEngineWeights(_model(), engine)


def test_seeds_repeat_what_two_workers_sample(engine):
    params = SamplingParams(max_new_tokens=8, num_samples=2, seed=5, ignore_eos=True)
    prompts = [torch.tensor([5, 6, 7])]
    first, second = (
        [completion.token_ids.tolist() for completion in engine.generate(prompts, params)[0]]
        for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]

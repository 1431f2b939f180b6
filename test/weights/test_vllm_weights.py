"""Every way of weights into a real vLLM engine of this process: it computes with them, or says no.

Two engines for the module: the embedded Llama, tied, with LoRA; and a Qwen2 that is not tied.
"""

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("peft")

from collectors.collecting import make_env
from modules.backends.vllm.engine_helper import saved_tiny_model, small_backend
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from weights.learner import FAULTS, Faulty, Learner, assert_same_model, greedy, scores

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.errors import BackendError, ConfigError, WeightUpdateError
from torchrl_llm.modules import vLLMWrapper
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.model_loading import load_model, load_tokenizer
from torchrl_llm.weights import (
    AdapterWeights,
    CanaryCheck,
    DeltaWeights,
    EngineWeights,
    SharedEngineWeights,
    WeightLedger,
    engine_weights,
)
from torchrl_llm.weights.vllm_layout import weight_slots
from torchrl_llm.weights.vllm_loading import engine_model, load_weights
from torchrl_llm.weights.weight_source import TensorSource

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Untied; and with log-probs of a usual size, of which float32 has six digits behind the point.
QWEN = {"tie_word_embeddings": False, "initializer_range": 0.1}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


@pytest.fixture(scope="module")
def llama():
    """Tied, with room for an adapter."""
    return small_backend(engine_options=LORA)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, make_tiny_model, tokenizer):
    """Not tied, with biases, a vocabulary that the engine pads, and no LoRA."""
    folder = tmp_path_factory.mktemp("qwen")
    saved_tiny_model(folder, make_tiny_model, tokenizer, **QWEN, seed=3)
    return small_backend(folder)


@pytest.fixture(params=["llama", "qwen"])
def pair(request, make_tiny_model):
    """An engine, and a model of its architecture to be trained."""
    backend = request.getfixturevalue(request.param)
    if request.param == "llama":
        return backend, load_model(dtype="float32").eval()
    return backend, make_tiny_model(**HEADS, **QWEN)


def _follow(learner, updater, backend, *, steps=10, ledger=None):
    """After every step the engine is the trained model, and was not before the push."""
    for _ in range(steps):
        before, old = backend.version, scores(backend)
        learner.step()
        # Far more than the tolerance of assert_same_model: an engine left behind would be found.
        assert float((scores(learner.reference) - old).abs().max()) > 1e-3
        updater.push_weights()
        assert backend.version == updater.version == updater.receipts[0].version != before
        assert_same_model(backend, learner.reference)
        if ledger is not None:
            ledger.check({updater.version: updater.receipts[0].digest})


@pytest.mark.parametrize("updater_type", [EngineWeights, DeltaWeights])
def test_an_engine_follows_ten_optimizer_steps(pair, updater_type):
    backend, model = pair
    learner, ledger = Learner(model), WeightLedger()
    canary = CanaryCheck(learner.reference, tolerance=1e-4)
    updater = updater_type(backend, model=model, canary=canary, ledger=ledger)
    _follow(learner, updater, backend, ledger=ledger)
    assert len(ledger) == 10


def test_shared_weights_follow_ten_optimizer_steps_and_nothing_is_copied(pair, monkeypatch):
    backend, model = pair
    learner = Learner(model)  # the optimizer is there before the memory is shared
    learner.step()
    updater = SharedEngineWeights(model, backend, canary=CanaryCheck(learner.reference))
    slots = weight_slots(engine_model(backend.engine)).slots
    parameters = dict(model.named_parameters())
    assert updater.storage.num_bytes == sum(p.numel() * 4 for p in parameters.values())
    assert_same_model(backend, learner.reference)

    copied = []
    copy = torch.Tensor.copy_

    def noted(self, *args, **options):
        copied.append(self.data_ptr())
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    for _ in range(10):
        learner.step()
        copied.clear()
        updater.push_weights()
        assert not set(copied) & set(addresses.values())
        assert backend.version == updater.version
        assert_same_model(backend, learner.reference)
    assert addresses == {name: p.data_ptr() for name, p in parameters.items()}
    assert all(slots[name].data_ptr() == address for name, address in addresses.items())


def test_norms_of_queries_and_keys_have_their_place_too(tmp_path, tokenizer):
    settings = {
        "vocab_size": 292,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**settings)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    backend, learner = small_backend(tmp_path), Learner(model)
    _follow(learner, EngineWeights(backend, model=model), backend, steps=2)
    updater = SharedEngineWeights(model, backend)
    updater.version = backend.version
    _follow(learner, updater, backend, steps=2)


def test_a_collector_samples_shared_weights_only_by_the_version_that_was_pushed(llama):
    model = load_model(dtype="float32").eval()
    learner, tokenizer = Learner(model), load_tokenizer()
    updater = SharedEngineWeights(model, llama, canary=CanaryCheck(learner.reference))
    settings = {"max_new_tokens": 6, "ignore_eos": True}
    counted = {"policy_version": llama.version}  # other tests have updated this engine before
    policy = vLLMWrapper(llama, tokenizer=tokenizer, generate_kwargs=settings, **counted)
    collector = LLMCollector(
        make_env(num_envs=3, turns=1),
        policy=policy,
        dialog_turns_per_batch=3,
        flatten_data=True,
        weight_updater=updater,
    )
    start = collector.policy_version
    for step in range(3):
        batch = collector.rollout()
        trace, log_probs = batch["trace"], batch["log_probs", "full"]
        for row in range(3):
            sampled = trace[row]["source"] == 3
            assert int(sampled.sum()) == 6
            assert set(trace[row]["policy_version"][sampled].tolist()) == {start + step}
            ids = batch["tokens", "full"][row]
            with torch.no_grad():
                wanted = learner.reference.token_scores([ids], [sampled]).log_probs
            assert torch.allclose(log_probs[row][sampled], wanted, atol=1e-5, rtol=1e-5)
        learner.step()
        with pytest.raises(WeightUpdateError, match="changed since they were last pushed"):
            collector.rollout()
        collector.update_policy_weights_(model)
    model.model.norm.weight.data = model.model.norm.weight.clone()
    with pytest.raises(WeightUpdateError, match=r"\['model.norm.weight'\]"):
        collector.rollout()
    collector.shutdown()


def test_shared_storage_that_was_left_is_named_or_bound_again(pair):
    backend, model = pair
    learner = Learner(model)
    updater = SharedEngineWeights(model, backend, fingerprint=False)
    updater.push_weights(model)
    assert updater.receipts[0][1:4] == (f"shared-{updater.version}", updater.storage.num_tensors, 0)
    with torch.no_grad():
        model.model.norm.weight.data = model.model.norm.weight * 1.1
    with pytest.raises(WeightUpdateError, match=r"1 weights .*\['model.norm.weight'\]"):
        updater.push_weights()
    healing = SharedEngineWeights(model, backend, rebind=True)
    with torch.no_grad():
        model.model.norm.weight.data = model.model.norm.weight * 1.1
    model.to(torch.float64).to(torch.float32)
    healing.push_weights()
    assert_same_model(backend, learner.reference)
    with pytest.raises(ConfigError, match="not those that are shared"):
        healing.push_weights({n: v.clone() for n, v in model.state_dict().items()})


def test_the_cache_alone_sleeps_next_to_shared_weights(pair, monkeypatch):
    backend, model = pair
    learner, said = Learner(model), []
    updater = SharedEngineWeights(model, backend, canary=CanaryCheck(learner.reference))
    with pytest.raises(ConfigError, match=r"with a trainer.*release_cache"):
        backend.sleep(level=1)
    # The CPU's worker frees nothing; all that is above it is vLLM's own.
    worker = backend.engine.llm_engine.model_executor.driver_worker.worker

    def discard(tags):
        said.append(("discard", tags))
        for cache in worker.model_runner.kv_caches:
            cache.fill_(7.0)

    monkeypatch.setattr(worker, "discard", discard)
    monkeypatch.setattr(worker, "wake_up", lambda tags: said.append(("wake", tags)))
    for name in ("_frees", "_enabled"):
        monkeypatch.setattr(backend._local.sleep, name, True)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    before = greedy(backend)
    updater.sleep()
    with pytest.raises(BackendError, match="without a cache"):
        greedy(backend)
    updater.push_weights()
    # Nothing of the cache that is gone is read.
    assert [c.token_ids.tolist() for c in before] == [c.token_ids.tolist() for c in greedy(backend)]
    updater.sleep()
    learner.step()
    updater.push_weights()
    assert_same_model(backend, learner.reference)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert said == [("discard", ("kv_cache",)), ("wake", ["kv_cache"])] * 2


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (
            "model_config",
            "sleep_mode_backend",
            "criu",
            "choose 'cumem', which gives",
        ),
        (None, "kv_transfer_config", object(), "while a connector"),
    ],
)
def test_an_engine_that_cannot_give_back_its_cache_alone_is_refused(
    llama, monkeypatch, where, name, value, message
):
    config = llama.engine.llm_engine.vllm_config
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(getattr(config, where) if where else config, name, value)
    with pytest.raises(ConfigError, match=message):
        SharedEngineWeights(load_model(dtype="float32"), llama)


def test_memory_that_cannot_be_shared_is_refused_by_name(llama, qwen, make_tiny_model):
    model = load_model(dtype="float32")
    with pytest.raises(ConfigError, match=r"dtype torch.bfloat16 .* torch.float32 in the engine"):
        SharedEngineWeights(model.bfloat16(), llama)
    with pytest.raises(ConfigError, match="tied in the model that are not tied in the engine"):
        SharedEngineWeights(make_tiny_model(**HEADS), qwen)
    deeper = make_tiny_model(**HEADS, **QWEN, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"12 only the model .*layers.2.*, 0 only the engine"):
        SharedEngineWeights(deeper, qwen)
    with pytest.raises(ConfigError, match="take AdapterWeights"):
        SharedEngineWeights(_with_lora(load_model(dtype="float32")), llama)


def test_a_load_is_all_or_nothing(pair):
    backend, model = pair
    EngineWeights(backend, model=model).push_weights()
    before = scores(backend)
    weights = {name: value + 1 for name, value in engine_weights(model).items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    bad = [
        ({k: v for k, v in weights.items() if k != name}, "1 weights .* were not sent"),
        ({**weights, name: weights[name][:-1]}, r"k_proj.weight' was sent with shape"),
        ({**weights, "model.layers.9.bias": weights[name]}, "the sampler has no such weight"),
    ]
    for given, message in bad:
        with pytest.raises(WeightUpdateError, match=message):
            load_weights(backend.engine, TensorSource(given), version=99)
    with pytest.raises(WeightUpdateError, match="was sent as 00"):
        load_weights(backend.engine, TensorSource(weights, digest="00"), version=99)
    assert torch.equal(scores(backend), before)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_canary_finds_what_a_load_did_wrong(qwen, make_tiny_model, fault):
    learner = Learner(make_tiny_model(**HEADS, **QWEN), lr=1e-4)
    engine = Faulty(qwen, fault=lambda weights: None)
    canary = CanaryCheck(learner.reference)
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    updater.push_weights()
    engine.fault = fault
    learner.step()
    with pytest.raises(WeightUpdateError, match="does not compute with version 2"):
        updater.push_weights()


def test_cached_prefixes_of_old_weights_are_not_used(llama):
    learner = Learner(load_model(dtype="float32").eval())
    updater = EngineWeights(llama, model=learner.model)
    updater.push_weights()
    long = [torch.arange(3, 131)]
    params = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
    llama.generate(long, params)  # its blocks are cached now
    learner.step()
    updater.push_weights()
    [[ours]], [[theirs]] = (b.generate(long, params) for b in (llama, learner.reference))
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert float((ours.log_probs - theirs.log_probs).abs().max()) <= 5e-5


def _with_lora(model, **options):
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    return get_peft_model(model, LoraConfig(**{**settings, **options})).eval()


@pytest.mark.parametrize("kind", [AdapterWeights, DeltaWeights])
def test_an_adapter_follows_ten_optimizer_steps(llama, kind):
    base = load_model(dtype="float32").eval()
    EngineWeights(llama, model=base).push_weights()
    learner = Learner(_with_lora(base), lr=3e-3)
    canary = CanaryCheck(learner.reference)
    updater = kind(llama, model=learner.model, canary=canary)
    updater.version = llama.version
    _follow(learner, updater, llama)
    # Neither embedding nor o_proj, k_proj, up_proj and norms were sent.
    sent, expected = updater.receipts[0], (16, True) if kind is AdapterWeights else (8, False)
    assert (sent.num_tensors, sent.num_bytes < 200_000) == expected


def test_an_adapter_that_an_engine_cannot_take_is_refused(llama, qwen, make_tiny_model):
    wide = _with_lora(load_model(dtype="float32"), r=16)
    with pytest.raises(ConfigError, match=r"rank 16 and the engine takes 8"):
        AdapterWeights(llama, model=wide).push_weights()
    tiny = make_tiny_model(**HEADS, **QWEN)
    with pytest.raises(ConfigError, match=r"enable_lora=True, or send merged"):
        AdapterWeights(qwen, model=_with_lora(tiny)).push_weights()
    odd = _with_lora(load_model(dtype="float32"), target_modules=["q_proj"], bias="all")
    before = scores(llama)
    with pytest.raises(WeightUpdateError, match="vLLM refused the adapter"):
        AdapterWeights(llama, model=odd).push_weights()
    assert torch.equal(scores(llama), before)

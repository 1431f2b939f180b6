"""TorchRL's updaters in a collector, with engines in this process and in another."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from collectors.collecting import make_env
from tensordict import TensorDict
from weights.processes import Child, ChildBackend, answer, fake, trained_fake

from torchrl_llm.collectors import LLMCollector, vLLMUpdater, vLLMUpdaterV2
from torchrl_llm.data import Source
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.errors import ConfigError, MissingExtraError, WeightUpdateError
from torchrl_llm.modules import FakeBackend, FakeWrapper
from torchrl_llm.weights import get_model_metadata


def _in_collector(updater, backend, tokenizer):
    policy = FakeWrapper(backend, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3})
    return LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, weight_updater=updater
    )


def _sampler(tokenizer, seed=0):
    return FakeBackend(tokenizer=tokenizer, seed=seed)


def test_a_collector_counts_what_its_updater_brings(tokenizer):
    sampler, trained = _sampler(tokenizer), _sampler(tokenizer, 1).module
    updater = vLLMUpdater(device="cpu", timeout_s=20)
    with _in_collector(updater, sampler, tokenizer) as collector:
        collector.weight_updater.init(model_metadata=get_model_metadata(trained))
        collector.update_policy_weights_(trained)
        assert torch.equal(sampler.module.head, trained.head)
        assert collector.policy_version == 1
        assert [receipt.version for receipt in updater.receipts] == [1]
        for row in split_rollout(next(iter(collector))).unbind(0):
            sampled = row["trace", "source"] == Source.SAMPLED
            assert set(row["trace", "policy_version"][sampled].tolist()) == {1}


@pytest.mark.full
def test_an_engine_in_another_process_is_updated_through_its_proxy():
    child = Child(fake)
    try:
        engine = ChildBackend(child)
        updater = vLLMUpdater(device="cpu", timeout_s=30, vllm_tp_size=1)
        updater.register_collector(SimpleNamespace(policy=SimpleNamespace(backend=engine)))
        updater.init()
        for version in (1, 2):
            updater.push_weights(trained_fake(version))
            assert answer(engine) == answer(fake(version))
    finally:
        child.kill()


def test_a_tensor_parallel_size_that_the_engine_does_not_have_is_refused():
    updater = vLLMUpdater(device="cpu", vllm_tp_size=2)
    updater.register_collector(SimpleNamespace(policy=SimpleNamespace(backend=fake())))
    with pytest.raises(ConfigError, match=r"vllm_tp_size is 2 .* in 1 processes"):
        updater.push_weights(trained_fake(1))


@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: model.state_dict(),
        lambda model: TensorDict.from_module(model),
        lambda model: iter(model.state_dict().items()),
    ],
    ids=["module", "state_dict", "tensordict", "pairs"],
)
def test_the_second_updater_takes_weights_in_any_form(form):
    engine = fake()
    updater = vLLMUpdaterV2(engine)
    updater.init()
    updater.push_weights(form(trained_fake(1)))
    assert answer(engine) == answer(fake(1))
    assert updater.version == 1


def test_a_whole_model_goes_out_as_one_version():
    engine = fake()
    updater = vLLMUpdaterV2(engine)
    updater.push_weights_from_transformers(trained_fake(1))
    assert answer(engine) == answer(fake(1))
    updater.push_weights_from_transformers_optimized(trained_fake(2), batch_size=1)
    assert answer(engine) == answer(fake(2))
    assert updater.version == updater.receipts[0].version == 2


def test_metadata_that_were_announced_bind():
    engine, trained = fake(), trained_fake(1)
    updater = vLLMUpdaterV2(engine)
    updater.init(vLLMUpdaterV2.get_model_metadata(trained))
    updater.push_weights(trained)
    with pytest.raises(ConfigError, match=r"metadata announced.*'head'"):
        updater.push_weights({"embedding": trained.embedding})
    updater = vLLMUpdaterV2(engine)
    with pytest.raises(WeightUpdateError, match="not sent"):
        updater.push_weights({"embedding": trained.embedding})


def test_something_that_is_no_engine_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match="vllm"):
        vLLMUpdaterV2(object())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=dict))
    with pytest.raises(ConfigError, match="object is no engine"):
        vLLMUpdaterV2(object())


def test_the_second_updater_by_an_argument_of_the_first():
    engine = fake()
    updater = vLLMUpdater(v2=True, vllm_engine=engine)
    assert type(updater) is vLLMUpdaterV2
    assert updater.vllm_engine is engine
    assert updater.get_tp_size() == 1
    updater.push_weights(weights=trained_fake(1))
    assert answer(engine) == answer(fake(1))
    with pytest.raises(ConfigError, match=r"got 0 positional arguments and \['master_port'\]"):
        vLLMUpdater(v2=True, master_port=7)


def test_attributes_by_torchrls_names(tokenizer):
    updater = vLLMUpdater(device="cpu")
    with _in_collector(None, _sampler(tokenizer), tokenizer) as collector:
        assert collector.set_weight_updater(updater)
        assert updater.collector is collector
        metadata = get_model_metadata(trained_fake(1))
        updater.init(metadata)
        updater.maybe_init_group()
        assert updater.model_metadata is metadata
        assert updater.master_address == "127.0.0.1"
        assert updater.master_port > 0

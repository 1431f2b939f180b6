"""Two real vLLM replicas on Ray: as transformers, through new weights and a death."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from waiting import wait_until
from weights.learner import assert_same_model

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.collectors.weight_update import vLLMUpdater
from torchrl_llm.data import FinishReason
from torchrl_llm.data.views import Text
from torchrl_llm.errors import BackendError, ConfigError, ResourceError
from torchrl_llm.modules import (
    AsyncVLLM,
    SamplingParams,
    TransformersBackend,
    load_model,
    load_tokenizer,
    make_async_vllm_engine,
    make_vllm_worker,
    vLLMWrapper,
)
from torchrl_llm.modules.backends.vllm import async_engine
from torchrl_llm.modules.backends.vllm.async_engine import ServedEngine
from torchrl_llm.weights import EngineWeights

ray = pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.ray]

ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 << 20,
}
PROMPTS = ["user: 12 + 34 =", "user: 5", "assistant: the sum of 3 and 4 is", "1 + 1"]


@pytest.fixture(scope="module")
def engine(cluster):
    with AsyncVLLM.from_pretrained(
        num_replicas=2,
        num_cpus=0.5,
        compile=False,
        interval_s=0.5,
        env_vars={"OMP_NUM_THREADS": "1"},
        worker_extension_cls="torchrl_llm.compat.vllm_group.vLLMWorker",
        **ENGINE,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def prompts(tokenizer):
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in PROMPTS]


def assert_equal_to(engine, model, tokenizer, **options):
    """The same greedy ids, and log-probs within 1e-5 in float32."""
    params = SamplingParams(max_new_tokens=12, temperature=0)
    reference = TransformersBackend(model, tokenizer=tokenizer)
    wanted = reference.generate(prompts(tokenizer), params)
    found = engine.generate(prompts(tokenizer), params, **options)
    for [a], [b] in zip(found, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)
        assert a.finish_reason == b.finish_reason
    rows = [torch.cat([p, c.token_ids]) for p, [c] in zip(prompts(tokenizer), wanted, strict=True)]
    select = [torch.arange(len(row)) > 0 for row in rows]
    with torch.no_grad():
        scores = reference.token_scores(rows, select).log_probs
    torch.testing.assert_close(
        engine.token_scores(rows, select).log_probs, scores, atol=1e-5, rtol=1e-5
    )


def test_every_replica_answers_as_transformers_does(engine, model, tokenizer):
    for replica in (None, 0, 1):
        assert_equal_to(engine, model, tokenizer, replica=replica)


def test_requests_in_vllms_own_words(engine, tokenizer):
    from vllm import SamplingParams as NativeParams

    params = NativeParams(temperature=0.0, max_tokens=5)
    one = engine.generate(PROMPTS[0], params)
    spelled = tokenizer.decode(one.outputs[0].token_ids, skip_special_tokens=True)
    assert one.outputs[0].text == spelled
    several = engine.generate(PROMPTS, params, use_tqdm=False, timeout_seconds=60)
    assert several[0].outputs[0].token_ids == one.outputs[0].token_ids
    ids = tokenizer(PROMPTS[0])["input_ids"]
    pinned = engine.generate(prompt_token_ids=[ids, ids], sampling_params=params, actor_index=1)
    assert [o.outputs[0].token_ids for o in pinned] == [one.outputs[0].token_ids] * 2
    with pytest.raises(ConfigError, match="either prompts or prompt_token_ids"):
        engine.generate(PROMPTS, params, prompt_token_ids=ids)
    with pytest.raises(ConfigError, match="lora_request applies to one request"):
        engine.generate(PROMPTS, params, lora_request="mine")


def test_a_wrapper_and_many_threads_share_it(engine, tokenizer):
    policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_new_tokens": 4})
    row = TensorDict(text=Text(prompt=[PROMPTS[0], PROMPTS[1]]), batch_size=[2])
    out = policy(row)
    assert len(out["text", "response"]) == 2
    assert len(engine.get_num_unfinished_requests()) == 2
    assert engine.get_cache_usage(0) <= 1.0

    params = SamplingParams(max_new_tokens=4, temperature=0)
    wanted = [g[0].token_ids.tolist() for g in engine.generate(prompts(tokenizer), params)]

    def ask(k):
        [[found]] = engine.generate([prompts(tokenizer)[k % 4]], params)
        return found.token_ids.tolist() == wanted[k % 4]

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(ask, range(128)))


def test_weights_reach_both_by_either_updater(engine, model, tokenizer):
    version = engine.version
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collector = Collector(engine)
    for path in (EngineWeights(engine), vLLMUpdater(device="cpu")):
        path.register_collector(collector)
        ids = prompts(tokenizer)[0][None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        path.push_weights(model)
        collector.policy_version += 1
        version += 1
        assert engine.version == version == collector.policy_version
        for replica in (0, 1):
            assert_equal_to(engine, model, tokenizer, replica=replica)
        params = SamplingParams(max_new_tokens=2)
        [[done]] = engine.generate(prompts(tokenizer)[:1], params)
        assert set(done.versions.tolist()) == {version}


class Collector:
    def __init__(self, engine):
        self.policy = vLLMWrapper(engine, input_mode="tokens")
        self.policy_version = engine.version


def test_a_killed_replica_comes_back_with_the_weights_that_were_sent(engine, model, tokenizer):
    engine.update_weights(model.state_dict())
    pids = engine.replica_pids()
    params = SamplingParams(max_new_tokens=64, temperature=0, ignore_eos=True)
    [[wanted]] = engine.generate(prompts(tokenizer)[:1], params)
    threading.Timer(0.3, os.kill, (pids[0], signal.SIGKILL)).start()
    started = time.monotonic()

    def ask(_):
        [[found]] = engine.generate(prompts(tokenizer)[:1], params)
        return found.token_ids.tolist()

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, range(256)))
    assert time.monotonic() - started < 60
    assert answers == [wanted.token_ids.tolist()] * 256
    wait_until(lambda: engine.stats()["serving"] == 2, 150.0)
    assert engine.stats()["rebuilt"] == 1
    assert engine.replica_pids()[0] != pids[0]
    assert_equal_to(engine, model, tokenizer, replica=0)


def test_workers_can_be_called_and_extended(engine):
    assert engine.collective_rpc("check_weights_changed", kwargs={}) == [False, False]
    assert {engine.get_random_actor_index() for _ in range(50)} == {0, 1}
    assert engine.get_tp_size() == 1
    engine.reset_prefix_cache()
    engine.init_weight_update_group()
    with pytest.raises(ConfigError, match="takes no address"):
        engine.init_weight_update_group("127.0.0.1", 9)


def test_while_they_sleep_requests_raise_and_nobody_is_built_again(engine, tokenizer):
    pids = engine.replica_pids()
    params = SamplingParams(max_new_tokens=2)
    engine.sleep()
    with pytest.raises(BackendError, match=r"sleep|asleep"):
        engine.generate(prompts(tokenizer), params)
    waited = []
    engine.when_awake(lambda: waited.extend(engine.generate(prompts(tokenizer)[:1], params)))
    engine.wake(weights_only=True)
    assert not waited
    engine.wake()
    assert len(waited) == 1
    [done] = engine.generate(prompts(tokenizer)[:1], params)
    assert done[0].finish_reason != FinishReason.ABORT
    assert engine.replica_pids() == pids


def test_a_replica_over_two_devices_takes_new_weights(cluster):
    options = {**ENGINE, "num_devices": 2, "num_cpus": 0.1, "compile": False}
    model = load_model(dtype="float32").eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    with AsyncVLLM.from_pretrained(env_vars={"OMP_NUM_THREADS": "1"}, **options) as spread:
        updater = EngineWeights(spread, model=model)
        updater.push_weights()
        assert spread.version == updater.version == 1
        assert_same_model(spread, TransformersBackend(model, eos_token_ids=(2,)), tolerance=1e-5)


def test_too_few_devices_are_named_before_anything_starts(cluster, monkeypatch):
    monkeypatch.setattr(async_engine, "_on_cpu", lambda: False)
    with pytest.raises(ResourceError, match=r"needs 4 GPU \(0 of 0 free\)"):
        AsyncVLLM.from_pretrained(num_devices=2, num_replicas=2, num_cpus=0.1)
    with pytest.raises(ResourceError, match=r"needs 3 CPU"):
        make_vllm_worker(model_name=None, num_cpus=3)


def test_what_no_engine_knows_is_refused():
    with pytest.raises(ConfigError, match="in_flight"):
        AsyncVLLM(in_flight="hope")
    with pytest.raises(ConfigError, match="actor_class"):
        AsyncVLLM(actor_class=TransformersBackend)
    with pytest.raises(ConfigError, match="engine_args"):
        AsyncVLLM(7)
    with pytest.raises(ConfigError, match="they mean the same"):
        make_async_vllm_engine(model_name="m", tensor_parallel_size=2, num_devices=1)
    with pytest.raises(ConfigError, match="use num_replicas for more copies"):
        make_async_vllm_engine(model_name="m", data_parallel_size=2)
    with pytest.raises(ConfigError, match="contradicts"):
        make_vllm_worker(model_name="m", devices=[0, 1], num_devices=1)
    with pytest.raises(ConfigError, match="Ray chooses"):
        make_vllm_worker(model_name="m", devices=[0])


def test_engine_args_are_read_in_every_form():
    from vllm import EngineArgs

    model = str(embedded_model_path())
    for given in (EngineArgs(model=model, max_model_len=64), {"model": model, "max_model_len": 64}):
        made = AsyncVLLM(given)
        assert made.model_name == model
        assert made.spec.factory.func is ServedEngine
        found = made.spec.factory.keywords
        assert {k: found[k] for k in found if k not in ("in_flight", "seeded")} == {
            "max_model_len": 64
        }

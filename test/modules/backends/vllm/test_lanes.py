"""A Ray engine with more requests than it has threads: what changes it does not queue."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from collectors.ray_helper import start_ray

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data import FinishReason
from torchrl_llm.modules import AsyncVLLM, SamplingParams, load_model
from torchrl_llm.modules.backends import TensorSource

ray = pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.ray]

CALLS, TOKENS = 60, 120


@pytest.fixture(scope="module")
def engine():
    start_ray(ray, num_cpus=2)
    # Two threads for all calls: without a lane of its own an update would come after all of them.
    with AsyncVLLM.from_pretrained(
        embedded_model_path(),
        compile=False,
        in_flight="keep",
        max_concurrency=2,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
    ) as engine:
        yield engine
    ray.shutdown()


def test_an_update_and_an_abort_go_ahead_of_the_requests_that_wait(engine):
    prompt = torch.arange(10, 20)
    engine.generate([prompt], SamplingParams(max_new_tokens=1))
    done = []

    def ask():
        params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        done.append(engine.generate([prompt], params)[0][0])

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(CALLS)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not done:
        assert time.monotonic() < deadline, "no call was answered"
        time.sleep(0.01)
    weights = TensorSource({n: w.detach() for n, w in load_model().named_parameters()})
    engine.update_weights(weights, version=1)
    before = len(done)
    engine.abort()
    assert before < CALLS / 2
    for thread in threads:
        thread.join(120)
    cut = [one for one in done if one.finish_reason == FinishReason.ABORT]
    mixed = [one for one in done if one.versions is not None and len(one.versions.unique()) == 2]
    assert 1 <= len(cut) <= 2
    assert all(len(one.token_ids) < TOKENS for one in cut)
    # The rule is "keep": what ran goes on, and its tokens say by which weights.
    assert mixed
    assert all(one.versions.diff().ge(0).all() for one in mixed)
    assert done[-1].versions.unique().tolist() == [1]

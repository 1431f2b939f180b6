"""Weights that come while a real engine answers a collector: the call does not run to its end."""

import threading
import time

import pytest
import torch
from collectors.collecting import make_env

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.rollouts import sampled_tokens
from torchrl_llm.data.wire import unpack_row_list
from torchrl_llm.modules import load_model, load_tokenizer
from torchrl_llm.modules.backends import TensorSource

pytest.importorskip("vllm")
from modules.backends.vllm.engine_helper import small_backend

from torchrl_llm.modules import vLLMWrapper

pytestmark = pytest.mark.vllm

TOKENS, STEP_S = 300, 0.05


def test_a_call_under_way_is_cut_short_and_its_tokens_are_counted_as_lost(monkeypatch):
    backend = small_backend(engine_options={"max_model_len": 512})
    policy = vLLMWrapper(
        backend,
        tokenizer=load_tokenizer(),
        generate_kwargs={"max_new_tokens": TOKENS, "ignore_eos": True},
    )
    collector = LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, yield_completed_trajectories=True
    )
    worker = CollectorWorker(collector, LocalChannel(4), name="a")
    inner, slow, begun = backend.engine.llm_engine, threading.Event(), threading.Event()
    step, count = inner.step, []

    def slow_step():
        count.append(1)
        if len(count) == 10:
            begun.set()
        if not slow.is_set():
            time.sleep(STEP_S)  # the whole call would take 15 s
        return step()

    monkeypatch.setattr(inner, "step", slow_step)
    worker.channel.grant(2)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    assert begun.wait(60)
    weights = TensorSource({n: w.detach() for n, w in load_model().named_parameters()})
    worker.load_weights(weights, 1, "abort")
    steps = len(count)
    slow.set()
    assert steps < 60
    delivery = worker.channel.get(timeout_s=60)
    worker.stop()
    worker.channel.close()
    thread.join(60)
    rows = unpack_row_list(delivery.rows)
    assert [sampled_tokens(row) for row in rows] == [TOKENS, TOKENS]
    versions = torch.cat([row["trace", "policy_version"] for row in rows])
    assert set(versions.tolist()) - {-1} == {1}
    # What was cut short was sampled, and is in no row.
    lost = delivery.sent - 2 * TOKENS
    assert 2 * 5 < lost < 2 * 60
    assert delivery.sent == delivery.generated

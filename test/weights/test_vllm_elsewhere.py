"""Weights into a real vLLM engine of another process: it computes with them, whoever dies."""

from __future__ import annotations

import copy
import signal
import time

import pytest

pytest.importorskip("vllm")

from weights.learner import Learner, assert_same_model
from weights.processes import Child, ChildBackend, EngineHost, SchemeLearner

from torchrl_llm.modules import TransformersBackend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import (
    BroadcastWeights,
    CanaryCheck,
    DoubleBufferWeights,
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    WeightLedger,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine():
    child = Child(EngineHost, 400)
    try:
        yield ChildBackend(child, *child.call("about", timeout_s=200))
    finally:
        child.kill()


def _follow(updater, learner, engine, steps):
    for _ in range(steps):
        learner.step()
        updater.push_weights(learner.model)
        assert_same_model(engine, learner.reference)


@pytest.mark.parametrize("path", ["broadcast", "double_buffer"])
def test_an_engine_elsewhere_follows_ten_optimizer_steps(engine, tmp_path, path):
    learner, ledger = Learner(load_model(dtype="float32").eval()), WeightLedger()
    proofs = {"canary": CanaryCheck(learner.reference), "ledger": ledger}
    if path == "broadcast":
        updater = BroadcastWeights(engine, device="cpu", timeout_s=60, **proofs)
    else:
        updater = DoubleBufferWeights(tmp_path, engine, **proofs)
    _follow(updater, learner, engine, 10)
    assert updater.version == 10
    ledger.check({10: updater.receipts[0].digest})


def test_the_schemes_bring_weights_to_a_bare_llm(engine, tmp_path):
    schemes = {
        "broadcast": VLLMWeightSyncScheme(device="cpu", timeout_s=60),
        "double_buffer": VLLMDoubleBufferSyncScheme(tmp_path),
    }
    for seed, scheme in enumerate(schemes.values()):
        learner = Learner(load_model(dtype="float32").eval(), lr=1e-3 * (seed + 1))
        engine.child.call("listen", scheme)
        sender = scheme.create_sender()
        sender.register_model(learner.model)
        for version in (1, 2):
            learner.step()
            sender.update_weights()
            assert engine.child.call("wait_for", version, 30) == version
            assert_same_model(engine, learner.reference)
        sender.shutdown()


def test_a_learner_killed_in_a_broadcast_leaves_the_engine_serving_what_it_had(engine):
    scheme = VLLMWeightSyncScheme(device="cpu", timeout_s=15)
    learner = Child(SchemeLearner, scheme)
    try:
        engine.child.call("listen", scheme)
        learner.call("move", 1)
        [digest] = learner.call("update")
        assert digest == learner.call("digest")
        model = load_model(dtype="float32").eval()
        model.load_state_dict(learner.call("weights"), strict=False)
        reference = TransformersBackend(copy.deepcopy(model), eos_token_ids=(2,))
        assert_same_model(engine, reference)

        learner.call("move", 2)
        learner.send("update_half", signal.SIGKILL)
        learner.process.join(100)
        assert learner.process.exitcode == -signal.SIGKILL
        started = time.monotonic()
        while engine.child.call("state")[1] == "None" and time.monotonic() - started < 100:
            time.sleep(0.05)
        version, failure = engine.child.call("state")
        assert version == 1
        assert "did not arrive" in failure
        assert_same_model(engine, reference)
    finally:
        learner.kill()

    successor = Child(SchemeLearner, scheme)
    try:
        successor.call("move", 3)
        [digest] = successor.call("update")
        assert digest == successor.call("digest")
        model.load_state_dict(successor.call("weights"), strict=False)
        assert_same_model(engine, TransformersBackend(model, eos_token_ids=(2,)))
        assert engine.child.call("state") == (1, "None")
    finally:
        successor.kill()

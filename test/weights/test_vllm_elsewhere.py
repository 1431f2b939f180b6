"""Weights into a real vLLM engine of another process: it computes with them, whoever dies."""

import signal

import pytest

pytest.importorskip("vllm")

from weights.learner import Learner, assert_same_model
from weights.processes import Child, ChildBackend, EngineHost, TransferLearner
from weights.without_gpu import install

from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import (
    CanaryCheck,
    FileWeights,
    TransferWeights,
    VLLMDoubleBufferSyncScheme,
    WeightLedger,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAKERS = {
    "files": lambda engine, folder, **proofs: FileWeights(engine, folder=folder, **proofs),
    "nccl": lambda engine, folder, **proofs: TransferWeights(engine, packed=False, **proofs),
    "ipc": lambda engine, folder, **proofs: TransferWeights(engine, kind="ipc", **proofs),
}


@pytest.fixture(scope="module")
def engine():
    install()
    child = Child(EngineHost, 400)
    try:
        yield ChildBackend(child, *child.call("about", timeout_s=200))
    finally:
        child.kill()


@pytest.mark.parametrize("way", MAKERS)
def test_an_engine_elsewhere_follows_ten_optimizer_steps(engine, tmp_path, way):
    learner, ledger = Learner(load_model(dtype="float32").eval()), WeightLedger()
    proofs = {"canary": CanaryCheck(learner.reference), "ledger": ledger}
    updater = MAKERS[way](engine, tmp_path, **proofs)
    for _ in range(10):
        learner.step()
        updater.push_weights(learner.model)
        assert_same_model(engine, learner.reference)
    assert updater.version == 10
    ledger.check({10: updater.receipts[0].digest})


def test_a_scheme_brings_weights_to_a_bare_llm(engine, tmp_path):
    scheme = VLLMDoubleBufferSyncScheme(tmp_path)
    learner, sender = Learner(load_model(dtype="float32").eval()), scheme.create_sender()
    sender.register_model(learner.model)
    for version in (1, 2):
        learner.step()
        sender.update_weights()
        assert engine.child.call("receive", scheme) == (True, version)
        assert_same_model(engine, learner.reference)
    sender.shutdown()


def test_a_learner_killed_in_a_transfer_leaves_the_engine_serving_what_it_had(engine):
    learner = Learner(load_model(dtype="float32").eval())
    TransferWeights(engine, packed=False).push_weights(learner.model)
    doomed = Child(TransferLearner)
    try:
        doomed.call("strike", signal.SIGKILL, 3)
        doomed.send("begin_model")
        with pytest.raises(WeightUpdateError, match="the transfer of weights by nccl"):
            engine.update_weights(doomed.result(), version=2)
    finally:
        doomed.kill()
    assert_same_model(engine, learner.reference)
    learner.step()
    updater = TransferWeights(engine, packed=False)
    updater.version = 2
    updater.push_weights(learner.model)
    assert_same_model(engine, learner.reference)

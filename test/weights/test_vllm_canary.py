"""The canary over a real engine in bfloat16: rounding passes, planted faults do not.

The long form, with a table, is ``test/benchmarks/bench_canary.py``.
"""

import pytest
import torch

pytest.importorskip("vllm")

from modules.backends.vllm.engine_helper import small_backend
from weights.learner import FAULTS, Faulty, Learner, push_and_step

from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import CanaryCheck, EngineWeights

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine():
    return small_backend(engine_options={"dtype": "bfloat16"})


@pytest.mark.parametrize("lr", [1e-6, 1e-3])
def test_right_updates_in_bfloat16_pass_and_wrong_ones_are_found(engine, lr):
    learner = Learner(load_model(dtype="float32").eval(), lr=lr)
    canary = CanaryCheck(learner.reference, dtype=torch.bfloat16)
    faulty = Faulty(engine, fault=lambda weights: None)
    updater = EngineWeights(faulty, model=learner.model, canary=canary)
    for _ in range(30):
        updater.push_weights()
        assert canary.report.rounding < 4
        learner.step()
    # Half a step of 1e-6 stays below the rounding for as long as this test may take.
    for fault in FAULTS if lr > 1e-6 else [f for f in FAULTS if f.__name__ != "loads_half"]:
        faulty.fault = fault
        with pytest.raises(WeightUpdateError, match="the engine does not compute with version"):
            push_and_step(updater, learner, 8)
        faulty.fault = lambda weights: None
        updater.push_weights()


def test_an_engine_that_is_awake_with_its_weights_only_is_checked_when_it_has_a_cache(engine):
    learner = Learner(load_model(dtype="float32").eval(), lr=1e-2)
    canary = CanaryCheck(learner.reference, dtype=torch.bfloat16)
    updater = EngineWeights(engine, model=learner.model, canary=canary)
    updater.push_weights()
    before = canary.report
    for missed in (False, True):
        learner.step()
        engine.sleep(2)
        engine.wake(weights_only=True)
        updater.push_weights()
        assert canary.report is before
        if missed:
            # In place, where the target was taken before: the engine has other weights then.
            learner.step()
            with torch.no_grad():
                updater.canary = None
                updater.push_weights()
            with pytest.raises(WeightUpdateError, match="does not compute with version 3"):
                engine.wake()
        else:
            engine.wake()
            assert canary.report is not before
            before = canary.report

"""Engines that sleep between two pushes: what happens in which order, and what when it fails."""

import pytest
import torch
from weights.learner import Learner

from torchrl_llm.errors import BackendError, WeightUpdateError
from torchrl_llm.modules.backends import FakeBackend
from torchrl_llm.weights import CanaryCheck, SleepingEngineWeights


class Sleepy(FakeBackend):
    """Notes what it is told, and answers only when it is awake."""

    def __init__(self, **options):
        super().__init__(vocab_size=300, eos_token_ids=(2,), **options)
        self.told, self.awake, self.waiting, self.loads = [], True, None, True

    def sleep(self, level):
        self.told.append(f"sleep {level}")
        self.awake = False

    def wake(self, *, weights_only=False):
        self.told.append("wake for weights" if weights_only else "wake")
        self.awake = not weights_only
        if self.awake and self.waiting is not None:
            action, self.waiting = self.waiting, None
            action()

    def when_awake(self, action):
        if self.awake:
            action()
        else:
            self.waiting = action

    def update_weights(self, source, *, version):
        self.told.append("load")
        if not self.loads:
            raise WeightUpdateError("nothing arrived")
        return super().update_weights(source, version=version)

    def token_scores(self, *args, **options):
        assert self.awake
        self.told.append("score")
        return super().token_scores(*args, **options)


def test_an_engine_wakes_for_the_weights_then_for_the_cache_and_is_proven_last():
    trained, engine = FakeBackend(vocab_size=300, eos_token_ids=(2,), seed=1), Sleepy()
    updater = SleepingEngineWeights(engine, model=trained.module, canary=CanaryCheck(trained))
    updater.push_weights()
    assert engine.told == ["load", "score"]  # awake from the start
    engine.told.clear()
    for _ in range(2):
        updater.sleep()
        assert updater.asleep
        updater.push_weights()
        assert not updater.asleep
    assert engine.told == ["sleep 2", "wake for weights", "load", "wake", "score"] * 2
    assert updater.version == 3


def test_a_push_that_fails_leaves_the_engine_awake_and_the_next_one_is_whole():
    trained, engine = FakeBackend(vocab_size=300, eos_token_ids=(2,), seed=1), Sleepy()
    updater = SleepingEngineWeights(engine, model=trained.module, canary=CanaryCheck(trained))
    updater.sleep()
    engine.loads = False
    with pytest.raises(WeightUpdateError, match="nothing arrived"):
        updater.push_weights()
    assert (engine.told, updater.version) == (["sleep 2", "wake for weights", "load", "wake"], 0)
    engine.loads = True
    updater.push_weights()
    assert engine.told[-2:] == ["load", "score"]
    assert updater.version == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_wakes_with_old_weights_is_found():
    pytest.importorskip("vllm")
    from modules.backends.vllm.engine_helper import small_backend

    from torchrl_llm.modules.backends import SamplingParams
    from torchrl_llm.modules.model_loading import load_model

    engine = small_backend()
    learner = Learner(load_model(dtype="float32").eval(), lr=1e-2)
    canary = CanaryCheck(learner.reference, dtype=torch.float32)
    updater = SleepingEngineWeights(engine, model=learner.model, canary=canary)

    def ask():
        return engine.generate([torch.tensor([5, 6])], SamplingParams(max_new_tokens=2))

    updater.push_weights()
    ask()
    updater.sleep()
    learner.step()
    with pytest.raises(BackendError, match="the engine is asleep"):
        ask()
    updater.push_weights()
    ask()

    # The sync is forgotten: the engine is awake, and closed.
    updater.sleep()
    engine.wake()
    with pytest.raises(BackendError, match="lost its weights when it slept at level 2"):
        ask()

    # The sync brings nothing and says that it did (on the CPU the old weights are still there).
    updater.asleep = False
    updater.push_weights()
    updater.sleep()
    learner.step()
    with pytest.MonkeyPatch.context() as patch:
        loading = "torchrl_llm.weights.vllm_loading.load_into_vllm_model"
        patch.setattr(loading, lambda model, source, version: source.receipt)
        with pytest.raises(WeightUpdateError, match="does not compute with version"):
            updater.push_weights()
    updater.push_weights()
    ask()


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; run pytest -m gpu there")
def test_on_a_gpu_the_memory_is_the_trainers_while_the_engine_sleeps():
    pytest.importorskip("vllm")
    from torchrl_llm.modules.backends import SamplingParams
    from torchrl_llm.modules.backends.vllm import VLLMBackend
    from torchrl_llm.modules.model_loading import load_model

    engine = VLLMBackend(
        dtype="bfloat16", enable_sleep_mode=True, gpu_memory_utilization=0.5, enforce_eager=True
    )
    learner = Learner(load_model(dtype="float32", device="cuda").eval(), lr=1e-2)
    canary = CanaryCheck(learner.reference, dtype=torch.bfloat16)
    updater = SleepingEngineWeights(engine, model=learner.model, canary=canary)
    updater.push_weights()
    free, total = torch.cuda.mem_get_info()
    for _ in range(3):
        updater.sleep()
        assert torch.cuda.mem_get_info()[0] - free > 0.4 * total  # its half, but for what is CUDA's
        learner.step()
        updater.push_weights()
        assert canary.report.rounding < 4
        engine.generate([torch.tensor([5, 6])], SamplingParams(max_new_tokens=8))

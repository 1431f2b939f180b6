"""inference_model.sleep: grpo-sync.py and an engine that sleeps while the trainer trains."""

import shutil
import signal

import pytest
import torch
from recipes.grpo_helper import SCRIPT, SMALL, rows, run_script, weights
from recipes.script import run_typed
from recipes.test_memory import parts_of

import torchrl_llm.recipes.sampling_engine as sampling
import torchrl_llm.trainers as trainers
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import AsyncGRPOConfig, load_config, memory

VLLM = ["inference_model.backend=vllm", "inference_model.max_model_len=64"]


def config(**groups):
    groups.setdefault("inference_model", {"backend": "vllm", "sleep": True})
    return {"train": {"device": "cpu"}, **groups}


@pytest.fixture
def told(monkeypatch):
    """What the engine and the loop did, in order."""
    backends = pytest.importorskip("torchrl_llm.modules.backends.vllm.backend")
    said = []

    def listen(name, text):
        real = getattr(backends.VLLMBackend, name)

        def heard(self, *args, **options):
            said.append(text(options))
            return real(self, *args, **options)

        monkeypatch.setattr(backends.VLLMBackend, name, heard)

    listen("generate", lambda _: "sample")
    listen("sleep", lambda options: f"sleep {options['level']}")
    listen("release_cache", lambda _: "sleep with its weights")
    listen("wake", lambda options: "wake for weights" if options else "wake")
    listen("update_weights", lambda _: "load")
    listen("token_scores", lambda _: "prove")
    return said


@pytest.mark.vllm
@pytest.mark.slow
def test_training_is_the_same_and_may_be_saved_and_stopped_while_the_engine_sleeps(
    tmp_path, monkeypatch, told
):
    pytest.importorskip("vllm")
    settings = [*VLLM, "train.max_steps=2"]
    expected = run_script(monkeypatch, tmp_path / "awake", *settings, "weight_sync.type=load")
    assert "sleep 2" not in told
    told.clear()

    runs, begin, optimize = [], trainers.TrainingRun.__init__, trainers.optimize

    def remembered(self, *args, **options):
        runs.append(self)
        begin(self, *args, **options)

    def trained(*args, **options):
        told.append("train")
        if runs[-1].step == 1 and len(runs) == 1:
            path = runs[-1].save()
            assert (path / "model.safetensors").exists()
            shutil.rmtree(path)  # it is of the middle of a step
            signal.raise_signal(signal.SIGINT)
        return optimize(*args, **options)

    monkeypatch.setattr(trainers.TrainingRun, "__init__", remembered)
    monkeypatch.setattr(trainers, "optimize", trained)
    asleep = [*settings, "inference_model.sleep=true"]
    with pytest.raises(SystemExit) as ended:
        run_typed(monkeypatch, SCRIPT, tmp_path / "asleep", *SMALL, *asleep)
    assert ended.value.code == 128 + signal.SIGINT
    assert rows(tmp_path / "asleep") == expected[:2]
    evaluation = ["sample"]
    step = ["sample", "sleep 2", "train", "wake for weights", "load", "wake", "prove"]
    assert told == ["load", "prove", *evaluation, *step]

    told.clear()
    goes_on = (*SMALL, *asleep, "checkpoint.resume=auto")
    run_typed(monkeypatch, SCRIPT, tmp_path / "asleep", *goes_on)
    table = rows(tmp_path / "asleep")
    # The canary of a new process has no earlier version to compare with.
    new = "train/canary_rounding"
    assert [{**row, new: ""} for row in table] == [{**row, new: ""} for row in expected]
    assert told == ["load", "prove", *step, *evaluation]
    first, second = weights(tmp_path / "awake", 2), weights(tmp_path / "asleep", 2)
    assert all(torch.equal(first[name], second[name]) for name in first)

    told.clear()
    shared = run_script(monkeypatch, tmp_path / "shared", *asleep, "weight_sync.type=shared")
    assert shared == expected
    step = ["sample", "sleep with its weights", "wake", "prove"]
    assert told == ["prove", *evaluation, *step, *step, *evaluation]


def test_the_asynchronous_recipe_says_whose_key_it_is():
    with pytest.raises(ConfigError, match=r"a key of grpo-sync\.py"):
        load_config(config(), AsyncGRPOConfig)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sync", ["load", "shared"])
def test_the_engine_is_built_to_sleep(monkeypatch, device, sync):
    built = {}

    def make(name, *, tokenizer, **options):
        built.update(options)
        raise RuntimeError("built")

    monkeypatch.setattr(sampling, "find", lambda kind, name: make)
    given = {"type": sync} if sync == "shared" else {}
    settings = load_config(config(train={"device": device}, weight_sync=given))
    assert sampling.sync_type(settings) == sync
    policy = type("Policy", (), {"tokenizer": None})()
    with pytest.raises(RuntimeError, match="built"):
        sampling.make_sampler(settings, policy, policy)
    assert built.get("enable_sleep_mode", False) == (device == "cuda")
    assert (built.get("load_format") == "dummy") == (sync == "shared")
    lora = config(train_model={"lora": {"enabled": True}})
    assert sampling.sync_type(load_config(lora)) == "load"


def test_weights_of_an_engine_that_sleeps_are_not_there_in_training():
    parts = parts_of(load_config(config()))
    assert parts["weights of the sampler"].where == ("sample",)
    assert parts["weights of the sampler"].num_bytes == 4 * 337_792
    awake = config(inference_model={"backend": "vllm"}, weight_sync={"type": "load"})
    assert parts_of(load_config(awake))["weights of the sampler"].where == memory.BOTH


def test_the_cache_of_an_engine_is_there_in_training_until_it_sleeps():
    shared = {"weight_sync": {"type": "shared"}}
    awake = config(inference_model={"backend": "vllm"}, **shared)
    for values, where in (
        (awake, memory.BOTH),
        (config(**shared), ("sample",)),
        (config(), ("sample",)),
    ):
        parts = parts_of(load_config(values))
        assert parts["cache of sampling"].where == where
        weights_of_sampler = parts["weights of the sampler"].num_bytes
        assert weights_of_sampler == (0 if values.get("weight_sync") else 4 * 337_792)
    assert parts_of(load_config({}))["cache of sampling"].where == ("sample",)

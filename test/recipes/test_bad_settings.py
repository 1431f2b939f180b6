"""Settings that no run can have: every recipe refuses them before any weights are read."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from recipes.script import run_alone

from torchrl_llm import modules
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError, ResourceError

RECIPES = Path(__file__).parents[2] / "sota-implementations"
TRAINERS = [
    "grpo/grpo-sync.py",
    "grpo/grpo-async.py",
    "pipeline-rl/learner.py",
    "distillation/distillation.py",
    "expert-iteration/expert-iteration.py",
]
WITH_A_MODEL = [*TRAINERS, "evaluate/evaluate.py", "sft/imitate.py"]


class ModelWasRead(Exception):
    """A recipe went as far as the weights."""


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What a script is ended by, with overrides and no weights to be had."""

    def read(*args, **kwargs):
        raise ModelWasRead

    monkeypatch.setattr(modules, "load_model", read)

    def run(script, *overrides):
        with pytest.raises((ConfigError, ResourceError)) as caught:
            run_alone(monkeypatch, RECIPES / script, tmp_path / "run", *overrides)
        return str(caught.value)

    before = modules_of_recipes()
    yield run
    # Those that were imported meanwhile hold what was patched.
    modules_of_recipes()
    sys.modules.update(before)


def modules_of_recipes():
    """Take the modules beside the recipes' scripts out of those that are imported."""
    found = {
        name: module
        for name, module in sys.modules.items()
        if str(getattr(module, "__file__", None)).startswith(str(RECIPES))
    }
    for name in found:
        del sys.modules[name]
    return found


@pytest.fixture
def folders(tmp_path):
    """Folders that hold no model, and a model without a tokenizer."""
    empty, bare = tmp_path / "empty", tmp_path / "bare"
    empty.mkdir()
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(embedded_model_path()) / name, bare)
    return empty, bare


@pytest.mark.parametrize("script", [*WITH_A_MODEL, "sft/sft.py"])
def test_what_no_run_can_have_is_refused_with_its_key(script, refusal, folders):
    """A folder without model or tokenizer, long responses, a missing device, a long warm-up."""
    if script in WITH_A_MODEL:
        for folder in folders:
            said = refusal(script, f"model.name={folder}")
            assert said.startswith("model.name: ")
            assert str(folder) in said
        key = "eval.max_tokens" if "imitate" in script else "inference_model.max_tokens"
        said = refusal(script, f"{key}=2048")
        assert said.startswith(f"{key}=2048 leaves no room for a prompt")
        assert "2048 tokens" in said
    if script in [*TRAINERS, "evaluate/evaluate.py"]:
        key = "inference_model.device" if "evaluate" in script else "train.device"
        assert refusal(script, f"{key}=banana").startswith(f"{key} must be auto, cpu, cuda")
        missing = f"cuda:{torch.cuda.device_count()}"
        said = refusal(script, f"{key}={missing}")
        assert said.startswith(f"{key}={missing!r}: torch cannot use it")
    if script in [*TRAINERS, "sft/sft.py", "sft/imitate.py"]:
        said = refusal(script, "train.max_steps=2", "optimizer.warmup_steps=200")
        assert said.startswith("optimizer.warmup_steps=200 is above the ")


def test_a_teacher_and_a_reference_that_are_none_name_their_keys(tmp_path, monkeypatch, folders):
    empty, _ = folders
    folder, teacher = tmp_path / "a", "distillation/distillation.py"
    with pytest.raises(ConfigError, match=r"^teacher\.name: .*empty.* holds no tokenizer"):
        run_alone(monkeypatch, RECIPES / teacher, folder, f"teacher.name={empty}")
    overrides = [f"ref_model.name={empty}", "train.kl_to_ref_coeff=0.1"]
    with pytest.raises(ConfigError, match=r"^ref_model\.name: .*empty.* holds no model"):
        run_alone(monkeypatch, RECIPES / TRAINERS[0], tmp_path / "b", *overrides)

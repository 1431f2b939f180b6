"""What is said when a device runs out of memory: which keys to lower."""

from __future__ import annotations

import pytest
import torch
from recipes.grpo_helper import run_script

from torchrl_llm.errors import ResourceError
from torchrl_llm.modules import TransformersBackend
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.trainers.run_config import naming_keys

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.2 GiB is free. Of the allocated memory 70 GiB is allocated by PyTorch."
)


def full(*args, **kwargs):
    raise torch.OutOfMemoryError(TORCH_SAYS)


def test_a_step_of_training_that_does_not_fit_names_its_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(CausalScorer, "forward", full)
    with pytest.raises(ResourceError) as raised:
        run_script(monkeypatch, tmp_path, "train.max_steps=1", "eval.num_prompts=0")
    said = str(raised.value)
    assert said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB, in the part 'train'")
    assert "Lower train.micro_token_budget (now 16384), or set" in said
    assert "train_model.gradient_checkpointing=true" in said
    assert "prompts_per_batch" not in said
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("part", "options", "keys"),
    [
        (
            "sample",
            ["eval.num_prompts=0"],
            "train.prompts_per_batch (now 4), env.repeats (now 4), inference_model.max_tokens (now",
        ),
        ("evaluate", [], "eval.batch_size (now 128), inference_model.max_tokens (now"),
    ],
)
def test_sampling_that_does_not_fit_names_its_keys(tmp_path, monkeypatch, part, options, keys):
    monkeypatch.setattr(TransformersBackend, "generate", full)
    with pytest.raises(ResourceError) as raised:
        run_script(monkeypatch, tmp_path, "train.max_steps=1", *options)
    assert f"in the part {part!r} of a step. Lower {keys}" in str(raised.value)


def fill(part, config, error=None):
    with naming_keys(part, config):
        if error is not None:
            raise error
        full()


@pytest.mark.parametrize(
    ("part", "config"), [("sync", {"train.micro_token_budget": 8}), ("train", {"lr": 1})]
)
def test_where_no_key_helps_torchs_own_error_stays(part, config):
    with pytest.raises(torch.OutOfMemoryError, match=r"of which 1\.2 GiB is free"):
        fill(part, config)


def test_checkpointing_is_not_advised_where_it_is_on():
    config = {"train.micro_token_budget": 8, "train_model.gradient_checkpointing": True}
    with pytest.raises(ResourceError, match=r"Lower train.micro_token_budget \(now 8\); torchrl"):
        fill("train", config)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="something else"):
        fill("train", {"train.micro_token_budget": 8}, RuntimeError("something else"))

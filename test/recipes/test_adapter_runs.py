"""Recipes whose model is an adapter: they go on with it, or merge it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from recipes.grpo_helper import column, run_script
from safetensors.torch import load_file

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.modules import load_model
from torchrl_llm.recipes import load_config, memory

LORA = ("train_model.lora.enabled=true", "train.kl_to_ref_coeff=0.1", "eval.num_prompts=0")


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    torch.manual_seed(0)
    model = load_model(lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_reference_of_a_continued_adapter_is_where_training_begins(tmp_path, run, folder):
    named = (*LORA, f"model.name={folder}", "checkpoint.interval=1")
    whole = run(tmp_path / "whole", *named, "train.max_steps=3", "optimizer.lr=0.01")
    divergence = column(whole, "train/kl_to_ref")
    assert divergence[0] == pytest.approx(0, abs=1e-6)
    assert divergence[-1] > 1e-4
    base = f"ref_model.name={embedded_model_path()}"
    bare = run(tmp_path / "bare", *named, "train.max_steps=1", base)
    assert column(bare, "train/kl_to_ref")[0] > 1e-3
    run(tmp_path / "cut", *named, "train.max_steps=2", "optimizer.lr=0.01")
    again = ("train.max_steps=3", "optimizer.lr=0.01", "checkpoint.resume=auto")
    assert run(tmp_path / "cut", *named, *again) == whole
    saved = load_file(
        tmp_path / "whole" / "checkpoints" / "step_000003" / "adapter" / "adapter_model.safetensors"
    )
    assert saved.keys() == load_file(folder / "adapter_model.safetensors").keys()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_an_engine_samples_with_a_continued_adapter(tmp_path, run, folder, lora):
    pytest.importorskip("vllm")
    engine = ("inference_model.backend=vllm", "inference_model.max_model_len=64")
    keys = (*engine, f"model.name={folder}", *(LORA if lora else LORA[1:]), "train.max_steps=2")
    table = run(tmp_path / "run", *keys, "optimizer.lr=0.003")
    assert column(table, "train/kl_to_ref")[0] == pytest.approx(0, abs=1e-6)
    # What is sampled has the log-probs of base and adapter, also after a step.
    assert max(column(table, "train/kl_to_inference")) < 1e-6
    assert column(table, "train/canary_distinct")[-1] == 1


def test_without_lora_the_adapter_is_merged_and_all_weights_train(tmp_path, run, folder, caplog):
    table = run(
        tmp_path / "run",
        f"model.name={folder}",
        "train.kl_to_ref_coeff=0.1",
        "eval.num_prompts=0",
        "train.max_steps=1",
        "optimizer.lr=0.01",
    )
    assert "it is merged, and all weights are trained" in caplog.text
    assert column(table, "train/kl_to_ref")[0] == pytest.approx(0, abs=1e-6)
    begun, ended = load_model(folder), load_model(tmp_path / "run" / "checkpoints" / "step_000001")
    before, after = begun.model.embed_tokens.weight, ended.model.embed_tokens.weight
    assert not torch.equal(before, after)


def test_the_forecast_counts_a_copy_of_the_adapter(folder):
    values = {"model": {"name": str(folder)}, "train": {"kl_to_ref_coeff": 0.1}}
    config = load_config({**values, "train_model": {"lora": {"enabled": True}}})
    parts = {part.name: part for part in memory.memory_parts(config, prompt_tokens=64)}
    tensors = load_file(folder / "adapter_model.safetensors").values()
    assert parts["reference model"].num_bytes == sum(each.nbytes for each in tensors)

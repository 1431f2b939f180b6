"""Loading models and tokenizers."""

from __future__ import annotations

import json
import re
import shutil
import threading

import huggingface_hub
import pytest
import torch
from tqdm import TMonitor
from transformers.utils import logging

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.modules.model_loading import context_length, empty_model, end_token_ids
from torchrl_llm.trainers import save_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tiny_model, make_tokenizer):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_a_folder_is_loaded_in_float32_and_eval_mode(folder):
    model = load_model(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert load_tokenizer(folder).eos_token == "<|im_end|>"


def test_dtype_attention_and_checkpointing_are_honoured(folder):
    model = load_model(
        folder, dtype="bfloat16", attn_implementation="eager", gradient_checkpointing=True
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.is_gradient_checkpointing


def test_lora_trains_adapters_only(folder):
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    model = load_model(
        folder, lora={"r": 4, "target_modules": ["q_proj"]}, gradient_checkpointing=True
    )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    with pytest.raises(ConfigError, match="rank"):
        load_model(folder, lora={"rank": 4})


@pytest.mark.parametrize("names", [["nope"], ["q_proj", "v_prj"], "nope.*"])
def test_layers_that_there_are_not_are_refused_by_their_key(folder, names):
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    with pytest.raises(ConfigError, match=r"lora\.target_modules: .*(nope|'v_prj'; .* v_proj)"):
        load_model(folder, lora={"target_modules": names})


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_folder_of_an_adapter_says_of_which_model(tmp_path, make_tokenizer, has_tokenizer):
    about = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    if has_tokenizer:
        make_tokenizer().save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path).is_fast
    for load in (load_model, context_length, empty_model, *[load_tokenizer][has_tokenizer:]):
        with pytest.raises(ConfigError, match=r"there is no \w+ 'Qwen/Qwen2\.5-0\.5B'"):
            load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"its adapter_config\.json names no model"):
        load_model(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no model"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="dtype"):
        load_model(tmp_path, dtype="int8")


def test_what_a_folder_lacks_is_said(folder, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is a file; a tokenizer is named by its folder"):
        load_tokenizer(folder / "config.json")
    bare = tmp_path / "bare"
    load_model(folder).save_pretrained(bare)
    with pytest.raises(ConfigError, match=r"holds no tokenizer: tokenizer\.json .*\(config\.json"):
        load_tokenizer(bare)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a run's are in its checkpoints"):
        load_tokenizer(tmp_path / "run")
    (bare / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"holds no model that can be loaded: .*model\.safetensors"
    ):
        load_model(bare)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, so that nothing is downloaded"):
        load_model("nobody/nothing")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", '{"model_type": "llama", "max_position_embeddings": "x"}'),
        ("config.json", '{"model_type": "llama", "vocab_size": 1000000000000000000}'),
        ("generation_config.json", '{"watermarking_config": {"a": 1}}'),
        ("generation_config.json", '{"eos_tok'),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}'),
    ],
)
def test_files_of_a_folder_that_say_nonsense_are_refused_by_its_name(file, text, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)

    def read(name):
        return end_token_ids(name, load_tokenizer(name)), empty_model(name)

    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "model"))):
        read(tmp_path / "model")


def test_a_policy_loads_by_name(folder):
    policy = TransformersWrapper(str(folder), device="cpu")
    assert policy.tokenizer.eos_token == "<|im_end|>"


def test_reading_and_writing_weights_shows_no_bar_and_those_of_others_stay(
    folder, tmp_path, capsys
):
    logging.enable_progress_bar()
    before = set(threading.enumerate())
    save_pretrained(tmp_path, load_model(folder), load_tokenizer(folder))
    assert capsys.readouterr().err == ""
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if isinstance(thread, TMonitor)]  # of a hidden bar
    list(logging.tqdm([1], desc="elsewhere"))
    assert "elsewhere" in capsys.readouterr().err

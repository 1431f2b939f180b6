"""A model that is named by its adapter: trained on, merged, and its reference."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from huggingface_hub import constants

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError, MissingExtraError
from torchrl_llm.modules import (
    AdapterAsLoaded,
    TransformersBackend,
    context_length,
    empty_model,
    find_adapter,
    load_model,
    load_tokenizer,
)
from torchrl_llm.modules.backends.vllm.build import build_engine
from torchrl_llm.recipes import LoraConfig
from torchrl_llm.recipes.grpo_config import load_config
from torchrl_llm.trainers import save_pretrained

IDS = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8])]
SELECT = [torch.tensor([False, True, False, True]), torch.tensor([False, True])]
SHAPE = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "lm_head"]}


def shaken(model):
    """A PEFT model whose adapter changes what it scores."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def scores(model):
    return TransformersBackend(model).token_scores(IDS, SELECT).log_probs.detach()


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    torch.manual_seed(0)
    return shaken(load_model(lora={**SHAPE, "lora_dropout": 0.1}))


@pytest.fixture
def folder(trained, tmp_path):
    trained.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_of_an_adapter_goes_on_or_is_merged(folder, trained):
    wanted = scores(trained)
    assert (scores(load_model()) - wanted).abs().max() > 0.1
    going_on = load_model(folder, lora={})
    torch.testing.assert_close(scores(going_on), wanted, atol=0, rtol=0)
    learned = [name for name, p in going_on.named_parameters() if p.requires_grad]
    assert learned
    assert all("lora_" in name for name in learned)
    merged = load_model(folder)
    torch.testing.assert_close(scores(merged), wanted, atol=1e-5, rtol=1e-5)
    assert not hasattr(merged, "peft_config")
    assert all(p.requires_grad for p in merged.parameters())
    # W + (alpha / r) B A, worked out here; the head was tied to the embeddings, which stay.
    q = trained.get_base_model().model.layers[0].self_attn.q_proj
    product = q.lora_B["default"].weight @ q.lora_A["default"].weight
    own = load_model()
    by_hand = own.model.layers[0].self_attn.q_proj.weight + 12 / 4 * product
    torch.testing.assert_close(merged.model.layers[0].self_attn.q_proj.weight, by_hand)
    assert torch.equal(merged.model.embed_tokens.weight, own.model.embed_tokens.weight)
    assert not torch.equal(merged.lm_head.weight, own.lm_head.weight)


def test_what_was_merged_is_saved_and_opens_again(folder, tmp_path):
    merged = load_model(folder)
    (tmp_path / "merged").mkdir()
    save_pretrained(tmp_path / "merged", merged, load_tokenizer())
    torch.testing.assert_close(scores(load_model(tmp_path / "merged")), scores(merged))


def test_facts_of_the_base_are_those_of_the_adapter(folder, make_tokenizer):
    assert context_length(folder) == context_length()
    assert len(load_tokenizer(folder)) == len(load_tokenizer())  # the base's
    counted = empty_model(folder, lora={})
    rank = {p.shape[0] for name, p in counted.named_parameters() if "lora_A" in name}
    assert rank == {4}
    make_tokenizer().save_pretrained(folder)
    assert len(load_tokenizer(folder)) == len(make_tokenizer())  # its own


@pytest.mark.parametrize("lora", [{"r": 8}, {"lora_alpha": 4}, {"target_modules": ["q_proj"]}])
def test_arguments_that_contradict_an_adapter_are_refused(folder, lora):
    with pytest.raises(ConfigError, match=f"has .*{next(iter(lora))}.*begin another adapter"):
        load_model(folder, lora=lora)
    going_on = load_model(folder, lora={**SHAPE, "lora_dropout": 0.5})  # repeated, and dropout
    assert going_on.peft_config["default"].lora_dropout == 0.5


def test_a_recipe_takes_over_the_form_of_the_adapter(folder):
    def config(**lora):
        lora = {"enabled": True, **lora}
        return load_config({"model": {"name": str(folder)}, "train_model": {"lora": lora}})

    settled = config().train_model.lora
    assert settled == LoraConfig(enabled=True, r=4, alpha=12, target_modules=["lm_head", "q_proj"])
    assert config(r=4, dropout=0.2).train_model.lora.dropout == 0.2
    # Eight and sixteen too, which an adapter from the start would have.
    for key, value in (("r", 8), ("alpha", 16), ("target_modules", ["k_proj"])):
        with pytest.raises(ConfigError, match=rf"train_model\.lora\.{key}=.* contradicts"):
            config(**{key: value})


FAULTS = {
    "no peft type": ({"peft_type": "PREFIX_TUNING"}, "of the type PREFIX_TUNING"),
    "other task": ({"task_type": "SEQ_CLS"}, "task_type=SEQ_CLS"),
    "no base": ({"base_model_name_or_path": None}, "does not name.*base_model_name_or_path"),
    "lost base": (
        {"base_model_name_or_path": "/nowhere/at/all"},
        "base of the adapter .* is missing.*write where it is",
    ),
    "revision": ({"base_model_name_or_path": "a/b", "revision": "v2"}, "revision v2 of a/b"),
    "rank": ({"r": 2}, "does not go on"),
    "layers": ({"target_modules": ["nope"]}, "does not go on .*nope"),
    "fewer layers": ({"target_modules": ["q_proj"]}, "no layer takes .*lm_head"),
    "more layers": ({"target_modules": ["q_proj", "k_proj", "lm_head"]}, "lacks .*k_proj"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lora", [None, {}])
def test_an_adapter_that_cannot_be_is_refused(folder, fault, lora):
    values, why = FAULTS[fault]
    edit(folder, **values)
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        load_model(folder, lora=lora)


def test_damaged_files_and_an_adapter_of_an_adapter_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    edit(other, base_model_name_or_path=str(folder))
    with pytest.raises(ConfigError, match="is an adapter itself: merge"):
        find_adapter(other)
    with pytest.raises(ConfigError, match="vLLM opens whole models"):
        build_engine(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="does not go on"):
        load_model(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(folder)


def test_without_peft_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises((MissingExtraError, ModuleNotFoundError), match="peft"):
        load_model(folder)


def test_an_adapter_of_the_hub_is_found_in_its_cache(folder, trained, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    repository = cache / "models--ann--adder"
    shutil.copytree(folder, repository / "snapshots" / "1a")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1a")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setattr(constants, name, str(cache) if name.endswith("CACHE") else True)
    monkeypatch.setattr("transformers.utils.hub.constants", constants)
    assert find_adapter("ann/adder").base == str(embedded_model_path())
    assert find_adapter("ann/nothing") is None
    torch.testing.assert_close(
        scores(load_model("ann/adder", lora={})), scores(trained), atol=0, rtol=0
    )
    assert len(load_tokenizer("ann/adder")) == len(load_tokenizer())


def test_the_reference_is_the_adapter_as_it_was_loaded(folder, trained):
    wanted = scores(trained)
    model = load_model(folder, lora={"lora_dropout": 0.5}).train()
    trains = [name for name, p in model.named_parameters() if p.requires_grad]
    policy = TransformersBackend(model)
    reference = AdapterAsLoaded(policy)
    assert torch.equal(reference.token_scores(IDS, SELECT).log_probs, wanted)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trains
    shaken(model)
    model.eval()
    changed = scores(model)
    assert torch.equal(AdapterAsLoaded(policy).token_scores(IDS, SELECT).log_probs, wanted)
    assert torch.equal(scores(model), changed)
    assert (changed - wanted).abs().max() > 0.1
    assert model.active_adapter == "default"


def test_a_checkpoint_holds_the_trained_adapter_and_not_its_reference(folder, tmp_path):
    model = load_model(folder, lora={})
    AdapterAsLoaded(TransformersBackend(model))
    wanted = scores(shaken(model))
    (tmp_path / "step").mkdir()
    save_pretrained(tmp_path / "step", model, load_tokenizer())
    kept = sorted(file.name for file in (tmp_path / "step" / "adapter").iterdir())
    assert [name for name in kept if name.startswith("adapter")] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "reference" not in kept
    torch.testing.assert_close(scores(load_model(tmp_path / "step")), wanted, atol=1e-5, rtol=1e-5)
    again = load_model(tmp_path / "step" / "adapter", lora={})
    torch.testing.assert_close(scores(again), wanted, atol=0, rtol=0)

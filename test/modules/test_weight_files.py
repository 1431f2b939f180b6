from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from torchrl_llm.errors import CheckpointError, ConfigError, DamagedCheckpointError
from torchrl_llm.modules import load_model
from torchrl_llm.modules.weight_files import (
    LazyTensor,
    WeightFolder,
    published_weights,
    size_in_bytes,
    write_tensors,
    write_weights,
)
from torchrl_llm.trainers.checkpoint import save_pretrained

IDS = torch.tensor([[1, 2, 3, 4]])


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["5GB", "40KB", 1])
def test_a_model_is_read_back_whatever_the_size_of_its_shards(
    tmp_path, make_tiny_model, tokenizer, size, tied
):
    model = make_tiny_model(tie_word_embeddings=tied)
    model.model.norm.to(torch.float64)  # a model may have weights of several types
    checksums = save_pretrained(tmp_path, model, tokenizer, max_shard_size=size)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert sorted(checksums) == files
    assert (len(files) == 1) is (size == "5GB")
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(files)
        for file in files:
            held = load_file(tmp_path / file)
            num_bytes = sum(tensor.nbytes for tensor in held.values())
            assert num_bytes <= size_in_bytes(size) or len(held) == 1
    weights = WeightFolder(tmp_path)
    named = dict(model.named_parameters())
    assert weights.names == named.keys()
    assert ("lm_head.weight" in weights.names) is not tied
    assert all(torch.equal(weights.read(name), named[name]) for name in named)
    assert all(weights.read(name).dtype == named[name].dtype for name in named)
    model.float()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(loaded, model)
    assert same(load_model(tmp_path), model)


def test_weights_that_transformers_cuts_apart_are_opened_by_it(tmp_path, tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, **sizes, **heads))
    save_pretrained(tmp_path, model, tokenizer, max_shard_size="2KB")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    held = {name: lazy.like for name, lazy in published_weights(model).items()}
    own = [name for name, p in model.named_parameters() if held.get(name) is not p]
    assert [name for name in own if "experts" in name], "experts are joined in memory"
    assert "model.norm.weight" not in own


@pytest.mark.parametrize("kind", ["all-linear", "saved_head", "tied_head"])
def test_adapters_are_merged_as_they_are_written(tmp_path, make_tiny_model, tokenizer, kind):
    peft = pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    model = make_tiny_model(tie_word_embeddings=kind == "tied_head")
    targets = ["q_proj", "lm_head"] if kind == "tied_head" else "all-linear"
    saved = ["lm_head"] if kind == "saved_head" else None
    if saved:
        targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, modules_to_save=saved
    )
    model = peft.get_peft_model(model, config).eval()
    if saved:
        with torch.no_grad():
            model.get_base_model().lm_head.weight.add_(1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_pretrained(tmp_path, model, tokenizer, max_shard_size="30KB")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not [name for name in WeightFolder(tmp_path).names if "lora" in name or "base" in name]
    base = AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-5)
    bare = make_tiny_model(tie_word_embeddings=kind == "tied_head")
    again = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("saved", ["lm_head", "norm"])
def test_layers_of_another_adapter_are_not_written(tmp_path, make_tiny_model, tokenizer, saved):
    peft = pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=[saved]
    )
    model = peft.get_peft_model(make_tiny_model(), config).eval()
    model.add_adapter("reference", config)  # a copy of what training began with
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save.default" in name:
                parameter.add_(1.0)
    save_pretrained(tmp_path, model, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"trainable_token_indices": [3, 5]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=["tokens", "tied copies"],
)
def test_adapters_of_embeddings_are_merged(tmp_path, make_tiny_model, tokenizer, more, is_tied):
    peft = pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **more)
    model = peft.get_peft_model(make_tiny_model(tie_word_embeddings=is_tied), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_pretrained(tmp_path, model, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-5)


def forms(folder, model):
    """The same weights in each form that from_pretrained reads, and in that of Ludic."""
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    names = sorted(state)
    halves = [{n: state[n] for n in names[::2]}, {n: state[n] for n in names[1::2]}]
    for form in ("safe", "safe_shards", "bin", "bin_shards", "pt"):
        path = folder / form
        model.config.save_pretrained(path)
        safe = form.startswith("safe")
        write = save_file if safe else torch.save
        base, end = ("model", "safetensors") if safe else ("pytorch_model", form[:3])
        if not form.endswith("shards"):
            write(state, path / f"{base}.{end}")
        else:
            files = [f"{base}-0000{i}-of-00002.{end}" for i in (1, 2)]
            for file, half in zip(files, halves, strict=True):
                write(half, path / file)
            where = {n: file for file, half in zip(files, halves, strict=True) for n in half}
            index = {"metadata": {}, "weight_map": where}
            (path / f"{base}.{end}.index.json").write_text(json.dumps(index))
        yield path


def test_every_form_that_from_pretrained_reads_is_read(tmp_path, make_tiny_model):
    model = make_tiny_model()
    named = dict(model.named_parameters())
    for path in forms(tmp_path, model):
        weights = WeightFolder(path)
        assert weights.names == named.keys()
        assert all(torch.equal(weights.read(name), named[name]) for name in named)
        assert same(load_model(path), model)


def test_a_model_of_one_pickled_file_has_its_dtype_attention_and_end_tokens(
    tmp_path, make_tiny_model
):
    model = make_tiny_model()
    model.config.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = [3, 7]
    model.generation_config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.pt")
    loaded = load_model(tmp_path, dtype="bfloat16", attn_implementation="eager")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert loaded.generation_config.eos_token_id == [3, 7]
    assert not loaded.training
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())


def test_what_is_wrong_with_a_folder_of_weights_is_named(tmp_path, make_tiny_model):
    for path in forms(tmp_path, make_tiny_model()):
        files = sorted(path.glob("*.index.json"))
        shard = sorted(set(path.iterdir()) - {*files, path / "config.json"})[-1]
        data = shard.read_bytes()
        for damaged in (b"", data[:100], b"x" * 1000):
            shard.write_bytes(damaged)
            with pytest.raises(DamagedCheckpointError, match=shard.name):
                WeightFolder(path)
            with pytest.raises(ConfigError, match="holds no model that can be loaded"):
                load_model(path)
        shard.unlink()
        with pytest.raises(DamagedCheckpointError, match=shard.name):
            WeightFolder(path)
        shard.write_bytes(data)
        for index in files:
            good = index.read_text()
            wrong = [("", "no index"), ("[]", "no index"), ("{}", "lacks weight_map")]
            wrong += [('{"weight_map": {"a": "../../model.safetensors"}}', "no file beside it")]
            wrong += [('{"weight_map": {"a": "/etc/passwd"}}', "no file beside it")]
            for text, said in wrong:
                index.write_text(text)
                with pytest.raises(DamagedCheckpointError, match=said):
                    WeightFolder(path)
                with pytest.raises(ConfigError, match=said):
                    load_model(path)
            index.write_text(good.replace("model.norm.weight", "model.other.weight"))
            with pytest.raises(DamagedCheckpointError, match=r"lacks model\.other\.weight"):
                WeightFolder(path)


def test_reading_weights_runs_no_code_that_was_planted_in_them(tmp_path):
    class Planted:
        def __reduce__(self):
            return (tmp_path / "planted").touch, ()

    torch.save({"a": Planted()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin"):
        WeightFolder(tmp_path)
    assert not (tmp_path / "planted").exists()
    pickle.loads(pickle.dumps(Planted()))
    assert (tmp_path / "planted").exists(), "or this test could not fail"


def test_tensors_of_every_type_and_form_are_written(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "cut": torch.randn(4, 6)[:, ::2],
        "turned": torch.randn(3, 2).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "flag": torch.tensor([True, False]),
        "low": torch.randn(5).bfloat16(),
        "tiny": torch.randn(3).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, dtype=torch.complex64),
        "long": torch.arange(3),
        "byte": torch.arange(3, dtype=torch.uint8),
        "grad": nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / "t", {name: LazyTensor.of(value) for name, value in tensors.items()})
    back = load_file(tmp_path / "t")
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        if value.numel():
            flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (back[name], value)]
            assert torch.equal(*flat), name
    with pytest.raises(CheckpointError, match=r"x: a .*sparse"):
        write_tensors(tmp_path / "x", {"x": LazyTensor.of(torch.ones(2).to_sparse())})


def test_no_more_than_one_tensor_is_made_at_a_time(tmp_path):
    alive, most = [], []

    class Made:
        def __init__(self, number):
            self.number = number

        def __call__(self):
            tensor = torch.full((1 << 20,), float(self.number))
            alive.append(torch.utils.weak.WeakTensorKeyDictionary({tensor: 1}))
            most.append(sum(len(each) for each in alive))
            return tensor

    like = torch.empty(1 << 20, device="meta")
    lazy = {str(number): LazyTensor(like, Made(number)) for number in range(4)}
    write_weights(tmp_path, lazy, max_shard_size=9_000_000)
    assert len(list(tmp_path.glob("model-*"))) == 2
    assert max(most) <= 2  # the one before is let go of when the next has come
    assert [float(WeightFolder(tmp_path).read(str(n))[0]) for n in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("size", ["5 apples", "-1GB", "0", "GB", "", "5GiB"])
def test_what_is_no_size_is_told(size):
    with pytest.raises(ConfigError, match=r"a size is a number above 0 as '5GB'"):
        size_in_bytes(size)

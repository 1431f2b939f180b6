"""Where weights lie in vLLM's models, and what is done where that is not known; without vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.weights.vllm_layout import slots_known, weight_slots
from torchrl_llm.weights.vllm_loading import load_into_vllm_model
from torchrl_llm.weights.weight_source import TensorSource


class _Fused(nn.Module):
    """As vLLM's QKVParallelLinear: several matrices in one."""

    def __init__(self, *sizes):
        super().__init__()
        self.output_sizes, self.tp_size = list(sizes), 1
        self.weight = nn.Parameter(torch.zeros(sum(sizes), 4), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(sum(sizes)), requires_grad=False)


class _Vocabulary(nn.Module):
    """As vLLM's VocabParallelEmbedding: rows up to a multiple."""

    def __init__(self):
        super().__init__()
        self.org_vocab_size, self.tp_size = 5, 1
        self.weight = nn.Parameter(torch.full((8, 4), 9.0), requires_grad=False)


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.embed_tokens = _Vocabulary()
        self.attn = nn.ModuleDict({"qkv_proj": _Fused(4, 2, 2), "o_proj": nn.Linear(4, 4, False)})
        self.lm_head = _Vocabulary()
        self.lm_head.weight = self.embed_tokens.weight
        self.requires_grad_(False)


def _weights():
    shapes = {"embed_tokens.weight": (5, 4), "attn.o_proj.weight": (4, 4)}
    for part, rows in (("q", 4), ("k", 2), ("v", 2)):
        shapes |= {f"attn.{part}_proj.weight": (rows, 4), f"attn.{part}_proj.bias": (rows,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_fused_matrices_are_cut_by_rows_and_padding_is_told_apart():
    model = LlamaForCausalLM()
    weights = _weights()
    receipt = load_into_vllm_model(model, TensorSource(weights), version=4)
    assert (receipt.version, receipt.num_tensors) == (4, 8)
    names = [f"attn.{part}_proj" for part in "qkv"]
    fused = model.attn["qkv_proj"]
    assert torch.equal(fused.weight, torch.cat([weights[f"{name}.weight"] for name in names]))
    assert torch.equal(fused.bias, torch.cat([weights[f"{name}.bias"] for name in names]))
    assert torch.equal(model.embed_tokens.weight[:5], weights["embed_tokens.weight"])
    assert model.lm_head.weight[5:].eq(0).all()

    slots, padding = weight_slots(model)
    assert set(slots) == set(weights) | {"lm_head.weight"}
    assert slots["lm_head.weight"].data_ptr() == slots["embed_tokens.weight"].data_ptr()
    assert [tuple(rows.shape) for rows in padding] == [(3, 4), (3, 4)]
    slots["attn.k_proj.weight"].fill_(7)
    assert fused.weight[4:6].eq(7).all()
    assert torch.equal(fused.weight[6:], weights["attn.v_proj.weight"])


def test_layers_that_lora_wraps_have_the_names_of_those_inside():
    model = LlamaForCausalLM()
    model.attn["qkv_proj"] = nn.ModuleDict({"base_layer": model.attn["qkv_proj"]})
    assert "attn.k_proj.bias" in weight_slots(model).slots


def _over_two_devices(model):
    model.attn["qkv_proj"].tp_size = 2


def _packed(model):
    model.attn["o_proj"].weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _quantized(model):
    weight = model.attn["o_proj"].weight.to(torch.int8)
    model.attn["o_proj"].weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_over_two_devices, r"attn.qkv_proj.weight is spread over 2 devices"),
        (_packed, r"packed attn.o_proj.weight into a form of its own"),
        (_quantized, r"attn.o_proj.weight is quantized \(torch.int8\)"),
    ],
)
def test_memory_of_another_form_is_refused_by_name(change, message):
    model = LlamaForCausalLM()
    change(model)
    with pytest.raises(ConfigError, match=message):
        weight_slots(model)


class _Strange(nn.Module):
    """A family whose loader only vLLM knows: it takes weights one by one, and may fail between."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.b = nn.Parameter(torch.zeros(2))

    @torch.no_grad()
    def load_weights(self, weights):
        loaded = set()
        for name, value in weights:
            dict(self.named_parameters())[name].copy_(value)
            loaded.add(name)
        return loaded


class _Quantized:
    def process_weights_after_loading(self, layer):
        raise AssertionError


def test_a_family_that_is_not_known_is_loaded_by_vllm_all_or_nothing():
    model = _Strange()
    assert not slots_known(model)
    with pytest.raises(ConfigError, match="not in _Strange; bring the weights by EngineWeights"):
        weight_slots(model)
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    load_into_vllm_model(model, TensorSource(ones), version=1)
    assert model.a.tolist() == model.b.tolist() == [1, 1]

    twos = {name: value + 1 for name, value in ones.items()}
    for wrong in ({**twos, "c": twos["a"]}, {"a": twos["a"], "b": torch.ones(3)}):
        with pytest.raises(WeightUpdateError, match="the old ones are in place again"):
            load_into_vllm_model(model, TensorSource(wrong), version=2)
        assert model.a.tolist() == model.b.tolist() == [1, 1]
    with pytest.raises(WeightUpdateError, match=r"1 weights of the engine were not sent: \['b'\]"):
        load_into_vllm_model(model, TensorSource({"a": twos["a"]}), version=2)
    assert model.a.tolist() == [1, 1]
    # A part of the weights is a whole delta.
    load_into_vllm_model(model, TensorSource({"a": twos["a"]}, kind="delta"), version=2)
    assert (model.a.tolist(), model.b.tolist()) == ([2, 2], [1, 1])

    model.quant_method = _Quantized()
    with pytest.raises(ConfigError, match="with _Quantized, which keeps its weights in a form"):
        load_into_vllm_model(model, TensorSource(ones), version=3)
    del model.quant_method

    model.a = nn.Parameter(torch.empty(0))
    with pytest.raises(ConfigError, match="packed this model's weights"):
        load_into_vllm_model(model, TensorSource(ones), version=3)

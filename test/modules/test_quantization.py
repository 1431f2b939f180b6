"""Adapters over weights of four and eight bits: trained, saved alone, never merged."""

import importlib.util
import sys

import pytest
import torch

from torchrl_llm.cli import chat
from torchrl_llm.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_llm.modules import (
    AdapterDisabled,
    TransformersBackend,
    empty_model,
    load_model,
    load_tokenizer,
    quantization,
)
from torchrl_llm.modules.weight_files import published_weights
from torchrl_llm.trainers import TrainingRun, make_optimizer
from torchrl_llm.trainers.run_config import CheckpointConfig, LoggingConfig
from torchrl_llm.trainers.run_folder import model_folder
from torchrl_llm.weights import AdapterWeights
from torchrl_llm.weights.weight_names import engine_weights

pytest.importorskip("peft", reason='pip install "torchrl_llm[test]"')
bitsandbytes = pytest.importorskip("bitsandbytes", reason='pip install "torchrl_llm[test]"')

LORA = {"r": 4, "target_modules": "all-linear"}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
# It is in no extra: where it is, transformers loads it with every model, and it prints warnings.
EIGHT = pytest.param("8bit", marks=pytest.mark.skipif(not HAS_TORCHAO, reason="without torchao"))
BITS = pytest.mark.parametrize("bits", ["4bit", EIGHT])


def make(bits, seed=0, **settings):
    """A model whose adapters change something."""
    torch.manual_seed(seed)
    model = load_model(lora=LORA, quantization=bits, **settings).train()
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05)
    return model


def in_full(weight):
    if hasattr(weight, "quant_state"):
        return bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)
    if hasattr(weight, "SCB"):
        return weight.data.float() * weight.SCB[:, None] / 127
    return weight.dequantize()


def adapters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def gradients(model):
    model(IDS, labels=IDS).loss.backward()
    return {name: value.grad for name, value in adapters(model).items()}


def relative_error(bits):
    quantized, dense = make(bits), make(None)
    packed = dict(quantized.named_parameters())
    for name, value in dense.named_parameters():
        if (
            value.shape != packed[name].shape
            or packed[name].dtype != value.dtype
            or hasattr(packed[name], "qdata")
        ):
            value.data.copy_(in_full(packed[name]))
    of_quantized, of_dense = gradients(quantized), gradients(dense)
    assert len(of_dense) == 28  # two matrices for each of 14 layers
    return max(
        float((of_quantized[name] - of_dense[name]).norm() / of_dense[name].norm())
        for name in of_dense
    )


@BITS
def test_gradients_are_those_of_the_dequantized_model(bits):
    assert relative_error(bits) < 1e-3


def test_eight_bits_come_from_bitsandbytes_where_torchao_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert relative_error("8bit") < 1e-3
    assert hasattr(make("8bit").base_model.model.model.layers[0].mlp.up_proj.weight, "SCB")


@BITS
def test_only_matrices_of_layers_are_rounded_and_none_is_trained(bits):
    model = make(bits)
    dense = {n: p for n, p in load_model(lora=LORA).named_parameters() if "lora_" not in n}
    for name, value in model.named_parameters():
        assert value.requires_grad == ("lora_" in name)
        if any(part in name for part in ("embed", "norm", "lm_head")):
            assert torch.equal(value, dense[name]), name
        elif "lora_" not in name:
            gap = (in_full(value) - dense[name]).norm() / dense[name].norm()
            assert 1e-3 < gap < (0.12 if bits == "4bit" else 0.02), name


@BITS
def test_autograd_keeps_no_weight_in_full(bits):
    shapes = {tuple(p.shape) for n, p in load_model().named_parameters() if "proj" in n}
    kept, model = [], make(bits)

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(IDS)
    assert kept
    assert not {*kept, *(shape[::-1] for shape in kept)} & shapes


@BITS
def test_its_bytes_are_told_before_it_is_loaded(bits):
    def bytes_of(weight):
        tensors = [weight]
        if hasattr(weight, "quant_state"):
            state = weight.quant_state
            scales = state.state2
            tensors += [state.absmax, state.code, state.offset, scales.absmax, scales.code]
        elif hasattr(weight, "qdata"):
            tensors = [weight.qdata, weight.scale]
        return sum(each.untyped_storage().nbytes() for each in tensors)

    real = sum(map(bytes_of, make(bits).parameters()))
    assert quantization.weight_bytes(empty_model(lora=LORA), bits) == real
    assert real < quantization.weight_bytes(empty_model(lora=LORA), None) / 2


def take_steps(folder, bits, *, steps, resume="never"):
    model = make(bits)
    optimizer = make_optimizer(model, name="AdamW", lr=1e-2)
    run = TrainingRun(
        folder,
        max_steps=steps,
        model=model,
        tokenizer=load_tokenizer(),
        parts={"optimizer": optimizer},
        logging=LoggingConfig(progress=False, backend=[]),
        checkpoint=CheckpointConfig(interval=1, resume=resume),
    )
    for step in run.steps():
        model(IDS + step, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.record({"train/reward": 0.0, "train/tokens_generated": 1})
    return model.eval()


@BITS
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_of_the_adapter_alone(tmp_path, bits):
    whole = take_steps(tmp_path / "whole", bits, steps=2)
    take_steps(tmp_path / "cut", bits, steps=1)
    again = take_steps(tmp_path / "cut", bits, steps=2, resume="auto")
    assert all(torch.equal(adapters(again)[n], p) for n, p in adapters(whole).items())
    assert not torch.equal(whole(IDS).logits, make(bits).eval()(IDS).logits)

    folder = model_folder(tmp_path / "cut")
    files = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    import peft

    for opened in (
        load_model(folder, quantization=bits),
        peft.PeftModel.from_pretrained(load_model(quantization=bits), folder).eval(),
    ):
        assert torch.equal(opened(IDS).logits, whole(IDS).logits)
    model, tokenizer = chat.load(chat.model_and_config(str(tmp_path / "cut"))[0])
    assert (model(IDS).logits - whole(IDS).logits).abs().max() < 5  # over the base in full
    assert tokenizer.is_fast


@BITS
def test_an_adapter_is_not_merged(bits, tmp_path):
    model = make(bits)
    with pytest.raises(CheckpointError, match="not merged into quantized weights"):
        published_weights(model)
    with pytest.raises(ConfigError, match=r"quantized weights.*weight_sync\.type=adapter"):
        engine_weights(model)


@BITS
def test_an_adapter_reaches_an_engine_over_the_same_weights(bits):
    trained, sampler = (TransformersBackend(make(bits, seed).eval()) for seed in (0, 1))
    ids, select = [IDS[0]], [IDS[0] > 5]

    def scores(scorer):
        return scorer.token_scores(ids, select).log_probs

    assert not torch.equal(scores(sampler), scores(trained))
    AdapterWeights(sampler).push_weights(trained.module)
    assert torch.equal(scores(sampler), scores(trained))
    reference = TransformersBackend(load_model(quantization=bits))
    assert torch.equal(scores(AdapterDisabled(trained)), scores(reference))


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"'bitsandbytes'.*torchrl_llm\[quantization\]"):
        load_model(quantization="4bit")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[quantization\]"):
        load_model(quantization="8bit")

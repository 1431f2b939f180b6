"""Names that an engine knows, out of every wrapping."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.weights import engine_weights, get_model_metadata, normalized_name


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.q_proj.base_layer.weight", "model.q_proj.weight"),
        ("model.module.weight", "model.module.weight"),  # a submodule that is called so
    ],
)
def test_a_wrapped_name_becomes_the_bare_one(wrapped, bare):
    assert normalized_name(wrapped) == bare


def test_every_form_of_a_model_gives_the_same_weights(tiny_model):
    expected = dict(tiny_model.named_parameters())
    compiled = torch.compile(tiny_model)
    for form in (
        tiny_model,
        compiled,
        tiny_model.state_dict(),
        {f"module.{name}": value for name, value in tiny_model.state_dict().items()},
        TensorDict.from_module(tiny_model),
    ):
        weights = engine_weights(form)
        assert list(weights) == sorted(expected)
        for name, value in weights.items():
            assert value.data_ptr() == expected[name].data_ptr()
            assert not value.requires_grad


def test_a_tied_weight_has_one_name(tiny_model):
    assert tiny_model.config.tie_word_embeddings
    weights = engine_weights(tiny_model)
    assert "lm_head.weight" not in weights
    assert "model.embed_tokens.weight" in weights


def test_metadata_tell_type_and_shape_of_what_is_sent(tiny_model):
    weights = engine_weights(tiny_model)
    metadata = get_model_metadata(tiny_model)
    assert metadata == {name: (w.dtype, w.shape) for name, w in weights.items()}


def test_two_weights_may_not_share_a_name():
    with pytest.raises(WeightUpdateError, match="'a'"):
        engine_weights({"a": torch.zeros(1), "module.a": torch.ones(1)})


@pytest.fixture
def adapted(tiny_model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(copy.deepcopy(tiny_model), config)
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(value, std=0.1)
    return model


def test_adapters_are_merged_into_copies(adapted, tiny_model):
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    ids = torch.arange(3, 12)[None]
    expected = adapted(ids).logits
    weights = engine_weights(adapted)

    assert set(weights) == set(engine_weights(tiny_model))
    plain = copy.deepcopy(tiny_model)
    plain.load_state_dict(weights, strict=False)
    assert not torch.allclose(tiny_model(ids).logits, expected, atol=1e-3)
    torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-5)
    # Training goes on with the adapters as they were.
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    torch.testing.assert_close(adapted(ids).logits, expected, atol=0, rtol=0)


def test_modules_that_peft_trains_whole_replace_the_originals(tiny_model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = peft.get_peft_model(copy.deepcopy(tiny_model), config)
    saved = next(v for n, v in model.named_parameters() if ".model.norm.modules_to_save" in n)
    nn.init.constant_(saved, 3.0)
    weights = engine_weights(model)
    assert set(weights) == set(engine_weights(tiny_model))
    assert weights["model.norm.weight"].unique().tolist() == [3.0]


def test_an_adapter_on_one_of_two_tied_layers_is_refused(tiny_model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    model = peft.get_peft_model(copy.deepcopy(tiny_model), config)
    with pytest.raises(WeightUpdateError, match=r"lm_head.*tied"):
        engine_weights(model)


def test_a_state_dict_with_adapters_cannot_be_merged(adapted):
    with pytest.raises(ConfigError, match="belongs to an adapter"):
        engine_weights(adapted.state_dict())


def test_weights_are_cast_for_an_engine_with_fewer_bits_but_for_those_that_are_kept_precise():
    class Router(nn.Module):
        _keep_in_fp32_modules_strict = ("bias_of_experts",)  # as DeepSeek's

        def __init__(self):
            super().__init__()
            self.bias_of_experts = nn.Parameter(torch.randn(3))
            self.weight = nn.Parameter(torch.randn(3))
            self.small = nn.Parameter(torch.randn(3).half())
            self.register_buffer("count", torch.tensor([2**40]))

    model = Router()
    cast = engine_weights(model, dtype=torch.bfloat16)
    types = {name: value.dtype for name, value in cast.items()}
    assert types == {
        "bias_of_experts": torch.float32,
        "count": torch.int64,
        "small": torch.float16,
        "weight": torch.bfloat16,
    }
    assert torch.equal(cast["weight"], model.weight.to(torch.bfloat16))
    assert engine_weights(model, dtype=torch.float32)["weight"].dtype == torch.float32

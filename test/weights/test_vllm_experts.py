"""New weights for mixtures of experts in real vLLM engines, whose kernels keep experts packed."""

import pytest
import torch

pytest.importorskip("vllm")

from modules.backends.vllm.engine_helper import small_backend
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from weights.learner import Learner, assert_same_model, scores

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.model_loading import load_tokenizer
from torchrl_llm.weights import (
    AdapterWeights,
    CanaryCheck,
    DeltaWeights,
    EngineWeights,
    engine_weights,
)
from torchrl_llm.weights.weight_source import TensorSource

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "q_lora_rank": 16,
    # The one size of vLLM's kernel for the CPU.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32, "sliding_window": 64},
    "deepseek_v3": LATENT,
}


def _save(model, folder):
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def _engine(family, folder, **options):
    """A random model of a family, and an engine of the weights that it has now."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    return model, small_backend(_save(model, folder), engine_options=options)


def _follow(learner, updater, engine, steps=2):
    updater.version = engine.version or 0
    for _ in range(steps):
        learner.step()
        assert float((scores(learner.reference) - scores(engine)).abs().max()) > 0.05
        updater.push_weights(learner.model)
        assert_same_model(engine, learner.reference)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return _engine("qwen3_moe", tmp_path_factory.mktemp("qwen"))


def test_experts_follow_the_optimizer_and_so_do_some_of_their_weights(qwen):
    model, engine = qwen
    learner = Learner(model)
    _follow(learner, EngineWeights(engine, canary=CanaryCheck(learner.reference)), engine)
    some = [value for name, value in model.named_parameters() if "gate_up_proj" in name]
    updater = DeltaWeights(engine)
    updater.version = engine.version
    updater.push_weights(model)
    _follow(Learner(model, parameters=some, lr=3e-2), updater, engine)
    assert updater.num_sent == len(some)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_names_of_transformers_and_of_the_checkpoint_both_reach_the_experts(family, tmp_path):
    model, engine = _engine(family, tmp_path / "first")
    learner = Learner(model)
    _follow(learner, EngineWeights(engine), engine)
    learner.step()
    saved = load_file(_save(model, tmp_path / "second") / "model.safetensors")
    assert ("model.layers.0.block_sparse_moe.experts.3.w1.weight" in saved) == (family == "mixtral")
    EngineWeights(engine).push_weights(saved)
    assert_same_model(engine, learner.reference)


def test_latent_attention_and_its_experts_become_those_of_a_new_engine(tmp_path):
    # On the CPU vLLM's latent attention is not that of transformers, new weights or not. On a
    # processor with AMX it chooses a kernel that takes bfloat16 only.
    plain = {"attention_backend": "CPU_MLA"}
    model, engine = _engine("deepseek_v3", tmp_path / "first", **plain)
    before = scores(engine)
    Learner(model).step()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias += torch.tensor([1.0, 0, 0, -1])
    EngineWeights(engine).push_weights(model)
    assert float((scores(engine) - before).abs().max()) > 0.1
    fresh = small_backend(_save(model, tmp_path / "second"), engine_options=plain)
    assert_same_model(engine, fresh, tolerance=1e-6)


def test_experts_over_two_workers_follow_the_optimizer(tmp_path):
    model, engine = _engine("gpt_oss", tmp_path, num_devices=2)
    _follow(Learner(model), EngineWeights(engine), engine)


def test_sinks_that_attention_has_in_another_dtype_follow_too(tmp_path):
    model, engine = _engine("gpt_oss", tmp_path / "first", dtype="float16")
    before = scores(engine)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 2
    EngineWeights(engine).push_weights(model)
    assert float((scores(engine) - before).abs().max()) > 0.01
    fresh = small_backend(_save(model, tmp_path / "second"), engine_options={"dtype": "float16"})
    assert torch.equal(scores(engine), scores(fresh))


def test_a_part_of_the_experts_is_refused_and_the_engine_is_as_before(qwen):
    model, engine = qwen
    before, name = scores(engine), "model.layers.1.mlp.experts.gate_up_proj"
    weights = {key: value + 1 for key, value in engine_weights(model).items()}
    up = {"model.layers.1.mlp.experts.2.up_proj.weight": weights[name][2, 32:]}
    for given, kind, message in [
        (up, "delta", r"2048 of 16384 values of .*w13_weight were sent"),
        ({**weights, name: weights[name][:3]}, "full", r"12288 of 16384 values of"),
        ({k: v for k, v in weights.items() if k != name}, "full", r"not sent.*w13_weight"),
        # Too narrow ones and too many vLLM's loaders take without a word.
        ({**weights, name: weights[name][:, :, 1:]}, "full", r"16128 of 16384 values of"),
        ({**weights, name: weights[name].repeat(2, 1, 1)}, "full", "experts.4.*has 4 experts"),
        ({**weights, name: weights[name].repeat(1, 1, 2)}, "full", "the old ones are in place"),
        ({**weights, name: weights[name].repeat(1, 2, 1)}, "full", "the old ones are in place"),
    ]:
        with pytest.raises(WeightUpdateError, match=message):
            engine.update_weights(TensorSource(given, kind=kind), version=99)
    assert torch.equal(scores(engine), before)


def test_quantized_weights_are_refused_when_the_updater_is_built():
    options = {"dtype": "bfloat16", "quantization": "int8_per_channel_weight_only"}
    engine = small_backend(engine_options=options)
    with pytest.raises(ConfigError, match=r"quantized \(int8_per_channel_weight_only\).*adapter"):
        EngineWeights(engine)
    AdapterWeights(engine)

"""A model on one small GPU: what goes together, and forecasts of what is measured."""

import importlib.util
from itertools import accumulate

import numpy
import pytest
import torch
from recipes.grpo_helper import column, run_script
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from torchrl_llm.errors import ConfigError, MissingExtraError
from torchrl_llm.functional.head_tiles import logits_bytes
from torchrl_llm.modules import (
    TransformersBackend,
    ValueHead,
    empty_model,
    load_model,
)
from torchrl_llm.modules.backends.vllm import build
from torchrl_llm.recipes import AsyncGRPOConfig, load_config, memory
from torchrl_llm.recipes.builders import autocast, make_policy
from torchrl_llm.recipes.builders.devices import ActivationsOnCpu
from torchrl_llm.recipes.sampling_engine import engine_arguments, sync_type
from torchrl_llm.trainers import make_optimizer

LORA = {"train_model": {"lora": {"enabled": True}}}
FOUR = {"model": {"quantization": "4bit"}, **LORA}
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "vocab_size": 1000,
}
ALL_LINEAR = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("values", "schema", "message"),
    [
        ({"model": {"quantization": "4bit"}}, None, r"needs train_model\.lora\.enabled=true"),
        (FOUR | {"train": {"parallel": "fsdp2"}}, None, "4bit does not go with train.parallel"),
        (FOUR | {"inference_model": {"backend": "vllm", "sleep": True}}, None, "sleep=true"),
        (FOUR, AsyncGRPOConfig, "sends whole weights to its collectors"),
        *[
            (
                FOUR | {"inference_model": {"backend": "vllm"}, "weight_sync": sync},
                None,
                rf"weight_sync\.type={sync['type']}, which sends whole weights",
            )
            for sync in ({"type": "load"}, {"type": "files", "folder": "/tmp/weights"})
        ],
        (
            {**FOUR, "model": {"quantization": "8bit"}, "inference_model": {"backend": "vllm"}},
            None,
            "8bit does not go with inference_model.backend=vllm",
        ),
        (
            {"optimizer": {"on_cpu": True}, "train": {"parallel": "fsdp2"}},
            None,
            r"optimizer\.on_cpu=true does not go with train\.parallel=fsdp2",
        ),
        (
            {"optimizer": {"name": "Muon"}, "train": {"parallel": "fsdp2"}},
            None,
            r"optimizer\.name=Muon does not go with train\.parallel=fsdp2",
        ),
        (
            {"train_model": {"offload_activations": True, "gradient_checkpointing": True}},
            None,
            "offload_activations has no effect with .*: choose one",
        ),
        ({"optimizer": {"options": {"lr": 1}}}, None, r"optimizer\.options cannot hold lr"),
        ({"optimizer": {"options": {"warmth": 1}}}, None, "warmth has no effect: AdamW"),
        ({"optimizer": {"name": "Muon", "options": {"fused": True}}}, None, "fused has no effect"),
        ({"optimizer": {"name": "no_such:Thing"}}, None, "'no_such:Thing' cannot be imported"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(values, schema, message):
    with pytest.raises(ConfigError, match=message):
        load_config(values) if schema is None else load_config(values, schema)


def test_an_adapter_of_a_rounded_model_goes_on_and_is_not_merged(tmp_path):
    for package in ("peft", "bitsandbytes"):
        pytest.importorskip(package)
    trained = load_model(lora=ALL_LINEAR, quantization="4bit")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    trained.save_pretrained(tmp_path)
    ids, expected = torch.tensor([[1, 2, 3]]), None
    for lora in (None, {}):
        found = load_model(tmp_path, lora=lora, quantization="4bit")
        assert any(each.requires_grad for each in found.parameters()) == (lora is not None)
        logits = found(input_ids=ids).logits
        expected = trained.eval()(input_ids=ids).logits if expected is None else expected
        assert torch.equal(logits, expected)
    policy = make_policy(
        load_config({"model": {"name": str(tmp_path), "quantization": "4bit"}, **LORA})
    )
    assert torch.equal(policy.model.eval()(input_ids=ids).logits, expected)


def test_an_engine_rounds_as_the_trainer_does_by_a_plugin(monkeypatch):
    values = FOUR | {"inference_model": {"backend": "vllm"}}
    config = load_config(values | {"train": {"device": "cpu", "mixed_precision": "bfloat16"}})
    options = engine_arguments(config, sync_type(config))
    assert options["enable_lora"]
    assert (options["quantization"], options["dtype"]) == ("bitsandbytes", "bfloat16")
    with pytest.raises(ConfigError, match="needs an engine in bfloat16"):
        engine_arguments(load_config(values | {"train": {"device": "cpu"}}), "adapter")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps vllm-bnb-plugin"):
        build.engine_arguments(**options)
    assert "quantization" not in engine_arguments(load_config(LORA), "adapter")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["train_model.dtype", "train.mixed_precision"])
def test_an_engine_samples_with_an_adapter_over_four_bits(tmp_path, monkeypatch, precision):
    for package in ("vllm", "vllm_bnb_plugin"):
        pytest.importorskip(package)
    table = run_script(
        monkeypatch,
        tmp_path,
        "model.quantization=4bit",
        "train_model.lora.enabled=true",
        f"{precision}=bfloat16",
        "inference_model.backend=vllm",
        "inference_model.max_model_len=64",
        "eval.num_prompts=0",
        "train.max_steps=3",
        "optimizer.lr=0.005",
    )
    assert column(table, "train/grad_norm")[0] > 0
    # By rounding to bfloat16.
    assert max(column(table, "train/kl_to_inference")) < 3e-3
    assert column(table, "train/canary_distinct")[-1] == 1


def test_options_reach_the_optimizer():
    config = load_config({"optimizer": {"name": "Muon", "options": {"ns_steps": 3}}})
    groups = make_optimizer(load_model(), **config.optimizer.arguments).param_groups
    assert [group.get("ns_steps") for group in groups] == [3, None]


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_activations_that_wait_on_the_cpu_change_no_bit(quantization):
    if quantization is not None:
        pytest.importorskip("bitsandbytes" if quantization == "4bit" else "torchao")
    lora = None if quantization is None else ALL_LINEAR
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = load_model(lora=lora, quantization=quantization).train()
        backend = TransformersBackend(model, value_head=ValueHead.for_model(model))
        config = load_config({"train_model": {"offload_activations": offloads}})
        ids = [torch.arange(5, 40), torch.arange(9, 30)]
        with autocast(config):
            scores = backend.token_scores(ids, [each > 9 for each in ids], entropy=True)
            loss = scores.log_probs.sum() + scores.entropy.sum()
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def waiting_bytes(model, precision):
    """Bytes that are copied to the CPU in a forward, those of weights that autocast casts apart."""
    shapes = {p.numel() for p in model.parameters()}
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    low = torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed")
    inside = ActivationsOnCpu()
    with inside, low:
        base.model(torch.randint(3, 200, (4, 96)), use_cache=False)
    return sum(copy.nbytes for copy in inside.copies.values() if copy.numel() not in shapes)


@pytest.mark.parametrize("lora", [None, ALL_LINEAR], ids=["all", "lora"])
@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_what_waits_on_the_cpu_is_forecast(precision, lora):
    model = load_model(lora=lora).train()
    width = sum(m.out_features for n, m in model.named_modules() if n.endswith("lora_A.default"))
    forecast = memory.activation_bytes(
        memory.DecoderShape.of(model), 4 * 96, precision, adapter_width=width
    )
    assert forecast == pytest.approx(waiting_bytes(model, precision), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        ({"name": "Muon"}, "torch"),
        ({"name": "bitsandbytes.optim:AdamW8bit"}, "bitsandbytes"),
        ({"name": "schedulefree:AdamWScheduleFree"}, "schedulefree"),
    ],
    ids=str,
)
def test_states_of_an_optimizer_are_forecast(arguments, package):
    from torchrl_llm.trainers.optimizers import in_training

    pytest.importorskip(package)
    model = load_model()
    optimizer = make_optimizer(model, lr=1e-3, **arguments)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    with in_training(optimizer):
        optimizer.step()
    states = {id(v): v for s in optimizer.state.values() for v in s.values()}.values()
    real = sum(v.untyped_storage().nbytes() for v in states if isinstance(v, torch.Tensor))
    assert memory.optimizer_bytes(empty_model(), {"lr": 1e-3, **arguments}) == pytest.approx(
        real, rel=0.01
    )


def parts(device="cuda", **values):
    config = load_config({"train": {"device": device}, **values})
    return {p.name: p for p in memory.memory_parts(config, prompt_tokens=64)}


def test_a_forecast_puts_each_part_where_it_is():
    plain, four = parts(**LORA), parts(**FOUR)
    adapter = plain["gradients"].num_bytes
    assert plain["weights"].num_bytes == 4 * 337_792 + adapter
    assert four["weights"].num_bytes == pytest.approx(plain["weights"].num_bytes / 3, rel=0.2)
    assert four["checkpoint"].num_bytes == pytest.approx(4 * adapter, rel=0.01)
    assert four["a layer's weight in full"].num_bytes == 128 * 256 * 6
    small = parts(optimizer={"on_cpu": True}, train_model={"offload_activations": True})
    on_cpu = ("optimizer states", "copies for the optimizer", "activations on the CPU")
    assert {small[name].where for name in on_cpu} == {("host",)}
    assert memory.peak_bytes(small.values(), "host") == sum(small[n].num_bytes for n in on_cpu)
    assert "activations" not in small
    assert small["a layer at work"].num_bytes < parts()["activations"].num_bytes
    here = parts("cpu", optimizer={"on_cpu": True}, train_model={"offload_activations": True})
    assert memory.peak_bytes(here.values(), "host") == 0
    assert here["activations"].num_bytes == parts("cpu")["activations"].num_bytes


def peak_of(work):
    """The most bytes that torch's allocator has given out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))


class OutOfSight(ActivationsOnCpu):
    """Keeps copies where torch's allocator does not count them, as those next to a GPU."""

    def room(self, like):
        return torch.from_numpy(numpy.empty(like.nbytes, numpy.uint8)).view(like.dtype)


LLAMA = {
    "hidden_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "intermediate_size": 1024,
    "vocab_size": 12_000,
}
WIDE = SHAPE | {"num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 30_000}
SIZES = {
    "5M": Qwen2Config(**SHAPE, architectures=["Qwen2ForCausalLM"]),
    "14M": LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]),
    "19M": Qwen2Config(**WIDE, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
}
ADAPTERS, AGAIN = {"lora": {"enabled": True}}, {"gradient_checkpointing": True}
STEPS = {
    "all weights": {},
    "all weights, again": {"train_model": AGAIN},
    "all weights, two forwards": {"train": {"micro_token_budget": 256}},
    "states on the CPU": {"optimizer": {"on_cpu": True}},
    "adapters": {"train_model": ADAPTERS},
    "adapters, again": {"train_model": ADAPTERS | AGAIN},
    "offload": {"train_model": ADAPTERS | {"offload_activations": True}},
    **{
        f"{bits}{name}": {"model": {"quantization": bits}, "train_model": ADAPTERS | more}
        for bits in ("4bit", "8bit")
        for name, more in (("", {}), (" offload", {"offload_activations": True}), (" again", AGAIN))
    },
}


@pytest.fixture(
    scope="module",
    params=["5M", *(pytest.param(name, marks=pytest.mark.full) for name in ("14M", "19M"))],
)
def weights(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(SIZES[request.param]).save_pretrained(folder)
    return folder


def logits_bytes_here(*sizes, kind, **more):
    return logits_bytes(*sizes, kind="cpu", **more)


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_a_step_is_forecast(name, weights, monkeypatch):
    # What is counted for a GPU runs on this CPU, whose head has tiles of its own.
    monkeypatch.setattr(memory, "logits_bytes", logits_bytes_here)
    values = {group: dict(keys) for group, keys in STEPS[name].items()}
    bits = values.setdefault("model", {}).get("quantization")
    if bits is not None:
        pytest.importorskip("bitsandbytes" if bits == "4bit" else "torchao")
    values["model"]["name"] = str(weights)
    offloads = "offload" in name
    train = {"device": "cuda" if offloads else "cpu", "prompts_per_batch": 1, "packing": "padded"}
    values["train"] = train | {"mixed_precision": "float32"} | values.get("train", {})
    values |= {"env": {"repeats": 4}, "inference_model": {"max_tokens": 96}}
    config = load_config(values)
    wanted = config.train_model
    forecast = memory.memory_parts(config, prompt_tokens=32)
    model = load_model(
        weights,
        lora=wanted.lora.arguments,
        quantization=bits,
        gradient_checkpointing=wanted.gradient_checkpointing,
    ).train()
    scorer = TransformersBackend(model, layout="padded", eos_token_ids=(2,))
    optimizer = make_optimizer(model, **config.optimizer.arguments)
    ids = [torch.randint(3, 900, (128,)) for _ in range(4)]
    rows = min(4, config.train.micro_token_budget // 128)

    def step():
        for at in range(0, 4, rows):
            with OutOfSight() if offloads else autocast(config):
                masks = [torch.arange(128) >= 32] * rows
                loss = scorer.token_scores(ids[at : at + rows], masks).log_probs.mean()
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step()  # states are there from the second on
    rest = ("weights", "optimizer states", "copies for the optimizer")
    held = sum(part.num_bytes for part in forecast if part.name in rest)
    assert memory.peak_bytes(forecast, "train") == pytest.approx(held + peak_of(step), rel=0.1)

"""Memory by formula: equal to the bytes of the real tensors."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config

from torchrl_llm.cli import main
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.head_tiles import HeadSettings, HeadTiles, KeptTiles, logits_bytes
from torchrl_llm.functional.logit_form import LogitForm
from torchrl_llm.modules import empty_model, load_model, load_reward_model, load_tokenizer
from torchrl_llm.modules.backends.causal_decoder import make_cache
from torchrl_llm.recipes import AsyncGRPOConfig, GRPOConfig, load_config, memory
from torchrl_llm.trainers import make_optimizer

ROOT = Path(__file__).parents[2]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
QWEN = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Folder of a tiny Qwen2 with weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    AutoModelForCausalLM.from_config(Qwen2Config(**QWEN)).save_pretrained(folder)
    return folder


@pytest.fixture(params=["embedded", "qwen"])
def name(request):
    return None if request.param == "embedded" else request.getfixturevalue("qwen")


def real_bytes(tensors):
    return sum(each.untyped_storage().nbytes() for each in tensors)


def parts_of(config, prompt_tokens=64):
    return {each.name: each for each in memory.memory_parts(config, prompt_tokens=prompt_tokens)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_an_empty_model_has_the_parameters_of_the_loaded_one(name, dtype, lora):
    empty, real = (make(name, dtype=dtype, lora=lora) for make in (empty_model, load_model))
    assert all(each.is_meta for each in empty.parameters())
    assert memory.tensor_bytes(empty.parameters()) == real_bytes(real.parameters())
    counted = memory.trained(empty)
    assert memory.tensor_bytes(counted) == real_bytes(memory.trained(real))
    assert len(counted) == len(memory.trained(real)) > 0


def test_a_folder_with_its_configuration_alone_is_enough(tmp_path):
    Qwen2Config(**QWEN, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    # embedding and head, two norms and seven projections a layer (three with bias), the last norm
    layer = 2 * 64 + 64 * (2 * 64 + 2 * 32 + 3 * 160) + 64 + 2 * 32
    assert sum(p.numel() for p in empty_model(tmp_path).parameters()) == (
        2 * 300 * 64 + 3 * layer + 64
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "AdamW", "lr": 1e-3},
        {"name": "SGD", "lr": 1e-3},
        {"name": "SGD", "lr": 1e-3, "momentum": 0.9},
        {"name": "Adagrad", "lr": 1e-3},
        {"name": "RMSprop", "lr": 1e-3, "momentum": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("lora", [None, LORA])
def test_states_of_the_optimizer_are_those_of_the_real_one(arguments, lora):
    real = memory.trained(load_model(lora=lora))
    optimizer = make_optimizer(real, **arguments)
    for each in real:
        each.grad = torch.ones_like(each)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    expected = real_bytes(value for value in states if isinstance(value, torch.Tensor))
    assert memory.optimizer_bytes(memory.trained(empty_model(lora=lora)), arguments) == expected


def test_an_optimizer_that_must_read_its_numbers_is_shown_as_unknown():
    with pytest.raises(ConfigError, match="Adafactor is not known"):
        memory.optimizer_bytes(empty_model().parameters(), {"name": "Adafactor", "lr": 1.0})
    config = load_config({"optimizer": {"name": "Adafactor", "weight_decay": 0.0}})
    assert parts_of(config)["optimizer states"].num_bytes is None


@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
def test_the_cache_has_the_bytes_of_a_real_one(name, precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, cache = load_model(name, dtype=dtype), None
    cache = make_cache(model, 8)
    is_low = precision == "mixed"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_low):
        model(torch.randint(3, 200, (2, 16)), past_key_values=cache, use_cache=True)
    shape = memory.DecoderShape.of(model)
    # 16 tokens were read, and there is room for 8
    expected = real_bytes(each for layer in cache.layers for each in (layer.keys, layer.values))
    assert memory.cache_bytes(shape, 2 * (16 + 8), precision) == expected


def kept_bytes(model, precision):
    """Bytes that autograd keeps of a forward of 4 x 128 tokens, those of weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        memory_ = tensor.untyped_storage()
        if memory_.data_ptr() not in weights:
            kept[memory_.data_ptr()] = (memory_.nbytes(), tensor)
        return tensor

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    low = torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), low:
        base.model(torch.randint(3, 200, (4, 128)), use_cache=False)
    shapes = {tuple(p.shape) for p in model.parameters()}

    def is_weight(tensor):  # a copy that autocast made, which is another line of the table
        shape = tuple(tensor.shape)
        return tensor.dtype == torch.bfloat16 and bool({shape, shape[::-1]} & shapes)

    return sum(size for size, tensor in kept.values() if not is_weight(tensor))


@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "lora"])
@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
def test_activations_are_what_autograd_keeps(name, precision, lora):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = load_model(name, dtype=dtype, lora=lora).train()
    width = sum(
        m.out_features
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and ".lora_A." in n
    )
    by_formula = memory.activation_bytes(
        memory.DecoderShape.of(model), 4 * 128, precision, adapter_width=width
    )
    assert by_formula == pytest.approx(kept_bytes(model, precision), rel=0.03)


def test_gradient_checkpointing_keeps_one_state_a_layer():
    shape = memory.DecoderShape(20, 64, 4, 2, 16, 160, 300)
    one = memory.activation_bytes(shape, 512, "float32", gradient_checkpointing=True)
    more = memory.activation_bytes(
        shape._replace(layers=21), 512, "float32", gradient_checkpointing=True
    )
    assert more - one == 512 * 64 * 4
    model = load_model(gradient_checkpointing=True).train()
    states = 2 * 512 * 128 * 4  # one for each layer, and what the last norm keeps
    norm = 512 * (2 * 128 + 1) * 4
    assert kept_bytes(model, "float32") == pytest.approx(states + norm, rel=0.03)


@pytest.mark.parametrize("chunk_size", [None, 1000, 50_000])
def test_logits_are_those_that_the_head_holds(chunk_size):
    weight, hidden = torch.zeros(7001, 8, requires_grad=True), torch.zeros(40, 8)
    settings = HeadSettings(LogitForm(), False, chunk_size, False, True, torch.float32)
    head = HeadTiles(hidden, weight, None, None, None, 1.0, settings)
    buffer = head.buffer(head.rows[0], head.columns[0])
    kept = KeptTiles.of(head, weight)
    held = real_bytes([buffer])
    if kept is not None and kept.gradient is None:
        held += 4 * 40 * 7001
    assert logits_bytes(40, 7001, chunk_size=chunk_size) == held


def test_the_logits_of_a_large_vocabulary_are_never_whole(tmp_path):
    LlamaConfig(**QWEN | {"vocab_size": 151_936}).save_pretrained(tmp_path)
    values = {"model": {"name": str(tmp_path)}, "train": {"device": "cpu"}}
    config = load_config({**values, "inference_model": {"max_tokens": 256}})
    whole = 16_384 * 151_936 * 4
    part = parts_of(config, prompt_tokens=512)["logits, a chunk"]
    assert part.num_bytes < whole / 1000
    assert memory.show_bytes(whole) in part.note


def test_weights_of_the_sampler_are_shared_or_a_copy():
    vllm = {"inference_model": {"backend": "vllm"}, "train": {"device": "cpu"}}
    weights = 4 * 337_792
    for values, expected in [
        ({"train": {"device": "cpu"}}, 0),
        (vllm, 0),
        (vllm | {"weight_sync": {"type": "load"}}, weights),
        (vllm | {"train": {"device": "cuda"}}, weights / 2),  # in the type of the autocast
        (vllm | {"train_model": {"lora": {"enabled": True}}}, weights),
    ]:
        assert parts_of(load_config(values))["weights of the sampler"].num_bytes == expected
    config = load_config({"ray": {"num_collectors": 4}}, AsyncGRPOConfig)
    assert parts_of(config)["weights of the sampler"].num_bytes == 4 * weights


def test_the_reference_is_a_model_or_the_policy_without_its_adapters():
    values = {"train": {"kl_to_ref_coeff": 0.1}}
    assert parts_of(load_config(values))["reference model"].num_bytes == 4 * 337_792
    values |= {"train_model": {"lora": {"enabled": True}}}
    assert parts_of(load_config(values))["reference model"].num_bytes == 0
    assert "reference model" not in parts_of(GRPOConfig())


JUDGES = """
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.rewards import JudgeReward, WrapperTextModel

wrapper = TransformersWrapper(
    load_model(), tokenizer=load_tokenizer(), input_mode="history", generate=True
)
here, of_mine = JudgeReward(WrapperTextModel(wrapper)), JudgeReward(lambda chats: ["Score: 1"])
"""


def test_models_that_score_are_counted(tmp_path):
    torch.manual_seed(0)
    model, folder = load_reward_model(), tmp_path / "reward"
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    (tmp_path / "judges.py").write_text(JUDGES)
    components = {
        "model": {"name": str(folder), "token_budget": 1000},
        "here": {"_target_": f"{tmp_path}/judges.py:here"},
        "mine": {"_target_": f"{tmp_path}/judges.py:of_mine"},
        "judge": {"url": "http://localhost:1", "model": "far"},
        "length": {"longest": 20},
        "task": {"weight": 0.5},
    }
    values = {"reward": {"components": components}, "train": {"device": "cpu"}}
    parts = parts_of(load_config(values))
    assert parts["reward.components.model"].num_bytes == real_bytes(model.parameters())
    # 3 x 256 of the gated product and 4 x 128 of the states, of 1,000 tokens in float32
    assert parts["reward.components.model, at work"].num_bytes == 1000 * (3 * 256 + 4 * 128) * 4
    assert parts["reward.components.here"].num_bytes == 4 * 337_792
    assert parts["reward.components.mine"].num_bytes is None
    assert not {f"reward.components.{name}" for name in ("judge", "length", "task")} & parts.keys()
    values["ray"] = {"num_collectors": 4}
    spread = parts_of(load_config(values, AsyncGRPOConfig))["reward.components.model"]
    assert spread.num_bytes == 4 * real_bytes(model.parameters())
    assert spread.where == ("sample",)


def of_ranks(number, **train):
    values = {
        "model": {"name": train.pop("name", None)},
        "inference_model": {"backend": train.pop("backend", "transformers")},
        "weight_sync": train.pop("weight_sync", {}),
        "train": {"device": "cpu", "parallel": "fsdp2", **train},
    }
    parts = memory.memory_parts(load_config(values), prompt_tokens=64, processes=number)
    return {each.name: each.num_bytes for each in parts}


def test_fsdp2_divides_what_is_trained_and_gathers_what_samples(name):
    name = name and str(name)
    alone, spread = (of_ranks(4, name=name, parallel=kind) for kind in ("ddp", "fsdp2"))
    for part in ("weights", "gradients", "optimizer states"):
        assert spread[part] == -(-alone[part] // 4)
    assert "gathered weights" not in alone
    whole = of_ranks(4, name=name, gathers="model")
    assert whole["weights that sample"] == alone["weights"]
    assert "weights that sample" not in spread
    assert of_ranks(4, name=name, backend="vllm")["weights to send"] == alone["weights"]
    same = alone.keys() - {"weights", "gradients", "optimizer states"}
    assert {part: spread[part] for part in same} == {part: alone[part] for part in same}
    values = {"train": {"device": "cpu", "kl_to_ref_coeff": 0.1}, "model": {"name": name}}
    reference = parts_of(load_config(values))["reference model"].num_bytes
    spread = of_ranks(4, name=name, kl_to_ref_coeff=0.1)
    assert spread["reference model"] == -(-reference // 4)
    assert spread["gathered reference"] == spread["gathered weights"]
    whole = of_ranks(4, name=name, kl_to_ref_coeff=0.1, gathers="model")
    assert whole["gathered reference"] == reference


def test_fsdp2_gathers_two_layers_and_what_is_in_none(qwen):
    layer = 2 * 64 + 64 * (2 * 64 + 2 * 32 + 3 * 160) + 64 + 2 * 32
    assert of_ranks(2, name=str(qwen))["gathered weights"] == 4 * (2 * layer + 2 * 300 * 64 + 64)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_has_its_share_of_the_rows(kind):
    (one, four) = (of_ranks(n, parallel=kind, micro_token_budget=None) for n in (1, 4))
    for part in ("activations", "cache of sampling"):
        assert one[part] == 4 * four[part]
    assert one["checkpoint"] == four["checkpoint"]


def test_the_processes_are_those_that_were_started_or_the_gpus(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    keys = {"parallel": "fsdp2", "device": "cuda"}
    config = load_config({"train": keys})
    assert memory.num_processes(config) == 3
    assert memory.num_processes(load_config({"train": {"device": "cuda"}})) == 1
    assert memory.num_processes(load_config({"train": keys | {"device": "cpu"}})) == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert memory.num_processes(config) == 8
    words = ["memory", "train.parallel=fsdp2", "train.device=cpu"]
    assert main(words) == 0
    assert "for each of 8 processes" in capsys.readouterr().out
    assert main([*words, "--processes", "2"]) == 0
    assert "for each of 2 processes" in capsys.readouterr().out


def test_a_checkpoint_has_the_size_that_is_told(tmp_path):
    from torchrl_llm import GRPO

    few = {"prompts_per_batch": 2, "max_steps": 1}
    run = GRPO(train=few, eval={"num_prompts": 0}, logging={"samples": None}, folder=tmp_path)
    run.train()
    (folder,) = (tmp_path / "checkpoints").iterdir()
    found = sum(
        (folder / name).stat().st_size
        for name in ("model.safetensors", "trainer_state/state.safetensors")
    )
    told = parts_of(load_config({"train": few}))["checkpoint"].num_bytes
    assert told <= found <= told * 1.1


def test_the_command_prints_each_part_and_the_sums(capsys):
    assert main(["memory", "env.repeats=4", "--prompt-tokens", "100", "train.device=cpu"]) == 0
    said = capsys.readouterr().out
    assert "128 conversations of 106 tokens" in said
    config = load_config({"env": {"repeats": 4}, "train": {"device": "cpu"}})
    for part in parts_of(config).values():
        assert part.name in said
    assert "while it trains" in said
    assert "prompts of 100 tokens" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pico"], "memory is counted for grpo and grpo-async, not for 'pico'"),
        (["optimizer.lrr=1"], "did you mean 'optimizer.lr'?"),
        (["model.name=/no/such/model"], "model.name: there is no model '/no/such/model'"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be at least 1"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--processes", "2"], "--processes has no effect with train.parallel=none"),
        (["train.max_steps=["], "no viable alternative"),
    ],
)
def test_what_cannot_be_counted_is_told_in_a_paragraph(arguments, said, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["memory", *arguments])
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.full
def test_the_table_of_the_documentation_is_what_the_formulas_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import memory_table

    with memory_table.TABLE.open(encoding="utf-8") as file:
        assert list(csv.reader(file)) == memory_table.rows()


def test_the_commands_that_the_documentation_shows_are_answered(tmp_path, capsys):
    Qwen2Config(**QWEN).save_pretrained(tmp_path)
    pages = [*ROOT.glob("docs/source/**/*.rst"), ROOT / "README.rst"]
    texts = [page.read_text().replace("\\\n", "") for page in pages]
    shown = [re.findall(r"^ +torchrl-llm (memory.*)", text, re.M) for text in texts]
    shown = [shlex.split(each) for page in shown for each in page]
    assert len(shown) >= 4
    for words in shown:
        assert main([re.sub(r"^model.name=.*", f"model.name={tmp_path}", w) for w in words]) == 0
        assert "while it trains" in (said := capsys.readouterr().out) or "the trainer" in said

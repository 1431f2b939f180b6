"""Models of a run in its checkpoints: each exactly, in a folder that others open, and once."""

import pytest
import torch
from torch import nn
from torchrl.envs import Transform
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from torchrl_llm._settings import naming
from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.trainers import TrainingRun
from torchrl_llm.trainers.checkpoint import CheckpointStore
from torchrl_llm.trainers.run_config import CheckpointConfig, LoggingConfig
from torchrl_llm.trainers.run_folder import model_folder
from torchrl_llm.trainers.run_models import split_parts

QUIET = LoggingConfig(progress=False)
IDS = torch.tensor([[1, 2, 3, 4]])


def trained(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def take_steps(folder, models, parts=None, *, steps=2, resume="never", **checkpoint):
    """A run that trains all models together; the optimizer's state at its end."""
    parameters = [p for m, _ in models.values() for p in m.parameters() if p.requires_grad]
    parameters += [p for part in (parts or {}).values() for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    run = TrainingRun(
        folder,
        max_steps=steps,
        **(
            {"models": models}
            if "" not in models
            else dict(zip(("model", "tokenizer"), models[""], strict=True))
        ),
        parts={"optimizer": optimizer, **(parts or {})},
        logging=QUIET,
        checkpoint=CheckpointConfig(interval=1, resume=resume, **checkpoint),
    )
    for _ in run.steps():
        loss = sum(model(IDS, labels=IDS).loss for model, _ in models.values())
        loss = loss + sum(
            p.square().sum() for part in (parts or {}).values() for p in part.parameters()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.record({"train/reward": 0.0, "train/tokens_generated": 1})
    return optimizer


def mixtral(seed=0):
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(vocab_size=292, **sizes, **heads)).eval()


def with_lora(make, seed, **settings):
    peft = pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(make(), config)


def frozen_below(make, seed):
    model = make(seed=seed)
    model.model.layers[0].requires_grad_(False)
    return model


KINDS = {
    "plain": lambda make, seed: make(seed=seed),
    "bfloat16": lambda make, seed: make(seed=seed).bfloat16(),
    "tied": lambda make, seed: make(seed=seed, tie_word_embeddings=True),
    "lora": lambda make, seed: with_lora(make, seed),
    "lora with biases and a head": lambda make, seed: with_lora(
        lambda: make(tie_word_embeddings=False), seed, bias="all", modules_to_save=["lm_head"]
    ),
    "frozen below": frozen_below,
    "experts": lambda make, seed: mixtral(seed),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_on_bit_for_bit_and_its_weights_are_stored_once(
    tmp_path, make_tiny_model, tokenizer, kind
):
    def make(seed, **settings):
        return KINDS[kind](make_tiny_model, seed, **settings)

    whole = make(0)
    first = take_steps(tmp_path / "whole", {"": (whole, tokenizer)}, steps=3)
    cut = make(0)
    take_steps(tmp_path / "cut", {"": (cut, tokenizer)}, steps=2, max_shard_size="20KB")
    if kind.startswith(("lora", "frozen")):
        again = make(0)  # what is not trained comes from where it came
    else:
        again = make(1)
    second = take_steps(
        tmp_path / "cut", {"": (again, tokenizer)}, steps=3, resume="auto", max_shard_size="20KB"
    )
    for name, value in trained(whole).items():
        assert torch.equal(trained(again)[name], value), name
    one, other = first.state_dict()["state"], second.state_dict()["state"]
    assert all(torch.equal(one[i][k], other[i][k]) for i in one for k in one[i])
    apart = CheckpointStore(tmp_path / "cut" / "checkpoints").load()["models"][""]["apart"]
    if kind in ("plain", "bfloat16", "tied", "frozen below"):
        assert not apart
    elif kind == "experts":
        assert any("experts" in name for name in apart)
        assert not any("norm" in name for name in apart)
    else:
        assert apart.keys() == trained(whole).keys()


def test_several_models_go_on_each_from_a_folder_of_its_own(
    tmp_path, make_tiny_model, tokenizer, make_tokenizer
):
    def make(seed):
        torch.manual_seed(seed)
        return {
            "actor": (make_tiny_model(seed=seed), tokenizer),
            "critic": (make_tiny_model(seed=seed + 1, hidden_size=32), tokenizer),
        }, {"value_head": nn.Linear(2, 1)}

    whole, one_head = make(0)
    take_steps(tmp_path / "whole", whole, one_head, steps=3)
    take_steps(tmp_path / "cut", *make(0), steps=2)
    again, other_head = make(5)
    take_steps(tmp_path / "cut", again, other_head, steps=3, resume="auto")
    newest = tmp_path / "cut" / "checkpoints" / "step_000003"
    for name, (model, _) in whole.items():
        for key, value in trained(model).items():
            assert torch.equal(trained(again[name][0])[key], value), key
        opened = AutoModelForCausalLM.from_pretrained(newest / name)
        assert torch.equal(opened(IDS).logits, model(IDS).logits)
        assert AutoTokenizer.from_pretrained(newest / name)("1").input_ids
    assert torch.equal(one_head["value_head"].weight, other_head["value_head"].weight)
    with naming("model.name"), pytest.raises(ConfigError, match=r"actor, critic.*/actor"):
        model_folder(tmp_path / "cut")
    assert model_folder(newest / "critic") == newest / "critic"


def test_a_checkpoint_of_another_set_of_models_is_told_by_their_names(
    tmp_path, make_tiny_model, tokenizer
):
    def models(*names):
        return {name: (make_tiny_model(), tokenizer) for name in names}

    take_steps(tmp_path / "two", models("actor", "critic"), steps=1)
    take_steps(tmp_path / "one", models(""), steps=1)
    for folder, others, said in (
        (
            "two",
            ("actor", "judge"),
            "holds the models actor, critic, .* trains the models actor, judge",
        ),
        ("two", ("",), "holds the models actor, critic, .* trains one model without a name"),
        ("one", ("actor",), "holds one model without a name, .* trains the models actor"),
    ):
        with pytest.raises(CheckpointError, match=said):
            take_steps(tmp_path / folder, models(*others), steps=2, resume="auto")
    with pytest.raises(CheckpointError, match=r"parts: it has optimizer, .*optimizer, value_head"):
        take_steps(
            tmp_path / "one", models(""), {"value_head": nn.Linear(1, 1)}, steps=2, resume="auto"
        )
    larger = {"": (make_tiny_model(hidden_size=32), tokenizer)}
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight has the shape .* another model"
    ):
        take_steps(tmp_path / "one", larger, steps=2, resume="auto")
    deeper = {"": (make_tiny_model(num_hidden_layers=3), tokenizer)}
    with pytest.raises(CheckpointError, match=r"written by another model.*layers\.2"):
        take_steps(tmp_path / "one", deeper, steps=2, resume="auto")


def test_models_that_no_checkpoint_could_hold_are_refused(tmp_path, make_tiny_model, tokenizer):
    pair = (make_tiny_model(), tokenizer)
    for names in ([], ["a", ""], ["../a"], ["a/b"], ["adapter"], ["trainer_state"], [".a"]):
        with pytest.raises(ConfigError, match=r"named by letters, digits"):
            TrainingRun(tmp_path, max_steps=1, models=dict.fromkeys(names, pair), parts={})
    for both in ({}, {"model": pair[0], "models": {"a": pair}}):
        with pytest.raises(ConfigError, match=r"either model=... or models="):
            TrainingRun(tmp_path, max_steps=1, parts={}, **both)
    with pytest.raises(ConfigError, match=r"checkpoint.push_to_hub pushes one model"):
        TrainingRun(
            tmp_path,
            max_steps=1,
            models={"a": pair},
            parts={},
            checkpoint=CheckpointConfig(push_to_hub="a/b"),
        )
    with pytest.raises(ConfigError, match=r"checkpoint.max_shard_size: a size is"):
        CheckpointConfig(max_shard_size="much")


def test_a_shard_that_is_missing_or_altered_costs_some_steps_and_is_told(
    tmp_path, make_tiny_model, tokenizer, capsys
):
    take_steps(tmp_path, {"": (make_tiny_model(), tokenizer)}, max_shard_size="20KB", keep_last=3)
    checkpoints = tmp_path / "checkpoints"
    shard = sorted((checkpoints / "step_000002").glob("model-*.safetensors"))[1]
    shard.unlink()
    shard = sorted((checkpoints / "step_000001").glob("model-*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"No such file.*the checksum of {shard} is wrong"):
        take_steps(tmp_path, {"": (make_tiny_model(), tokenizer)}, resume="auto")


def test_a_transform_is_of_the_rank_whose_rows_it_has_seen_and_a_head_of_all():
    shared, own = split_parts({"head": torch.nn.Linear(1, 1), "prompts": Transform()})
    assert (list(shared), list(own)) == (["head"], ["prompts"])

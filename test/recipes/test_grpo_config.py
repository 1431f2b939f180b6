"""The files of sota-implementations/grpo/config: what they hold and how they compose."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from recipes.grpo_helper import check_typed

from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.recipes import AdvantageConfig, LossConfig
from torchrl_llm.recipes.builders import devices, reference_device
from torchrl_llm.recipes.ray_collection import of_collectors
from torchrl_llm.trainers import AsyncGRPOConfig, GRPOConfig, load_config

FOLDER = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "config"
SCHEMAS = {"grpo": GRPOConfig, "grpo-async": AsyncGRPOConfig}
GROUPS = {"loss": LossConfig, "advantage": AdvantageConfig}
# A critic is trained by the one towards what the other writes.
PARTNER = {"ppo": ["advantage=gae"], "gae": ["loss=ppo"]}
CASES = [(group, name) for group, component in GROUPS.items() for name in component.variants]


class Actor(TokenScorer):
    def token_scores(self, *args, **kwargs):
        raise AssertionError("nothing is scored here")


@pytest.fixture(scope="module", autouse=True)
def hydra():
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        yield


def loaded(*overrides):
    """As from the command line, without Hydra's half second and the values of the files."""
    keys = [f"{o.partition('=')[0]}.type={o.partition('=')[2]}" for o in overrides if "." not in o]
    return load_config(OmegaConf.from_dotlist([*keys, *(o for o in overrides if "." in o)]))


def composed(*overrides):
    return compose("grpo", check_typed(*overrides))


@pytest.mark.parametrize("group", GROUPS)
def test_every_class_has_a_file_and_every_file_a_class(group):
    names = {path.stem for path in (FOLDER / group).glob("*.yaml")} - {"shared"}
    assert names == set(GROUPS[group].variants)
    # Hydra offers what the files share as well; it would be the default under another name.
    with pytest.raises(ConfigError, match=f"{group}.type must be one of .* got 'shared'"):
        load_config(composed(f"{group}=shared"))


def test_a_key_of_the_other_recipe_says_whose_it_is():
    with pytest.raises(ConfigError, match=r"'ray.num_collectors': a key of grpo-async.py"):
        check_typed("ray.num_collectors=2")
    with pytest.raises(ConfigError, match=r"'train.max_policy_age': a key of grpo-async.py"):
        load_config({"train": {"max_policy_age": 1}})
    with pytest.raises(ConfigError, match=r"'weight_sync.fingerprint': a key of grpo-sync.py"):
        check_typed("weight_sync.fingerprint=false", name="grpo-async")
    with pytest.raises(ConfigError, match=r"renamed to 'ray.num_collectors'"):
        check_typed("inference_model.num_replicas=2", name="grpo-async")


IMPOSSIBLE_ENGINES = [
    (["inference_model.num_devices=2"], "num_devices has no effect with inference_model.back"),
    (["inference_model.enforce_eager=true"], "enforce_eager has no effect with"),
    (["weight_sync.type=load"], "weight_sync has no effect with inference_model.backend=trans"),
    (["inference_model.backend=vllm", "inference_model.num_devices=0"], "at least 1"),
    (["inference_model.backend=vllm", "inference_model.gpu_memory_utilization=2"], "in \\(0,"),
    (["inference_model.backend=vllm", "inference_model.max_model_len=32"], "leaves no room"),
    (["inference_model.backend=vllm", "weight_sync.type=adapter"], "needs train_model.lora"),
    (["inference_model.backend=vllm", "weight_sync.type=files"], "goes with weight_sync.type=fil"),
    (["inference_model.backend=vllm", "weight_sync.folder=/x"], "goes with weight_sync.type=files"),
    (
        [
            "inference_model.backend=vllm",
            "weight_sync.type=shared",
            "train_model.lora.enabled=true",
        ],
        "weight_sync.type=shared is for training without LoRA",
    ),
    (
        [
            "inference_model.backend=vllm",
            "weight_sync.type=shared",
            "inference_model.num_devices=2",
        ],
        "num_devices=2 spreads the engine over processes.*choose load or delta",
    ),
]


def test_engines_and_weights_that_are_impossible_are_refused():
    for overrides, message in IMPOSSIBLE_ENGINES:
        with pytest.raises(ConfigError, match=message):
            loaded(*overrides)


ON_GPUS = ["inference_model.backend=vllm", "ray.gpus_per_collector=1"]
IMPOSSIBLE_ASYNC = [
    (["train.max_policy_age=-1"], "must be at least 0"),
    (["train.on_stale=skip"], "must be one of 'wait', 'drop', 'mask'"),
    (["train.weight_update_frequency=0"], "at least 1"),
    (["ray.num_collectors=0"], "at least 1"),
    (["ray.num_collectors=3"], "prompts_per_batch=16 is not a multiple of ray.num_collectors"),
    (["ray.prompts_per_claim=5"], "prompts_per_batch=16 is not a multiple of ray.prompts_per_"),
    (["ray.timeout_s=0"], "above 0"),
    (["ray.address=auto", "ray.num_cpus=2"], "ray.num_cpus has no effect with ray.address"),
    (["train_model.num_devices=2"], "must be 0 or 1"),
    (["ref_model.num_devices=1"], "has no effect without train.kl_to_ref_coeff"),
    (
        [
            "ref_model.num_devices=1",
            "train.kl_to_ref_coeff=0.1",
            "train_model.lora.enabled=true",
        ],
        "ref_model.num_devices has no effect with LoRA",
    ),
    (["weight_sync.in_flight=keep"], "needs inference_model.backend=vllm"),
    (["advantage.type=spo"], "grpo-sync.py has it"),
    (["weight_sync.type=load"], "must be one of 'ray', 'files', 'nccl', 'ipc'"),
    (["weight_sync.type=files"], "goes with weight_sync.type=files"),
    (["weight_sync.type=nccl", "inference_model.backend=vllm"], "it needs GPUs"),
    (["weight_sync.type=ipc", "ray.gpus_per_collector=1"], "and inference_model.backend=vllm"),
    (["weight_sync.type=ipc", *ON_GPUS], "ipc processes that share its GPU"),
    (["weight_sync.type=nccl", *ON_GPUS, "train_model.num_devices=0"], "nccl joins the trainer's"),
    (
        [
            "weight_sync.type=ipc",
            *ON_GPUS,
            "train_model.num_devices=0",
            "train.parallel=ddp",
        ],
        "collectors share the GPU of one rank",
    ),
]


def test_asynchronous_settings_that_are_impossible_are_refused():
    for overrides, message in IMPOSSIBLE_ASYNC:
        with pytest.raises(ConfigError, match=message):
            load_config(OmegaConf.from_dotlist(overrides), AsyncGRPOConfig)


@pytest.mark.parametrize(("type_", "own_gpus"), [("nccl", 1), ("ipc", 0)])
def test_weights_go_from_gpu_to_gpu_where_there_are_gpus(type_, own_gpus):
    given = [f"weight_sync.type={type_}", *ON_GPUS, f"train_model.num_devices={own_gpus}"]
    assert load_config(OmegaConf.from_dotlist(given), AsyncGRPOConfig).weight_sync.type == type_


def test_collectors_have_neither_the_trainers_gpu_nor_its_adapters():
    values = {"train": {"device": "cuda:1"}, "train_model": {"lora": {"enabled": True}}}
    config = load_config(values, AsyncGRPOConfig)
    sent = of_collectors(config, device="auto")
    assert (sent.train.device, sent.train_model.lora.enabled) == ("auto", False)
    assert (sent.rows_per_batch, config.train.device) == (64, "cuda:1")
    sent = of_collectors(config, device="cpu")
    assert sent.train.device == "cpu"
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        (["train.device=cuda:2"], "0,1,3"),
        (["train.device=cuda"], "1,2,3"),
        (["train.device=cuda:1", "ref_model.num_devices=1", "train.kl_to_ref_coeff=0.1"], "0,3"),
        (["train.device=cuda:1", "train_model.num_devices=0"], None),
        (["train.device=cpu"], None),
    ],
)
def test_the_gpus_of_policy_and_reference_are_hidden_from_the_collectors(
    overrides, left, monkeypatch
):
    from torchrl_llm.recipes.ray_collection import _visible_gpus

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = lambda name, key: torch.device("cuda" if name == "auto" else name)  # noqa: E731
    monkeypatch.setattr(devices, "present_device", there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    values = OmegaConf.from_dotlist([*overrides, "ray.gpus_per_collector=0.5"])
    with _visible_gpus(load_config(values, AsyncGRPOConfig)):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_reference_on_a_gpu_that_is_not_there_is_refused():
    values = {"ref_model": {"num_devices": 1}, "train": {"device": "cpu", "kl_to_ref_coeff": 0.1}}
    with pytest.raises(ResourceError, match="needs a GPU beside the policy's, 2 in all"):
        reference_device(load_config(values, AsyncGRPOConfig))


def test_collectors_take_equal_shares_of_a_step_in_whole_groups():
    config = load_config({"ray": {"num_collectors": 4}}, AsyncGRPOConfig)
    assert config.rows_per_claim == 4 * 8
    config = load_config({"ray": {"prompts_per_claim": 16, "num_collectors": 3}}, AsyncGRPOConfig)
    assert config.rows_per_claim == 16 * 8
    assert config.train.staleness.max_policy_age == 1


def test_any_loss_goes_with_any_rule_of_credit_and_the_critic_s_with_each_other():
    for loss in LossConfig.variants:
        for advantage in AdvantageConfig.variants:
            values = {"loss": {"type": loss}, "advantage": {"type": advantage}}
            if (loss == "ppo") != (advantage == "gae"):
                with pytest.raises(ConfigError, match=f"loss={loss} does not go with advantage="):
                    load_config(values)
                continue
            config = load_config(values)
            assert config.build_loss(Actor()).masking_strategy == "rlhf"
            group = config.env.repeats if config.advantage.compares_group else 1
            assert config.build_credit().group_size == group


def test_rules_without_groups_refuse_filters_of_groups():
    for advantage in ("monte_carlo", "batch", "spo"):
        with pytest.raises(ConfigError, match=r"filter\.zero_variance has no effect"):
            loaded(f"advantage={advantage}", "filter.zero_variance=drop")
        with pytest.raises(ConfigError, match=r"filter\.return_bounds has no effect"):
            loaded(f"advantage={advantage}", "filter.return_bounds=[0,1]")
    config = loaded("advantage=batch", "advantage.baseline=group", "filter.zero_variance=drop")
    assert not config.build_credit().keep_zero_variance


def test_keys_of_the_chosen_loss_reach_it():
    config = load_config(composed("loss=gspo", "loss.clip_epsilon=[0.1,0.2]"))
    assert config.build_loss(Actor()).clip_epsilon == (0.1, 0.2)
    assert config.build_loss(Actor()).aggregation == "sequence_mean"
    config = load_config(composed("loss=dr_grpo", "inference_model.max_tokens=48"))
    assert config.build_loss(Actor()).constant_length == 48
    config = load_config(composed("loss=dr_grpo", "loss.constant_length=7"))
    assert config.build_loss(Actor()).constant_length == 7


MISTYPED = [
    (["loss=gspo", "loss.tau_pos=2"], r"loss\.tau_pos has no effect with loss=gspo.*sapo"),
    (["loss.level=token"], r"loss\.level has no effect with loss=grpo.*reinforce"),
    (["loss.type=gspo"], r"choose it with its settings, loss=gspo"),
    (["advantage.gamma=1"], r"advantage\.gamma has no effect with advantage=group.*gae"),
    (["advantage.gama=1"], r"unknown key 'advantage\.gama'.*'advantage\.gamma'"),
]


def test_a_mistake_on_the_command_line_is_named_before_hydra_sees_it():
    for overrides, message in MISTYPED:
        with pytest.raises(ConfigError, match=message):
            check_typed(*overrides)


IMPOSSIBLE = [
    (["loss.aggregation=none"], "nothing to call backward on"),
    (["loss.constant_length=3"], "loss=grpo: constant_length belongs to aggregation"),
    (["loss=reinforce", "loss.truncation=-1"], "loss=reinforce: truncation must be above 0"),
    (["loss=ppo", "advantage=gae", "advantage.gamma=2"], "advantage=gae: gamma must be in"),
    (["correction.bounds=[0,2]"], "correction: bounds have no effect with type='none'"),
    (["correction.type=icepop", "correction.level=sequence"], "correction: level='sequence'"),
    (["correction.type=tis", "correction.bounds=[2,1]"], "correction: bounds must be"),
    (["reward.overlong_cache=32"], "must be below inference_model.max_tokens=32"),
    (["reward.overlong_cache=0"], "at least 1 or null"),
    (["reward.kl_target=6"], "no effect without reward.kl_coeff"),
    (["reward.kl_horizon=5"], "no effect without reward.kl_target"),
    (["reward.kl_reduction=mean"], "no effect without reward.kl_coeff"),
    (["reward.kl_coeff=-1"], "must be at least 0"),
    (["reward.kl_coeff=0.1", "reward.kl_target=0"], "must be above 0"),
    (["env.repeats=0"], "env.repeats must be at least 1"),
    (["env.repeats=1", "advantage=hybrid"], "at least 2 for advantage=hybrid"),
    (["inference_model.top_p=0"], r"inference_model: top_p"),
    (["ref_model.name=x"], "no effect without train.kl_to_ref_coeff or reward.kl_coeff"),
]


def test_settings_that_are_impossible_or_without_effect_are_refused():
    for overrides, message in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=message):
            loaded(*overrides)


def test_the_trainers_own_log_probs_are_kept_where_a_correction_needs_them():
    # One update a batch: the policy that the loss scores is still the one before the update.
    config = loaded("correction.type=tis")
    assert not config.stores_proximal
    assert config.build_loss(Actor()).correction.proximal == "current"
    for more in ("train.epochs=2", "train.optim_batch_size=64"):
        config = loaded("correction.type=mis", more)
        assert config.stores_proximal
        assert config.build_loss(Actor()).correction.proximal == "stored"
        assert not loaded(more).stores_proximal
    assert loaded().build_loss(Actor()).correction is None
    masked = loaded("correction.sequence_bounds=[0.5,2.0]")
    assert masked.build_loss(Actor()).correction.sequence_bounds == (0.5, 2.0)


def test_the_commands_of_the_how_to_are_valid():
    page = Path(__file__).parents[2] / "docs" / "source" / "howto" / "choose_an_algorithm.rst"
    text = page.read_text()
    commands = [line.split()[3:] for line in text.splitlines() if "  torchrl-llm train" in line]
    # Cells of the tables, which may go over two lines.
    cells = re.findall(r"^     - ``((?:loss|advantage)=[^`]*)``", text, re.MULTILINE)
    commands += [cell.replace("...", "2").split() for cell in cells]
    assert len(commands) > 14
    for command in commands:
        check_typed(*command)
        loaded(*command)

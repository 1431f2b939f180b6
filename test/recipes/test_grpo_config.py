"""The files of sota-implementations/grpo/config: what they hold and how they compose."""

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
    with pytest.raises(ConfigError, match=f"{group}=shared: There are "):
        check_typed(f"{group}=shared")
    with pytest.raises(ConfigError, match=f"{group}.type must be one of .* got 'shared'"):
        load_config(compose("grpo", [f"{group}=shared"]))


def test_a_key_of_the_other_recipe_says_whose_it_is():
    with pytest.raises(ConfigError, match=r"'ray.num_collectors': a key of grpo-async.py"):
        check_typed("ray.num_collectors=2")
    with pytest.raises(ConfigError, match=r"'train.max_policy_age': a key of grpo-async.py"):
        load_config({"train": {"max_policy_age": 1}})
    with pytest.raises(ConfigError, match=r"'weight_sync.fingerprint': a key of grpo-sync.py"):
        check_typed("weight_sync.fingerprint=false", name="grpo-async")
    with pytest.raises(ConfigError, match=r"renamed to 'ray.num_collectors'"):
        check_typed("inference_model.num_replicas=2", name="grpo-async")


ON_GPUS = ["inference_model.backend=vllm", "ray.gpus_per_collector=1"]


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
            if loss == "online_dpo" and advantage != "best_worst":
                with pytest.raises(ConfigError, match="choose advantage=best_worst"):
                    load_config(values)
                continue
            if (loss == "ppo") != (advantage == "gae"):
                with pytest.raises(ConfigError, match=f"loss={loss} does not go with advantage="):
                    load_config(values)
                continue
            config = load_config(values)
            built = config.build_loss(Actor())
            assert loss == "online_dpo" or built.masking_strategy == "rlhf"
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

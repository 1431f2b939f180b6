from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from recipes.grpo_helper import check_typed

from torchrl_llm._settings import convert
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import RENAMED, AsyncGRPOConfig, GRPOConfig, load_config
from torchrl_llm.recipes.strict_config import from_mapping, valid_keys


def test_the_defaults_are_a_valid_configuration():
    assert load_config({}) == GRPOConfig()
    assert load_config(asdict(GRPOConfig())) == GRPOConfig()


def test_defect_20_a_mistyped_key_is_never_accepted_silently():
    with pytest.raises(ConfigError, match=r"loss\.clip_epsilon"):
        load_config({"loss": {"clip_epsilom": 0.1}})
    with pytest.raises(ConfigError, match=r"advantage\.gamma"):
        load_config({"loss": {"gamma": 0.9}})


def test_every_renamed_key_is_really_gone_and_its_new_name_exists_or_says_removed():
    keys, elsewhere = set(valid_keys(GRPOConfig)), set(valid_keys(AsyncGRPOConfig))
    for old, new in RENAMED.items():
        assert old not in keys
        assert new in keys | elsewhere or new.startswith("removed: "), new


def test_numbers_that_yaml_reads_as_text_or_integer_become_floats():
    # YAML 1.1 takes 1e-5 for a text, for it lacks the point.
    config = load_config({"optimizer": {"lr": "1e-5", "clip_grad_norm": 1}})
    assert config.optimizer.lr == 1e-5
    assert isinstance(config.optimizer.clip_grad_norm, float)


def test_optimizer_steps_count_epochs_and_minibatches():
    # 16 prompts x 8 = 128 responses, 4 optimizer steps of 32 each, 2 epochs, 100 steps.
    config = load_config({"train": {"optim_batch_size": 32, "epochs": 2}})
    assert config.num_updates == 100 * 2 * 4


def test_overrides_are_checked_before_hydra_sees_them():
    check_typed("env=gsm8k", "train.max_steps=3", "hydra/job_logging=none", "--cfg", "job", "-m")
    check_typed("+optimizer.lr=3", "++seed=1", "~train")
    with pytest.raises(ConfigError, match=r"'optimizer.learnin_rate'.*'optimizer\.lr'"):
        check_typed("optimizer.learnin_rate=3")
    with pytest.raises(ConfigError, match=r"renamed to 'train\.max_steps'"):
        check_typed("+train.total_dialog_turns=100")


def test_an_argument_of_a_class_that_another_group_configures_is_named_there():
    # The nearest key of its own group would do something else.
    for old, new in (
        ("loss.kl_to_ref_coeff", "train.kl_to_ref_coeff"),
        ("loss.reduction", "loss.aggregation"),
        ("advantage.grpo_size", "env.repeats"),
        ("advantage.keep_zero_variance", "filter.zero_variance"),
        ("advantage.truncated", "filter.truncated"),
    ):
        with pytest.raises(ConfigError, match=f"{old}.*{new}"):
            check_typed(f"{old}=1")


def test_a_dictconfig_is_a_mapping_like_any_other():
    omegaconf = pytest.importorskip("omegaconf")
    values = omegaconf.OmegaConf.create({"optimizer": {"betas": [0.9, 0.99], "lr": 1}})
    assert load_config(values).optimizer.betas == (0.9, 0.99)


def test_schemas_of_other_recipes_use_the_same_machinery():
    from dataclasses import make_dataclass

    schema = make_dataclass("Schema", [("epochs", int, 1)])
    assert from_mapping(schema, {"epochs": 2}).epochs == 2
    with pytest.raises(ConfigError, match="'epochs'"):
        from_mapping(schema, {"epoch": 2})


@dataclass
class Inner:
    size: int = 1


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Path, Path("x")), (Path | None, None), (Callable, len), (Callable[[str], int], len),
        (Mapping[str, int], {"a": 1}), (Sequence[str], ("a",)), (set[str], {"a"}),
        (dict, {"a": 1}), (typing.Dict, {"a": 1}), (dict[int, str], {1: "a"}),  # noqa: UP006
        (Literal[True, False], True), (Any, (1, 2)), (Inner, Inner(3)), (object, Inner(3)),
    ],
)  # fmt: skip
def test_a_schema_of_ones_own_may_have_any_type(hint, value):
    schema = make_dataclass("Schema", [("it", hint)])
    assert from_mapping(schema, {"it": value}).it == value


@pytest.mark.parametrize("hint", [int, list[int], Literal["a"], str])
@pytest.mark.parametrize("value", [{"api_key": "sk-1"}, [{"api_key": "sk-1"}]])
def test_what_a_mapping_holds_is_not_shown(hint, value):
    with pytest.raises(ConfigError) as told:
        convert(value, hint, "it")
    assert "sk-1" not in str(told.value)

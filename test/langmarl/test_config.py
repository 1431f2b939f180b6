"""Configurations: defaults of the seed, files, overrides, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from langmarl.world import settings

from torchrl_llm import _registry
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import make_trainer
from torchrl_llm.langmarl.config import (
    BaseConfig,
    LanguageTaskConfig,
    OvercookedConfig,
    PistonballConfig,
    load_config,
)
from torchrl_llm.langmarl.environment import BaseEnvironment, list_envs, register_env
from torchrl_llm.langmarl.llm_config import LLMConfig
from torchrl_llm.recipes.flat_settings import parse_overrides

SECRET = "sk-very-secret-0123"
BASE = {
    "exp_name": "experiment", "paradigm": "central_credit", "num_iterations": 5,
    "trajectories_per_iteration": 10, "mini_batch_size": None, "start_iteration": 0, "llm": None,
    "actor_llm": None, "critic_llm": None, "optimizer_llm": None, "num_agents": 2,
    "experiment_dir": "./experiments", "checkpoint_dir": "./ckpt_policy", "max_workers": 5,
    "log_level": "INFO",
}  # fmt: skip
OURS = {
    "env": "language", "seed": 0, "run_name": None, "resume": "latest", "update": "feedback",
    "accept": "always", "validation_fraction": 0.0, "max_policy_chars": None, "judge_llm": None,
    "edited_policies": "refuse",
    "max_calls": None, "max_total_tokens": None, "max_cost_usd": None, "prompts_dir": None,
}  # fmt: skip
LANGUAGE = {
    "task_type": "qa", "benchmark_path": "", "data_limit": None, "use_verified_reward": False,
    "episode_generation_workers": 8, "optimizer_workers": 1, "code_timeout": 10.0,
}  # fmt: skip
OVERCOOKED = {
    "layout": "cramped_room", "episode_horizon": 400, "p0_agent": "ProAgent",
    "p1_agent": "ProAgent",
}  # fmt: skip
PISTONBALL = {"num_pistons": 20, "max_cycles": 125, "frame_size": 84, "action_mode": "discrete"}


def written(folder, **values):
    path = folder / "run.json"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def registered(monkeypatch):
    """A fresh registry, so that a test leaves no environment behind."""
    list_envs()  # loads ours
    own = dict(_registry._entries["environments"])
    monkeypatch.setitem(_registry._entries, "environments", own)


def an_env(name, config_class=None):
    @register_env(name)
    class Mine(BaseEnvironment):
        CONFIG_CLASS = config_class

        def reset(self, task):
            return {}

        def step(self, agent_id, action):
            return "", 0.0, True, {}

        def collect_trajectory(self, policies, task):
            raise NotImplementedError


# -- defaults -----------------------------------------------------------------------------------


def test_no_name_of_ours_can_be_taken_though_ours_was_not_imported_yet(registered, monkeypatch):
    ours = dict(_registry._entries["environments"])
    monkeypatch.setitem(_registry._entries, "environments", {})
    monkeypatch.setattr(_registry, "_load", lambda kind: _registry._entries[kind].update(ours))
    with pytest.raises(ConfigError, match="'language' among the environments already"):
        an_env("language")


@pytest.mark.parametrize("name", ["", "mine:v2", None])
def test_an_environment_needs_a_name_that_a_configuration_can_say(name, registered):
    with pytest.raises(ConfigError, match="an environment needs a name without ':'"):
        an_env(name)


@pytest.mark.parametrize(
    ("made", "defaults"),
    [
        (BaseConfig, BASE | OURS),
        (LanguageTaskConfig, BASE | OURS | LANGUAGE),
        (OvercookedConfig, BASE | OURS | OVERCOOKED | {"env": "overcooked"}),
        (PistonballConfig, BASE | OURS | PISTONBALL | {"env": "pistonball", "num_agents": 20}),
    ],
)
def test_keys_and_defaults_are_those_of_the_seed_and_ours(made, defaults):
    assert dataclasses.asdict(made()) == defaults


# -- models of the roles ------------------------------------------------------------------------


def test_each_role_has_its_own_model_or_that_of_all():
    models = {
        name: LLMConfig(name, "m")
        for name in ("llm", "actor_llm", "critic_llm", "optimizer_llm", "judge_llm")
    }
    roles = ("actor", "critic", "optimizer", "judge")

    def found(config):
        return [getattr(config, f"get_{role}_llm")().name for role in roles]

    everyone = models.pop("llm")
    assert found(BaseConfig(**models)) == [f"{role}_llm" for role in roles]
    assert found(BaseConfig(llm=everyone)) == ["llm"] * 4
    del models["optimizer_llm"]
    names = ["actor_llm", "critic_llm", "llm", "judge_llm"]
    assert found(BaseConfig(llm=everyone, **models)) == names


def test_a_model_of_all_that_nobody_is_left_for_is_refused():
    roles = {f"{role}_llm": LLMConfig(role, "m") for role in ("actor", "critic", "optimizer")}
    with pytest.raises(ConfigError, match="llm has no effect: actor_llm, critic_llm and optimizer"):
        BaseConfig(llm={"model_string": "local:"}, **roles)
    config = Path(__file__).parents[2] / "sota-implementations/langmarl/config"
    with pytest.raises(ConfigError, match="llm has no effect"):
        load_config(config / "qa_central_credit.json", {"llm": {"model_string": "local:"}})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"task_type": "qa", "judge_llm": "gpt-4o"}, "judge_llm.*qa without use_verified_reward"),
        ({"task_type": "coding", "judge_llm": "gpt-4o"}, "judge_llm has no effect on .*coding$"),
        ({"task_type": "coding", "use_verified_reward": True}, "coding is scored by its tests"),
        ({"task_type": "writing", "use_verified_reward": True}, "writing is always judged"),
    ],
)
def test_a_judge_who_has_nothing_to_judge_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        LanguageTaskConfig(**given)
    fits = {"qa": {"use_verified_reward": True}, "writing": {}}
    for kind, more in fits.items():
        assert LanguageTaskConfig(task_type=kind, judge_llm="gpt-4o", **more).judge_llm is not None


def test_settings_that_nothing_reads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="code_timeout has no effect on task_type=qa"):
        LanguageTaskConfig(code_timeout=3.0)
    local = {"model_string": "local:", "base_url": "http://localhost:1/v1"}
    with pytest.raises(ConfigError, match="base_url has no effect on 'local:'"):
        make_trainer(load_config(written(tmp_path, **settings(tmp_path, actor_llm=local))))
    warm = {"model_string": "local:", "extra_params": {"temperature": "warm"}}
    with pytest.raises(ConfigError, match=r'extra_params=\{"temperature": "warm"\}: could not'):
        make_trainer(load_config(written(tmp_path, **settings(tmp_path, actor_llm=warm))))
    (tmp_path / "notes.txt").write_text("Be kind.")
    with pytest.raises(ConfigError, match=r"prompts_dir=.* it holds none of aggregate.txt, "):
        make_trainer(load_config(written(tmp_path, **settings(tmp_path, prompts_dir="."))))


def test_the_judge_is_the_critic_before_it_is_the_model_of_all_and_never_the_actor():
    actor, critic, both = (LLMConfig(name, "m") for name in ("actor", "critic", "all"))
    assert BaseConfig(critic_llm=critic, llm=both).get_judge_llm() is critic
    with pytest.raises(ConfigError, match="judge_llm"):
        BaseConfig(actor_llm=actor).get_judge_llm()


@pytest.mark.parametrize("role", ["actor", "critic", "optimizer", "judge"])
def test_a_role_without_a_model_is_an_error_that_names_both_keys(role):
    with pytest.raises(ConfigError, match=rf"{role}_llm or .*llm"):
        getattr(BaseConfig(), f"get_{role}_llm")()


def test_models_in_a_file_are_presets_dicts_or_presets_with_other_values(tmp_path):
    found = BaseConfig.from_json(
        written(
            tmp_path,
            llm="gpt-4o-mini",
            actor_llm={"model_string": "local:"},
            critic_llm={"preset": "gpt-4o", "max_tokens": 9},
        ),
        {"judge_llm": "gpt-4.1"},
    )
    assert found.llm == LLMConfig.from_preset("gpt-4o-mini")
    assert found.actor_llm == LLMConfig("local:", "local:", max_tokens=256)
    assert found.critic_llm == dataclasses.replace(LLMConfig.from_preset("gpt-4o"), max_tokens=9)
    assert found.judge_llm == LLMConfig.from_preset("gpt-4.1")


def test_what_is_wrong_with_a_model_names_its_key_and_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"critic_llm: .*'gpt-4o-mni'.*'gpt-4o-mini'"):
        load_config(written(tmp_path, critic_llm="gpt-4o-mni"))
    with pytest.raises(ConfigError, match=r"llm: .*'max_tokns'.*'max_tokens'"):
        load_config(written(tmp_path, llm={"model_string": "m", "max_tokns": 1}))


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        BaseConfig(seed=3, llm=LLMConfig("n", "m", extra_params={"top_p": 0.5})),
        LanguageTaskConfig(task_type="math", num_agents=3, data_limit=-1, max_cost_usd=0.0),
        OvercookedConfig(p1_agent="Greedy"),
        PistonballConfig(num_pistons=5),
    ],
)
def test_a_configuration_that_is_written_is_read_back(config, tmp_path):
    path = tmp_path / "out.json"
    config.to_json(path)
    assert type(config).from_json(path) == config


def test_a_written_configuration_has_no_key_of_a_server(tmp_path):
    path = tmp_path / "out.json"
    config = BaseConfig(
        **{
            name: LLMConfig("n", "m", "https://x.org/v1", api_key=f"{SECRET}-{name}")
            for name in ("actor_llm", "critic_llm", "optimizer_llm", "judge_llm")
        }
    )
    config.to_json(path)
    assert SECRET not in path.read_text()
    assert SECRET not in json.dumps(config.to_dict()) + repr(config)
    assert json.loads(path.read_text())["judge_llm"]["api_key"] is None
    assert config.get_judge_llm().get_api_key() == f"{SECRET}-judge_llm"


def test_a_written_configuration_has_no_password_of_an_address(tmp_path):
    path = tmp_path / "out.json"
    BaseConfig(llm=LLMConfig("n", "m", f"https://me:{SECRET}@x.org/v1")).to_json(path)
    assert SECRET not in path.read_text()
    assert json.loads(path.read_text())["llm"]["base_url"] == "https://me:***@x.org/v1"


def test_a_written_configuration_has_no_secret_of_a_request(tmp_path):
    extra = {"api_key": SECRET, "extra_headers": {"Authorization": SECRET}, "top_p": 0.5}
    extra |= {"token": SECRET, "extra_body": {"password": SECRET, "hf_token": SECRET}}
    BaseConfig(llm=LLMConfig("n", "m", extra_params=extra)).to_json(tmp_path / "out.json")
    assert SECRET not in (tmp_path / "out.json").read_text()
    assert '"top_p": 0.5' in (tmp_path / "out.json").read_text()


def test_overrides_replace_values_of_the_file(tmp_path):
    path = written(tmp_path, num_iterations=7, exp_name="a")
    assert load_config(path).num_iterations == 7
    found = load_config(path, {"num_iterations": 2, "paradigm": "central_global"})
    assert (found.num_iterations, found.paradigm, found.exp_name) == (2, "central_global", "a")


@pytest.mark.parametrize(
    ("env", "made"),
    [
        ("language", LanguageTaskConfig),
        ("overcooked", OvercookedConfig),
        ("pistonball", PistonballConfig),
    ],
)
def test_the_environment_of_a_file_picks_the_class(env, made, tmp_path):
    found = load_config(written(tmp_path, env=env))
    assert (type(found), found.env) == (made, env)
    assert type(load_config(written(tmp_path))) is LanguageTaskConfig


def test_an_override_of_the_environment_counts(tmp_path):
    path = written(tmp_path, env="language", num_agents=5)
    found = load_config(path, {"env": "pistonball", "num_pistons": 5})
    assert (type(found), found.env, found.num_pistons) == (PistonballConfig, "pistonball", 5)


def test_an_environment_of_the_users_brings_its_class_or_gets_the_base(tmp_path, registered):
    @dataclasses.dataclass(kw_only=True)
    class MazeConfig(BaseConfig):
        walls: list[str] = dataclasses.field(default_factory=list)
        shape: Literal["round", "square"] = "round"
        options: dict[str, Any] = dataclasses.field(default_factory=dict)
        key: str = dataclasses.field(default="hidden", repr=False)

    an_env("maze", MazeConfig)
    an_env("plain")
    bare = load_config(written(tmp_path, env="maze"))
    assert (bare.walls, bare.shape, bare.options, bare.key) == ([], "round", {}, "hidden")
    assert "hidden" not in repr(bare)
    assert bare.walls is not MazeConfig(env="maze").walls
    given = {"walls": ["north"], "shape": "square", "options": {"deep": [1]}}
    found = load_config(written(tmp_path, env="maze", **given))
    assert {key: getattr(found, key) for key in given} == given
    for wrong in ({"walls": "north"}, {"shape": "oval"}, {"options": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            load_config(written(tmp_path, env="maze", **wrong))
    assert type(load_config(written(tmp_path, env="plain"))) is BaseConfig


@pytest.mark.parametrize("name", ["langage", 5, None, ["language"]])
def test_an_unknown_environment_is_refused_with_those_there_are(name, tmp_path):
    with pytest.raises(
        ConfigError, match=r"calculator, .*language, overcooked, pistonball"
    ) as told:
        load_config(written(tmp_path, env=name))
    assert name != "langage" or "did you mean 'language'" in str(told.value)


def test_an_unknown_key_is_refused_with_the_nearest_in_file_and_overrides(tmp_path):
    with pytest.raises(ConfigError, match=r"'num_iteration'.*'num_iterations'"):
        load_config(written(tmp_path, num_iteration=3))
    with pytest.raises(ConfigError, match=r"'paradime'.*'paradigm'"):
        load_config(written(tmp_path), {"paradime": "central_credit"})


def test_a_key_of_another_environment_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_pistons"):
        load_config(written(tmp_path, env="language", num_pistons=4))


@pytest.mark.parametrize("text", ["{", "[]", "3", "\ufeff{}"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(text, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.json"):
        load_config(path)


def test_a_file_that_is_missing_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        BaseConfig.from_json(tmp_path / "none.json")


# -- values -------------------------------------------------------------------------------------


def test_defect_6_no_iterations_are_kept_apart_from_none_given(tmp_path):
    assert load_config(written(tmp_path, num_iterations=0)).num_iterations == 0
    assert load_config(written(tmp_path), {"num_iterations": 0}).num_iterations == 0
    assert load_config(written(tmp_path)).num_iterations == 5
    with pytest.raises(ConfigError, match="num_iterations"):
        load_config(written(tmp_path, num_iterations=None))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("paradigm", "central_globe"), ("num_iterations", -1), ("num_iterations", 2.0),
        ("num_iterations", "3"), ("num_iterations", True), ("trajectories_per_iteration", 0),
        ("mini_batch_size", 0), ("mini_batch_size", 11), ("start_iteration", -1),
        ("num_agents", 0), ("num_agents", "2"), ("experiment_dir", None), ("max_workers", 0),
        ("log_level", "LOUD"), ("seed", 1.5), ("exp_name", ""), ("exp_name", ".."),
        ("exp_name", "a/b"), ("run_name", ""), ("run_name", "../x"), ("resume", ""),
        ("resume", "a/b"), ("update", "overwrite"), ("accept", "worse"),
        ("validation_fraction", 1.0), ("validation_fraction", -0.1),
        ("validation_fraction", float("nan")), ("max_policy_chars", 0), ("max_calls", -1),
        ("max_total_tokens", "many"), ("max_cost_usd", -0.5), ("max_cost_usd", float("nan")),
        ("llm", 5), ("judge_llm", ["gpt-4o"]),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        BaseConfig(**{key: value})


@pytest.mark.parametrize(
    ("made", "key", "value"),
    [
        (LanguageTaskConfig, "task_type", "poetry"), (LanguageTaskConfig, "benchmark_path", 5),
        (LanguageTaskConfig, "data_limit", "all"), (LanguageTaskConfig, "use_verified_reward", 1),
        (LanguageTaskConfig, "episode_generation_workers", 0),
        (LanguageTaskConfig, "optimizer_workers", 0), (LanguageTaskConfig, "code_timeout", 0),
        (OvercookedConfig, "num_agents", 3), (OvercookedConfig, "num_agents", 1),
        (OvercookedConfig, "layout", "my_kitchen"),
        (OvercookedConfig, "episode_horizon", 0), (OvercookedConfig, "p0_agent", "Lazy"),
        (PistonballConfig, "num_agents", 2), (PistonballConfig, "num_agents", 0),
        (PistonballConfig, "num_pistons", 1), (PistonballConfig, "num_pistons", "5"),
        (PistonballConfig, "max_cycles", 0), (PistonballConfig, "frame_size", 0),
        (PistonballConfig, "action_mode", "diskrete"),
    ],
)  # fmt: skip
def test_an_impossible_value_of_an_environment_is_refused_by_its_key(made, key, value):
    with pytest.raises(ConfigError, match=key):
        made(**{key: value})


def test_a_paradigm_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"central_credit.*central_global.*'central_globe'"):
        BaseConfig(paradigm="central_globe")


def test_taking_only_what_is_better_needs_tasks_that_are_held_out():
    with pytest.raises(ConfigError, match="validation_fraction"):
        BaseConfig(accept="better")
    assert BaseConfig(accept="better", validation_fraction=0.25).accept == "better"


def test_a_limit_of_money_needs_both_prices_and_zero_is_a_price():
    for prices in ({}, {"input_price_per_million": 1.0}, {"output_price_per_million": 1.0}):
        with pytest.raises(ConfigError, match=r"max_cost_usd.*actor_llm"):
            BaseConfig(actor_llm=LLMConfig("n", "m", **prices), max_cost_usd=1.0)
    free = LLMConfig("n", "m", input_price_per_million=0.0, output_price_per_million=0.0)
    assert BaseConfig(actor_llm=free, max_cost_usd=1.0).max_cost_usd == 1.0


def test_whole_numbers_stand_for_fractions_and_bounds_are_allowed():
    config = LanguageTaskConfig(
        task_type="coding",
        max_cost_usd=0,
        code_timeout=2,
        mini_batch_size=10,
        max_calls=0,
        num_agents=1,
    )
    assert (config.max_cost_usd, config.code_timeout) == (0.0, 2.0)
    assert type(config.code_timeout) is float


def test_each_piston_is_an_agent():
    assert PistonballConfig(num_pistons=4).num_agents == 4
    assert PistonballConfig(num_pistons=4, num_agents=4).num_agents == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"llm": [{"api_key": SECRET}]},
        {"llm": {"model_string": "m", "api_key": SECRET, "max_tokens": -1}},
        {"llm": {"api_key": SECRET}},
        {"seed": {"model_string": "m", "api_key": SECRET}},
    ],
)
def test_what_is_wrong_is_said_without_the_key_of_a_server(wrong):
    with pytest.raises(ConfigError) as told:
        BaseConfig(**wrong)
    assert SECRET not in str(told.value)


# -- command lines ------------------------------------------------------------------------------


def test_overrides_of_a_command_line_are_json_or_texts():
    assert parse_overrides(
        ["num_iterations=3", 'actor_llm={"model_string": "local:"}', "exp_name=a=b", "llm=gpt-4o",
         "mini_batch_size=null", "use_verified_reward=true", "run_name="]
    ) == {
        "num_iterations": 3, "actor_llm": {"model_string": "local:"}, "exp_name": "a=b",
        "llm": "gpt-4o", "mini_batch_size": None, "use_verified_reward": True, "run_name": "",
    }  # fmt: skip


@pytest.mark.parametrize("argument", ["num_iterations", "=3", ""])
def test_an_override_that_is_no_pair_is_refused(argument):
    with pytest.raises(ConfigError, match="key=value"):
        parse_overrides([argument])


def test_a_command_line_and_keywords_make_the_same_configuration(tmp_path):
    path = written(tmp_path, llm="gpt-4o")
    line = parse_overrides(["paradigm=central_global", "seed=4"])
    assert load_config(path, line) == load_config(path, {"paradigm": "central_global", "seed": 4})

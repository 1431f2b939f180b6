"""The configuration of pipeline-rl: its file says what the code says, and what is refused."""

from __future__ import annotations

import importlib
import sys

import pytest
from hydra import compose, initialize_config_dir
from recipes.pipeline_helper import FOLDER

from torchrl_llm._settings import dotted
from torchrl_llm.collectors.staleness import StalenessRule
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import launch


@pytest.fixture(scope="module")
def utils():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("pipeline_utils")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def redis_arguments(utils):
    return importlib.import_module("redis_arguments")


def composed(*overrides):
    with initialize_config_dir(str(FOLDER / "config"), version_base="1.3"):
        return compose("pipeline-rl", list(overrides))


def test_the_file_has_every_key_with_the_default_of_the_code(utils):
    config = utils.load_config(composed())
    code, file = dotted(vars(utils.PipelineTrainConfig())), config.flat()
    for group, cls in (("weight_sync", "PipelineWeightSyncConfig"), ("redis", "RedisConfig")):
        assert dotted(vars(getattr(utils, cls)())) == {
            key.removeprefix(f"{group}."): value
            for key, value in file.items()
            if key.startswith(f"{group}.")
        }
    for key in ("max_lag", "on_stale", "weight_update_frequency"):
        assert file[f"train.{key}"] == code[key]
    assert config.rows_per_claim == 8 * 8


def test_the_lag_is_the_rule_of_staleness(utils):
    config = utils.load_config(composed("train.max_lag=3", "train.on_stale=drop"))
    assert config.train.staleness == StalenessRule(max_policy_age=3, on_stale="drop")


SECRET = "kept-to-us"


WITH_A_PASSWORD = [
    f"redis.url=redis://:{SECRET}@host:6379/0",
    f"++redis.url='rediss://user:{SECRET}@host'",
    f"redis.url=redis://:{SECRET}/{{@host",  # Hydra cannot read it, and would show it
    f"redis.url=redis://host/0?password={SECRET}",
    f"redis.url=redis://host:{SECRET}",
    f"redis.url=:{SECRET}@host",
    f"redis.url=${{oc.env:NO_SUCH_VARIABLE,redis://:{SECRET}@host}}",
    f"redis.url=redis://:${{oc.env:NO_SUCH_VARIABLE,{SECRET}}}@host",
    f"redis={{url:redis://:{SECRET}@host}}",
    f"redis.ulr=redis://:{SECRET}@host",
]


def test_a_password_is_refused_before_hydra_sees_it_and_not_shown(redis_arguments):
    for argument in WITH_A_PASSWORD:
        with pytest.raises(ConfigError, match=r"redis\S* (holds a password|must begin)") as refused:
            redis_arguments.check_passwords([argument])
        assert SECRET not in str(refused.value)


URLS_WITHOUT_A_SECRET = [
    "redis://host:6379/0",
    "redis://user@host",
    "'redis://[::1]:6379/0'",
    "unix:///tmp/redis.sock",
    "redis://user:***@host",
    "'${oc.env:MY_REDIS}'",
    "'redis://:${oc.env:MY_PASSWORD}@host'",
]


def test_a_url_that_says_where_its_password_is_passes(utils, redis_arguments, monkeypatch):
    for url in URLS_WITHOUT_A_SECRET:
        monkeypatch.setenv("MY_REDIS", f"redis://:{SECRET}@host")
        monkeypatch.setenv("MY_PASSWORD", SECRET)
        redis_arguments.check_passwords([f"redis.url={url}"])
        config = utils.load_config(composed(f"redis.url={url}"))
        assert (SECRET in config.redis.url) == ("oc.env" in url)
        assert SECRET not in repr(config)


def test_a_password_in_a_file_is_refused_and_not_shown(utils):
    values = composed()
    values.redis.url = f"redis://:{SECRET}@host"
    with pytest.raises(ConfigError, match=r"redis\.url holds a password") as refused:
        utils.load_config(values)
    assert SECRET not in str(refused.value)
    values.redis.url = [f"redis://:{SECRET}@host"]
    with pytest.raises(ConfigError, match=r"redis\.url holds a password") as refused:
        utils.load_config(values)
    assert SECRET not in str(refused.value)


def test_unknown_arguments_are_refused_with_the_nearest_key():
    with pytest.raises(ConfigError, match=r"train\.max_lag"):
        launch.check_arguments(["train.max_lagg=1"], FOLDER / "config", "pipeline-rl")

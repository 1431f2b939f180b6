"""Descriptions of models: presets, keys that stay secret, prices, and names of reasoning models."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.llm_config import (
    LLMConfig,
    get_llm_config,
    list_available_models,
    preset_prices,
    uses_completion_tokens,
)

SECRET = "sk-very-secret-0123"
SEED = {
    "base_url": None, "api_key": None, "api_key_env_var": "OPENAI_API_KEY", "is_multimodal": False,
    "max_tokens": 4096, "extra_params": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_key_around(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("MY_KEY", raising=False)


def test_fields_are_those_of_the_seed_in_its_order_then_ours():
    names = [each.name for each in dataclasses.fields(LLMConfig)]
    assert names == [
        "name", "model_string", "base_url", "api_key", "api_key_env_var", "is_multimodal",
        "max_tokens", "input_price_per_million", "output_price_per_million", "extra_params",
        "timeout_s", "max_retries", "concurrency",
    ]  # fmt: skip
    made = LLMConfig("n", "m")
    assert {key: getattr(made, key) for key in SEED} == SEED
    assert (made.timeout_s, made.max_retries, made.concurrency) == (120.0, 4, 32)


# -- presets ------------------------------------------------------------------------------------


def test_there_are_eighteen_presets_of_six_providers_each_with_a_description():
    found = list_available_models()
    providers = Counter(
        LLMConfig.from_preset(name).api_key_env_var.partition("_")[0] for name in found
    )
    assert providers == {
        "OPENAI": 5, "GEMINI": 3, "TOGETHER": 3, "DASHSCOPE": 3, "DEEPSEEK": 2, "OLLAMA": 2,
    }  # fmt: skip
    assert {"gpt-4o", "gpt-4o-mini"} <= set(found)
    assert all(isinstance(text, str) and text for text in found.values())


def test_every_preset_has_a_name_and_both_prices():
    for name in list_available_models():
        made = LLMConfig.from_preset(name)
        prices = (made.input_price_per_million, made.output_price_per_million)
        assert made.name == name
        assert None not in prices
        assert preset_prices(name) == prices


def test_models_of_ollama_are_on_this_machine_cost_nothing_and_need_no_key(monkeypatch):
    monkeypatch.delenv("OLLAMA_API_KEY", raising=False)
    names = [name for name in list_available_models() if name.startswith("ollama")]
    assert len(names) == 2
    for name in names:
        made = LLMConfig.from_preset(name)
        assert made.base_url == "http://localhost:11434/v1"
        assert (made.input_price_per_million, made.output_price_per_million) == (0.0, 0.0)
        assert made.get_api_key() == "EMPTY"


def test_a_preset_is_a_fresh_copy_each_time():
    first = LLMConfig.from_preset("gpt-4o-mini")
    first.extra_params["temperature"] = 0.0
    first.max_tokens = 1
    second = LLMConfig.from_preset("gpt-4o-mini")
    assert second.extra_params == {}
    assert second.max_tokens == 4096


@pytest.mark.parametrize("read", [LLMConfig.from_preset, get_llm_config])
def test_an_unknown_preset_is_refused_with_the_nearest(read):
    with pytest.raises(ConfigError, match="did you mean 'gpt-4o-mini'"):
        read("gpt4o-mini")


def test_a_preset_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match="no model"):
        LLMConfig.from_dict({"preset": ["gpt-4o"]})


def test_a_dict_replaces_values_of_its_preset():
    made = LLMConfig.from_dict({"preset": "gpt-4o", "max_tokens": 7, "extra_params": {"top_p": 1}})
    plain = LLMConfig.from_preset("gpt-4o")
    assert made == dataclasses.replace(plain, max_tokens=7, extra_params={"top_p": 1})


def test_a_file_of_a_model_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model_string": "m", "base_url": "http://localhost:1/v1"}))
    assert get_llm_config(str(path)) == LLMConfig("m", "m", "http://localhost:1/v1")


@pytest.mark.parametrize("text", ["{", "[1]", '"gpt-4o"'])
def test_a_file_that_holds_no_model_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        get_llm_config(str(path))


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.json"):
        get_llm_config(str(tmp_path / "missing.json"))


# -- dicts --------------------------------------------------------------------------------------


def test_a_dict_of_a_model_survives_json():
    made = LLMConfig("n", "m", extra_params={"a": [1, {"b": None}]}, input_price_per_million=0.0)
    assert LLMConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_the_model_names_itself_where_no_name_is_given():
    assert LLMConfig.from_dict({"model_string": "local:"}).name == "local:"


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'max_tokns'.*did you mean 'max_tokens'"):
        LLMConfig.from_dict({"model_string": "m", "max_tokns": 5})


def test_a_dict_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="model_string"):
        LLMConfig.from_dict({"name": "n"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_string", ""), ("model_string", 5), ("name", 5), ("base_url", 5),
        ("api_key_env_var", None), ("is_multimodal", "false"), ("max_tokens", 0),
        ("max_tokens", "100"), ("max_tokens", True), ("input_price_per_million", -1.0),
        ("output_price_per_million", "cheap"), ("output_price_per_million", float("nan")),
        ("input_price_per_million", True), ("extra_params", [1]), ("timeout_s", 0),
        ("timeout_s", "soon"), ("timeout_s", True), ("max_retries", -1), ("concurrency", 0),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        LLMConfig.from_dict({"model_string": "m", key: value})


def test_changing_a_dict_afterwards_does_not_change_the_model():
    given = {"stop": ["\n"]}
    made = LLMConfig("n", "m", extra_params=given)
    given["stop"].append("x")
    made.to_dict()["extra_params"]["seed"] = 1
    assert made.extra_params == {"stop": ["\n"]}


# -- keys ---------------------------------------------------------------------------------------


def test_a_configured_key_goes_before_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "of the environment")
    assert LLMConfig("n", "m", api_key_env_var="MY_KEY").get_api_key() == "of the environment"
    assert LLMConfig("n", "m", api_key=SECRET, api_key_env_var="MY_KEY").get_api_key() == SECRET


def test_a_missing_key_is_a_value_error_that_names_the_variable_and_no_other_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with pytest.raises(ValueError, match="MY_KEY") as told:
        LLMConfig("n", "m", "https://api.example.com/v1", api_key_env_var="MY_KEY").get_api_key()
    assert isinstance(told.value, ConfigError)
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000/v1", "http://127.0.0.1:1/v1", "http://127.8.0.2/v1", "http://[::1]:2"],
)
def test_a_server_on_this_machine_gets_a_dummy_key_or_the_one_there_is(url, monkeypatch):
    assert LLMConfig("n", "m", url).get_api_key() == "EMPTY"
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert LLMConfig("n", "m", url).get_api_key() == SECRET


@pytest.mark.parametrize(
    "url", [None, "https://api.example.com", "http://localhost.example.com", "http://10.0.0.1"]
)
def test_another_machine_needs_a_key(url):
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        LLMConfig("n", "m", url).get_api_key()


@pytest.mark.parametrize("model", ["local:", "local:/some/folder", "scripted:module:function"])
def test_a_model_that_is_no_servers_needs_no_key(model):
    assert LLMConfig("n", model).get_api_key() == "EMPTY"


def test_the_name_of_a_served_model_may_have_a_colon():
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        LLMConfig("n", "llama3.2:latest").get_api_key()


def test_a_key_is_never_shown():
    made = LLMConfig("n", "m", "http://localhost/v1", api_key=SECRET)
    assert SECRET not in repr(made) + str(made) + f"{[made]}"
    assert made.to_dict()["api_key"] == SECRET


@pytest.mark.parametrize(
    "wrong", [{"api_key": [SECRET]}, {"api_key": SECRET, "max_tokens": 0}, {"api_kye": SECRET}]
)
def test_what_is_wrong_with_a_model_is_said_without_its_key(wrong):
    with pytest.raises(ConfigError) as told:
        LLMConfig.from_dict({"model_string": "m", **wrong})
    assert SECRET not in str(told.value)


# -- defects of the reference -------------------------------------------------------------------


def test_defect_2_a_price_of_zero_is_a_price_and_none_is_unknown():
    free = LLMConfig.from_dict(
        {"preset": "gpt-4o", "input_price_per_million": 0.0, "output_price_per_million": 0}
    )
    assert (free.input_price_per_million, free.output_price_per_million) == (0.0, 0.0)
    assert LLMConfig("n", "m").input_price_per_million is None
    assert LLMConfig("n", "m").output_price_per_million is None


def test_defect_8_extra_params_are_kept():
    given = {"temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False}}
    for made in (
        LLMConfig("n", "m", extra_params=given),
        LLMConfig.from_dict({"preset": "gpt-4o", "extra_params": given}),
    ):
        assert made.extra_params == given
        assert made.to_dict()["extra_params"] == given


@pytest.mark.parametrize(
    "name",
    ["o1", "o3", "o3-mini", "o4-mini", "o1-preview", "o1-2024-12-17", "gpt-5", "gpt-5-mini",
     "gpt-5.1", "openai/o3", "openrouter/openai/gpt-5-nano"],
)  # fmt: skip
def test_defect_8_a_reasoning_model_is_known_by_its_name(name):
    assert uses_completion_tokens(name)


@pytest.mark.parametrize(
    "name",
    ["llama-o1x", "o1x", "my-o1", "gpt-4o", "gpt-4o-mini", "foo1", "gpt-50", "gpt-500", "o", "o-1",
     "not-gpt-5", "o1/llama", "gpt-5/mine", ""],
)  # fmt: skip
def test_defect_8_a_name_that_only_holds_such_a_name_is_another_model(name):
    assert not uses_completion_tokens(name)

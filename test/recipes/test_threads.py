"""How many CPU threads a model gets where nobody says."""

import shutil

import pytest
import torch

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.recipes.builders import set_threads
from torchrl_llm.trainers import load_config


@pytest.fixture
def given(monkeypatch):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    return counts


def config(**settings):
    return load_config({"env": {"dataset": "arithmetic"}, **settings})


def test_a_tiny_model_has_one_thread_wherever_it_lies(given, tmp_path):
    shutil.copytree(embedded_model_path(), tmp_path / "checkpoint")
    for name in (None, str(tmp_path / "checkpoint")):
        set_threads(config(model={"name": name}))
    assert given == [1, 1]


def test_other_models_keep_the_choice_of_torch(given, tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**23)
    for name in (str(tmp_path), "Qwen/Qwen2.5-0.5B-Instruct"):
        set_threads(config(model={"name": name}))
    assert given == []


def test_what_is_configured_is_taken(given):
    set_threads(config(train={"num_threads": 3}))
    assert given == [3]

"""grpo-sync.py with a vLLM engine: the real script on a real engine."""

from __future__ import annotations

from functools import partial

import pytest
from modules.backends.vllm.engine_helper import quick_workers
from recipes.grpo_helper import column, run_script
from recipes.turns_helper import check_turns, remember_rows

from torchrl_llm.errors import MissingExtraError
from torchrl_llm.recipes.sampling_engine import engine_arguments, sync_type
from torchrl_llm.trainers import load_config

VLLM = ["inference_model.backend=vllm", "inference_model.max_model_len=64"]


def config(**weight_sync):
    values = {"inference_model": {"backend": "vllm"}, "train": {"device": "cpu"}}
    return values | ({"weight_sync": weight_sync} if weight_sync else {})


@pytest.mark.vllm
@pytest.mark.slow
def test_it_trains_on_what_the_engine_samples_with_the_weights_of_each_step(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    run = partial(run_script, monkeypatch)
    table = run(tmp_path, *VLLM, "train.max_steps=3")
    assert column(table, "train/tokens_generated") == column(table, "train/tokens_trained")
    assert all(norm > 0 for norm in column(table, "train/grad_norm"))
    # What was sampled has the log-probs of the trainer, after every update: nothing is stale.
    assert max(column(table, "train/kl_to_inference")) < 1e-6
    assert min(column(table, "train/ESS")) > 0.9999

    table = run(tmp_path, *VLLM, "train.max_steps=4", "checkpoint.resume=auto")
    assert [row["train/step"] for row in table] == ["0", "1", "2", "3", "4"]
    # The new engine has the weights of the checkpoint, not those of the model's folder.
    assert max(column(table, "train/kl_to_inference")) < 1e-6


@pytest.mark.vllm
@pytest.mark.slow
def test_it_trains_with_an_engine_over_two_devices(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    spread = ["inference_model.num_devices=2", "train.max_steps=2"]
    with quick_workers():
        table = run_script(monkeypatch, tmp_path, *VLLM, *spread)
    assert all(norm > 0 for norm in column(table, "train/grad_norm"))
    assert max(column(table, "train/kl_to_inference")) < 1e-6


@pytest.mark.vllm
@pytest.mark.slow
def test_it_trains_with_a_tool_whose_results_the_engine_reads_and_nobody_trains(
    tmp_path, monkeypatch
):
    pytest.importorskip("vllm")
    steps = remember_rows(monkeypatch)
    engine = ["inference_model.backend=vllm", "inference_model.max_model_len=256"]
    table = run_script(monkeypatch, tmp_path, "env=calculator", *engine, "train.max_steps=3")
    assert check_turns(steps) > 12
    assert column(table, "train/tokens_generated") == column(table, "train/tokens_trained")
    assert all(norm > 0 for norm in column(table, "train/grad_norm"))
    # Both turns were sampled by the weights that are trained, behind ids that both have.
    assert max(column(table, "train/kl_to_inference")) < 1e-6
    assert min(column(table, "train/ESS")) > 0.9999


def test_weights_get_into_the_engine_in_the_cheapest_way_that_the_model_allows():
    assert sync_type(load_config(config())) == "shared"
    assert sync_type(load_config(config(type="delta"))) == "delta"
    spread = config()
    spread["inference_model"] = {**spread["inference_model"], "num_devices": 2}
    assert sync_type(load_config(spread)) == "load"
    lora = config() | {"train_model": {"lora": {"enabled": True, "r": 12}}}
    assert sync_type(load_config(lora)) == "adapter"


def test_the_engine_is_built_for_the_way_in_which_it_gets_its_weights():
    shared = engine_arguments(load_config(config()), "shared")
    assert (shared["dtype"], shared["load_format"]) == ("float32", "dummy")
    lora = config() | {"train_model": {"lora": {"enabled": True, "r": 12}}}
    adapter = engine_arguments(load_config(lora), "adapter")
    assert (adapter["enable_lora"], adapter["max_lora_rank"]) == (True, 16)
    assert "load_format" not in adapter
    low = config() | {"train": {"device": "cpu", "mixed_precision": "bfloat16"}}
    assert engine_arguments(load_config(low), "load")["dtype"] == "bfloat16"
    assert engine_arguments(load_config(low), "shared")["dtype"] == "float32"


def test_without_vllm_the_recipe_says_what_to_install(tmp_path, monkeypatch):
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"pip install"):
            run_script(monkeypatch, tmp_path, *VLLM, "train.max_steps=1")
    else:
        pytest.skip("vLLM is installed")

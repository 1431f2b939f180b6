"""Online DPO in the GRPO recipe."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from recipes.grpo_helper import column, run_script, weights

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.grpo_config import AsyncGRPOConfig

ONLINE = ("loss=online_dpo", "advantage=best_worst", "eval.num_prompts=0", "loss.beta=0.5")


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


def test_it_begins_at_log_2_trains_two_answers_a_group_and_resumes_exactly(tmp_path, run):
    settings = (
        *ONLINE,
        "optimizer.lr=0.0003",
        "train.prompts_per_batch=8",
        "checkpoint.interval=1",
    )
    whole = run(tmp_path / "whole", *settings, "train.max_steps=3")
    assert column(whole, "train/loss_preference")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert column(whole, "train/margin")[0] == pytest.approx(0, abs=1e-5)
    trained, filtered, generated = (
        column(whole, f"train/tokens_{name}") for name in ("trained", "filtered", "generated")
    )
    assert [a + b for a, b in zip(trained, filtered, strict=True)] == generated
    assert all(0 < a < b for a, b in zip(trained, generated, strict=True))
    run(tmp_path / "cut", *settings, "train.max_steps=2")
    again = ("train.max_steps=3", "checkpoint.resume=auto")
    assert run(tmp_path / "cut", *settings, *again) == whole
    first, second = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_passes_widen_the_margin_whatever_the_cut(tmp_path, run):
    settings = (*ONLINE, "optimizer.lr=0.003", "train.max_steps=1", "train.epochs=4")
    one = run(tmp_path / "one", *settings)
    cut = run(tmp_path / "cut", *settings, "train.micro_token_budget=40")
    assert column(one, "train/margin")[0] > 0.05
    for name in ("loss_preference", "margin", "grad_norm"):
        assert column(cut, f"train/{name}") == pytest.approx(column(one, f"train/{name}"), rel=1e-3)


def config(schema=None, **groups):
    values = {"loss": {"type": "online_dpo"}, "advantage": {"type": "best_worst"}, **groups}
    return load_config(values, *([] if schema is None else [schema]))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"advantage": {"type": "group"}}, "choose advantage=best_worst, got group"),
        ({"train": {"kl_to_ref_coeff": 0.1}}, r"kl_to_ref_coeff has no effect .*loss\.beta"),
        ({"train": {"optim_batch_size": 8}}, "optim_batch_size does not go with"),
        ({"filter": {"truncated": "mask"}}, r"filter\.truncated=mask does not go"),
        ({"filter": {"zero_variance": "drop"}}, r"filter\.zero_variance has no effect"),
        ({"inference_model": {"top_p": 0.9}}, r"inference_model\.top_p"),
        ({"correction": {"type": "tis"}}, "correction has no effect"),
        ({"advantage": {"type": "best_worst", "positive_only": True}}, "positive_only and keep"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(groups, why):
    with pytest.raises(ConfigError, match=why):
        config(**groups)


def test_its_reference_counts_as_one():
    assert config().needs_reference
    assert config(ref_model={"name": "some/model"}).ref_model.name == "some/model"
    with pytest.raises(ConfigError, match=r"train\.on_stale=mask"):
        config(AsyncGRPOConfig, train={"on_stale": "mask"})

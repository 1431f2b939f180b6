"""A run that is killed at any moment, and goes on, is the run that was left alone, bit for bit."""

import pytest
import torch
from recipes.kill_helper import (
    SMALL,
    assert_same_run,
    read_rows,
    run_killed,
    run_ranks,
    run_to_the_end,
)
from recipes.script import read_metrics
from recipes.test_grpo_failures import check_ledger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torchrl_llm.data.safe_state import Spread
from torchrl_llm.trainers.checkpoint import CheckpointStore

LONG = ["train.max_steps=30", "checkpoint.interval=1", "checkpoint.max_shard_size=500KB"]
SHORT = ["train.max_steps=3", "checkpoint.interval=1"]


def check(folder, settings, **how):
    overrides = [*SMALL, *settings]
    run_to_the_end(folder / "whole", overrides)
    places = run_killed(folder / "cut", overrides, **how)
    assert_same_run(folder / "whole", folder / "cut")
    return places


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills_at_random(tmp_path):
    places = check(tmp_path, LONG, kills=20, seed=15, operations=170)
    assert any(saving for _, saving in places), places
    assert len({step for step, _ in places}) > 4, places


@pytest.mark.full
def test_two_kills(tmp_path):
    check(tmp_path, SHORT, kills=2, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("settings", ["train_model.lora.enabled=true", "advantage=spo"])
def test_kills_of_runs_with_more_to_remember(tmp_path, settings):
    more = [settings, "train.optim_batch_size=2", "train.epochs=2"]
    check(tmp_path, [*SHORT, "train.max_steps=8", *more], kills=4, seed=3, operations=140)


RANKS = ["train.prompts_per_batch=4", "checkpoint.interval=1", "checkpoint.keep_last=9"]


def optimizer_of(folder, step):
    """What a checkpoint holds of the optimizer, whoever wrote it, in whole tensors."""
    store = CheckpointStore(folder / "checkpoints")
    state = store.load(step)["parts"]["optimizer"]["state"]
    wanted = {
        (name, key): torch.empty(value.shape, dtype=value.dtype)
        if isinstance(value, Spread)
        else value
        for name, values in state.items()
        for key, value in values.items()
    }
    spread = {
        value.name: wanted[name, key]
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Spread)
    }
    store.read_spread(step, spread)
    return wanted


@pytest.mark.full
@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param((2, 1, 2), id="2 to 1 to 2"),
        pytest.param((1, 2, 1), id="1 to 2 to 1"),
    ],
)
@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, worlds, parallel):
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    settings = [*SMALL, *RANKS]
    run_to_the_end(alone, [*settings, "train.max_steps=6"])
    for number, world in enumerate(worlds, start=1):
        with_ranks = [*settings, f"train.parallel={parallel}", f"train.max_steps={2 * number}"]
        if number > 1:
            # Loaded and saved again by another number of processes, it is what it was.
            weights = load_file(newest(cut) / "model.safetensors")
            moments = optimizer_of(cut, 2 * number - 2)
            run_ranks(cut, with_ranks, world, only_saves=True)
            for name, value in load_file(newest(cut) / "model.safetensors").items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
            again = optimizer_of(cut, 2 * number - 2)
            assert again.keys() == moments.keys()
            for name, value in again.items():
                torch.testing.assert_close(value, moments[name], rtol=0, atol=1e-6)
            assert any(value.abs().max() > 0 for value in again.values())
        run_ranks(cut, with_ranks, world)
    one, other = read_rows(alone), read_rows(cut)
    asked = [sorted(query for query, *_ in step) for step in other]
    assert asked == [sorted(query for query, *_ in step) for step in one], "each prompt once"
    rows = [row for step in other for row in step]
    assert len({traj for *_, traj in rows}) == len(rows) == 6 * 8
    assert len({group for _, group, _ in rows}) == 6 * 4
    table = read_metrics(cut)
    assert [row["train/step"] for row in table] == list("0123456")
    check_ledger(table)
    assert AutoModelForCausalLM.from_pretrained(newest(cut))


@pytest.mark.full
def test_adapters_over_shards_go_on(tmp_path):
    pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    settings = [*SMALL, *RANKS, "train_model.lora.enabled=true", "train.parallel=fsdp2"]
    settings.append("optimizer.scheduler=constant")  # others know where a run ends
    run_ranks(tmp_path / "whole", [*settings, "train.max_steps=3"], 2)
    for steps in (2, 3):
        run_ranks(tmp_path / "cut", [*settings, f"train.max_steps={steps}"], 2)
    one, other = (
        load_file(newest(tmp_path / name) / "model.safetensors") for name in ("whole", "cut")
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name


@pytest.mark.full
@pytest.mark.parametrize(
    "worlds", [pytest.param((2, 1), id="2 to 1"), pytest.param((1, 2), id="1 to 2")]
)
@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_an_update_after_another_number_of_processes_is_that_of_one(tmp_path, worlds, parallel):
    file = tmp_path / "sums.csv"
    sums = [f"What is {n}+{7 * n}?,{8 * n}" for n in range(10, 50)]
    file.write_text("\n".join(["question,answer", *sums]) + "\n")
    settings = [f"data.source={file}", "train.batch_size=7", "eval.num_prompts=0"]
    settings += ["logging.progress=false", "optimizer.scheduler=constant", "optimizer.lr=1e-3"]
    settings += ["optimizer.warmup_steps=0", "checkpoint.interval=1", "checkpoint.keep_last=9"]
    # With the default of 1e-8 AdamW makes a step of the rounding of a gradient that is nearly 0.
    settings.append("optimizer.eps=1e-6")
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    run_ranks(alone, [*settings, "train.max_steps=2"], 1, path="sft/sft.py")
    for steps, world in enumerate(worlds, start=1):
        with_ranks = [*settings, f"train.parallel={parallel}", f"train.max_steps={steps}"]
        run_ranks(cut, with_ranks, world, path="sft/sft.py")
    one, other = (
        [float(row["train/loss_sft"]) for row in read_metrics(folder) if row["train/loss_sft"]]
        for folder in (alone, cut)
    )
    assert len(one) == 2
    assert other == pytest.approx(one, rel=1e-6)
    first, last = (
        load_file(alone / "checkpoints" / f"step_00000{step}" / "model.safetensors")
        for step in (1, 2)
    )
    assert max(float((last[name] - first[name]).abs().max()) for name in last) > 1e-4
    for name, value in load_file(newest(cut) / "model.safetensors").items():
        torch.testing.assert_close(value, last[name], rtol=0, atol=1e-6)
    moments, others = optimizer_of(alone, 2), optimizer_of(cut, 2)
    assert others.keys() == moments.keys() != set()
    for name, value in others.items():
        torch.testing.assert_close(value, moments[name], rtol=0, atol=1e-6)


def newest(folder):
    return sorted((folder / "checkpoints").glob("step_*"))[-1]

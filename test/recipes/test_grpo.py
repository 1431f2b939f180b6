"""The GRPO recipe as a user runs it: the real script, the embedded model, a few steps."""

import errno
import importlib
import json
import os
import re
import signal
import threading
import time
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from recipes.grpo_helper import SCRIPT, SMALL, column, run_script, weights
from recipes.script import run_typed

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.errors import CheckpointError, ConfigError, DataError, OverlongError
from torchrl_llm.recipes.builders import make_envs, make_policy, minibatches, seed_everything
from torchrl_llm.trainers import (
    BatchSource,
    GRPOConfig,
    checkpoint,
    load_config,
    make_optimizer,
    micro_batches,
)

GSM8K = [{"question": f"What is {n} plus {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(20)]


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


def test_a_short_run_leaves_metrics_a_curve_and_a_model_that_transformers_opens(
    tmp_path, monkeypatch, capfd
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loggers = "logging.backend=[csv,tensorboard]"
    table = run_typed(monkeypatch, SCRIPT, tmp_path, *SMALL, "train.max_steps=2", loggers)
    assert [row["train/step"] for row in table] == ["0", "1", "2"]
    assert len(column(table, "train/reward")) == 2
    assert len(column(table, "eval/accuracy")) == 2  # before the first step and after the last
    assert column(table, "train/tokens_generated") == column(table, "train/tokens_trained")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("grpo/events.out.tfevents*"))
    text = capfd.readouterr().out
    assert re.search("^held-out conversation|^training changed none of the first", text, re.M)
    assert "train/reward over steps" in text
    folder = tmp_path / "checkpoints" / "step_000002"
    model, tokenizer = (
        cls.from_pretrained(folder) for cls in (AutoModelForCausalLM, AutoTokenizer)
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 37+85?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[0] == 1


def test_steps_then_ctrl_c_then_the_rest_equal_a_run_that_was_left_alone(tmp_path, run, capfd):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # Two updates a step, so that optimizer and sampler state matter too.
    settings = ["train.max_steps=12", "train.optim_batch_size=8", "eval.interval=3"]
    expected = run(whole, *settings)
    table = cut / "metrics.csv"

    def interrupt():
        deadline = time.monotonic() + 120
        while not (table.exists() and len(table.read_text().splitlines()) >= 4):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(cut, *settings)
    thread.join()
    text = capfd.readouterr().err
    assert ended.value.code == 128 + signal.SIGINT, text
    # The row of a step whose evaluation was cut is written by the run that goes on.
    stopped_at = int(max((cut / "checkpoints").iterdir()).name.removeprefix("step_"))
    assert 2 <= stopped_at < 12, "the signal must arrive in the middle of the run"
    assert f"saved {cut / 'checkpoints' / f'step_{stopped_at:06d}'}" in text
    assert f"hydra.run.dir={cut} checkpoint.resume=auto" in text

    assert run(cut, *settings, "checkpoint.resume=auto") == expected
    first, second = weights(whole, 12), weights(cut, 12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_learning_rate_of_zero_changes_no_weight(tmp_path, run):
    run(tmp_path, "train.max_steps=3", "optimizer.lr=0", "checkpoint.interval=1")
    first, last = weights(tmp_path, 2), weights(tmp_path, 3)
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_the_cut_into_micro_batches_does_not_change_the_result(tmp_path, run):
    # Adam's first step is the sign of the gradient, which rounding flips where it is about zero.
    settings = ["train.max_steps=1", "optimizer.name=SGD", "optimizer.lr=0.1"]
    whole = run(tmp_path / "a", *settings, "train.micro_token_budget=null")
    pieces = run(tmp_path / "b", *settings, "train.micro_token_budget=60")
    for name in ("train/loss_objective", "train/entropy", "train/grad_norm"):
        assert column(whole, name) == pytest.approx(column(pieces, name), rel=1e-4, abs=1e-6)
    first, second = weights(tmp_path / "a", 1), weights(tmp_path / "b", 1)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_unknown_and_old_keys_fail_before_anything_is_built(tmp_path, run):
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer.lrr'.*'optimizer.lr'"):
        run(tmp_path, "optimizer.lrr=1")
    with pytest.raises(ConfigError, match=r"renamed to 'train.prompts_per_batch'"):
        run(tmp_path, "env.num_envs=4")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path, run):
    run(tmp_path, "train.max_steps=1")
    with pytest.raises(CheckpointError, match="holds a run up to step 1"):
        run(tmp_path, "train.max_steps=1")


def test_a_full_disk_ends_the_run_and_keeps_the_previous_checkpoint(tmp_path, run, monkeypatch):
    real, calls = checkpoint.write_tensors, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"No space left.*step 1 is intact.*resume=auto"):
        run(tmp_path, "train.max_steps=3", "checkpoint.interval=1")
    table = run(tmp_path, "train.max_steps=3", "checkpoint.interval=1", "checkpoint.resume=auto")
    assert [row["train/step"] for row in table] == ["0", "1", "2", "3"]


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM8K)))
    return path


def test_gsm8k_from_a_file_with_lora_bfloat16_checkpointing_and_a_reference(
    tmp_path, run, problems
):
    pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    from transformers import AutoModelForCausalLM

    table = run(
        tmp_path / "run",
        "env=gsm8k",
        f"env.data_files={problems}",
        "train.max_steps=2",
        "inference_model.max_tokens=8",
        "train_model.lora.enabled=true",
        "train_model.gradient_checkpointing=true",
        "train.mixed_precision=bfloat16",
        "train.kl_to_ref_coeff=0.1",
        "filter.truncated=mask",
    )
    generated, trained, cut = (
        column(table, f"train/tokens_{name}") for name in ("generated", "trained", "truncated")
    )
    assert generated == [a + b for a, b in zip(trained, cut, strict=True)]
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert not hasattr(AutoModelForCausalLM.from_pretrained(folder), "peft_config")


def test_the_real_gsm8k_file_trains(tmp_path, run, gsm8k_dir):
    table = run(
        tmp_path,
        "env=gsm8k",
        f"env.data_files={gsm8k_dir / 'train.jsonl'}",
        "train.max_steps=2",
        "inference_model.max_tokens=16",
    )
    assert [row["train/step"] for row in table] == ["0", "1", "2"]


@pytest.mark.parametrize("zero_variance", ["drop", "resample"])
def test_groups_without_variance_are_filtered_and_counted(tmp_path, run, zero_variance):
    settings = [f"filter.zero_variance={zero_variance}", "train.max_steps=3"]
    table = run(tmp_path, *settings, "filter.truncated=drop")
    fates = ("trained", "filtered", "truncated", "invalid", "surplus", "pending", "stale")
    for row in table[1:]:
        total = sum(int(row[f"train/tokens_{fate}"]) for fate in fates)
        assert total == int(row["train/tokens_generated"])
    assert sum(column(table, "train/tokens_filtered")) > 0


def test_overlong_prompts_are_an_error_or_counted(tmp_path, run):
    limits = ["env.max_prompt_length=3", "train.max_steps=1"]
    with pytest.raises(OverlongError, match="max_prompt_length is 3"):
        run(tmp_path / "a", *limits)
    table = run(tmp_path / "b", *limits, "env.on_overlong=drop", "eval.num_prompts=0")
    assert column(table, "train/overlong") == [16.0]
    assert column(table, "train/tokens_generated") == [0.0]
    table = run(tmp_path / "c", *limits, "env.on_overlong=truncate", "eval.num_prompts=0")
    assert column(table, "train/overlong") == [16.0]
    assert column(table, "train/tokens_trained")[0] > 0


def test_an_evaluation_beyond_its_data_asks_each_problem_once(tmp_path, run, warned):
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    held_out.write_text("\n".join(map(json.dumps, rows)))
    table = run(
        tmp_path / "run",
        "train.max_steps=1",
        f"env.eval_data_files={held_out}",
        "eval.num_prompts=10",
        "eval.batch_size=2",
    )
    assert column(table, "eval/num_prompts") == [3, 3]
    assert all(round(accuracy * 3, 5) % 1 == 0 for accuracy in column(table, "eval/accuracy"))
    assert "num_prompts=10 is more than the data has: its 3 prompts" in warned[0]


def test_bad_data_is_a_clear_error(tmp_path, run, problems):
    gsm8k = ["env=gsm8k", "train.max_steps=1"]
    with pytest.raises(DataError, match=r"cannot read the data file .*missing.jsonl"):
        run(tmp_path / "a", *gsm8k, "env.data_files=missing.jsonl")
    problems.write_text(problems.read_text() + '\n{"question": ')
    with pytest.raises(DataError, match="line 21 is not JSON"):
        run(tmp_path / "b", *gsm8k, f"env.data_files={problems}")
    problems.write_text(json.dumps({"question": "?"}))
    with pytest.raises(DataError, match="lacks the column 'answer'"):
        run(tmp_path / "c", *gsm8k, f"env.data_files={problems}")
    problems.write_text("\n".join(map(json.dumps, GSM8K[:8])))
    with pytest.raises(ConfigError, match=r"eval.num_prompts=8 leaves none of the 8 problems"):
        run(tmp_path / "d", *gsm8k, f"env.data_files={problems}")
    with pytest.raises(ConfigError, match=r"^model\.name: there is no tokenizer 'nobody/nothing'"):
        run(tmp_path / "e", "model.name=nobody/nothing")


@pytest.fixture
def recipe(monkeypatch):
    """The module beside the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("grpo_utils")


def test_defect_08_a_step_follows_the_sum_of_the_loss_terms_and_no_mean_over_metrics(recipe):
    from torchrl_llm.data.ragged import read_rows

    config = load_config(
        {
            "env": {"repeats": 4},
            "train": {"prompts_per_batch": 4, "micro_token_budget": 100},
            "inference_model": {"max_tokens": 6},
            "loss": {"entropy_coeff": 0.01},
        }
    )
    seed_everything(0)
    policy = make_policy(config)
    env, _ = make_envs(config, policy)
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=16, yield_completed_trajectories=True
    )
    algorithm = recipe.make_algorithm(config, policy)
    buffer, loss_module = recipe.make_buffer(config, algorithm), algorithm.loss
    BatchSource(collector, buffer, credit=algorithm.credit, num_rows=16).fill()
    [rows] = minibatches(buffer, 1)
    normalizer = loss_module.normalizer(rows)
    for micro_batch in micro_batches(rows, budget=config.train.micro_token_budget):
        loss_module(micro_batch, normalizer=normalizer).total_loss().backward()
    gradient = policy.model.get_input_embeddings().weight.grad.clone()

    # The same by hand, one row at a time: at ratio one the clip does nothing, so the loss is
    # -sum(ratio * advantage) / N - 0.01 * sum(entropy) / N over the N sampled tokens.
    policy.model.zero_grad()
    total, count = torch.zeros(()), 0
    columns = (read_rows(rows, ("tokens", "full")), read_rows(rows, ("tokens", "prompt")))
    for full, prompt, advantage in zip(*columns, read_rows(rows, "advantage"), strict=True):
        logits = policy.model(full[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_probs = logits.gather(-1, full[len(prompt) :, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        entropy = -(logits.exp() * logits).sum(-1)
        total = total - (ratio * advantage.item()).sum() - 0.01 * entropy.sum()
        count += len(log_probs)
    (total / count).backward()
    expected = policy.model.get_input_embeddings().weight.grad
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_defect_21_the_default_configuration_needs_nothing_from_the_command_line(recipe):
    from hydra import compose, initialize_config_dir

    for overrides in ([], ["env=gsm8k"]):
        with initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
            composed = compose("grpo", overrides)
        config = load_config(composed)
        # Every key that the schema has is written in the YAML; a task has options of its own.
        written = {key for key in config.flat() if "env.options." not in key}
        assert written == set(GRPOConfig().flat())
        written = set(OmegaConf.to_container(composed, resolve=True))
        assert written == set(GRPOConfig.__dataclass_fields__)
        optimizer = make_optimizer(
            torch.nn.Linear(1, 1).parameters(),
            **{**config.optimizer.arguments, "name": "SGD", "lr": 0.1},
        )
        assert type(optimizer) is torch.optim.SGD

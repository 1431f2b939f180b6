"""Every loss, advantage estimator, correction and reward of the GRPO recipe, in a few steps."""

from functools import partial

import pytest
import torch
from recipes.grpo_helper import column, run_script, weights

SHORT = ["train.max_steps=2", "eval.num_prompts=0", "checkpoint.interval=null"]


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


@pytest.mark.parametrize(
    "algorithm",
    [
        ["loss=dr_grpo", "advantage.normalize=none"],
        ["loss=dapo", "filter.zero_variance=resample", "reward.overlong_cache=2"],
        ["loss=gspo", "advantage=leave_one_out"],
        ["loss=cispo", "loss.aggregation=prompt_mean", "advantage=hybrid"],
        [
            "loss=reinforce",
            "advantage=monte_carlo",
            "filter.truncated=drop",
            "inference_model.max_tokens=3",
        ],
        ["loss=reinforce_plus_plus", "advantage=batch", "reward.kl_coeff=0.01"],
        ["loss=topr", "advantage=spo", "env.repeats=1", "train.prompts_per_batch=16"],
        ["loss=ppo", "advantage=gae", "reward.kl_coeff=0.01", "reward.kl_reduction=token"],
    ],
    ids=lambda algorithm: algorithm[0].partition("=")[2],
)
def test_algorithms_train_every_token_or_say_what_became_of_it(tmp_path, run, algorithm):
    table = run(tmp_path, *SHORT, *algorithm, "train.optim_batch_size=8")
    assert len(table) == 2
    for row in table:
        total = sum(
            int(row[f"train/tokens_{fate}"])
            for fate in ("trained", "filtered", "truncated", "invalid", "surplus", "pending")
        )
        assert total == int(row["train/tokens_generated"])
        assert int(row["train/tokens_trained"]) > 0
    assert all(norm > 0 for norm in column(table, "train/grad_norm"))


def test_a_critic_learns_beside_the_policy_and_is_part_of_the_checkpoint(tmp_path, run):
    settings = ["loss=ppo", "advantage=gae", "eval.num_prompts=0", "checkpoint.interval=2"]
    table = run(tmp_path / "whole", *settings, "train.max_steps=4", "train.epochs=2")
    # The head begins at zero and moves towards the mean reward.
    values = column(table, "train/value")
    assert abs(values[0]) < 0.05 < abs(values[-1])
    run(tmp_path / "cut", *settings, "train.max_steps=2", "train.epochs=2")
    resumed = run(
        tmp_path / "cut",
        *settings,
        "train.max_steps=4",
        "train.epochs=2",
        "checkpoint.resume=auto",
    )
    assert resumed == table


def test_a_correction_with_several_updates_compares_with_the_policy_before_them(tmp_path, run):
    settings = [*SHORT, "train.epochs=2", "optimizer.lr=1e-3"]
    table = run(tmp_path, *settings, "correction.type=tis", "correction.level=sequence")
    # The sampler is the trainer's own model: what they say of the rows differs by rounding only,
    # though the second epoch's policy is already another.
    assert max(column(table, "train/mismatch_k3")) < 1e-6
    assert max(column(table, "train/correction_masked")) == 0
    assert max(map(abs, column(table, "train/kl_approx"))) > 1e-5


def test_one_update_a_batch_needs_no_second_scoring_for_a_correction(tmp_path, run):
    plain = run(tmp_path / "plain", *SHORT)
    corrected = run(tmp_path / "corrected", *SHORT, "correction.type=icepop")
    for name in ("train/loss_objective", "train/grad_norm"):
        assert column(plain, name) == pytest.approx(column(corrected, name), rel=1e-4, abs=1e-6)


def test_a_divergence_in_the_reward_is_steered_and_is_in_the_reported_reward(tmp_path, run):
    settings = [*SHORT, "train.max_steps=4", "optimizer.lr=1e-3"]
    kl = ["reward.kl_coeff=0.1", "reward.kl_target=1e-6", "reward.kl_horizon=16"]
    table = run(tmp_path / "a", *settings, *kl)
    # Rows of the untouched policy have no divergence, later ones more than the target.
    coefficients = column(table, "train/kl_coeff")
    assert coefficients[0] < 0.1 < coefficients[-1]
    plain = run(tmp_path / "b", *settings)
    rewards, successes = column(table, "train/reward"), column(table, "train/success")
    assert rewards[0] == pytest.approx(column(plain, "train/reward")[0], abs=1e-6)
    assert set(successes) <= {n / 16 for n in range(17)}
    assert rewards[-1] < successes[-1] - 1e-3


def test_adapters_switched_off_are_the_reference(tmp_path, run):
    pytest.importorskip("peft", reason="pip install torchrl_llm[peft]")
    lora = ["train_model.lora.enabled=true", "train.kl_to_ref_coeff=0.1", "optimizer.lr=1e-2"]
    divergence = column(run(tmp_path, *SHORT, *lora, "train.max_steps=3"), "train/kl_to_ref")
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-4


def test_truncated_sampling_trains_on_what_could_be_sampled(tmp_path, run):
    table = run(tmp_path, *SHORT, "inference_model.top_p=0.9", "train.kl_to_ref_coeff=0.01")
    # On the support that was sampled from the unchanged policy has ratio one.
    assert column(table, "train/kl_approx")[0] == pytest.approx(0.0, abs=1e-5)
    assert column(table, "train/kl_to_ref")[0] == pytest.approx(0.0, abs=1e-5)


def test_layouts_change_nothing_but_rounding(tmp_path, run):
    settings = [*SHORT, "train.max_steps=1", "optimizer.name=SGD", "optimizer.lr=0.1"]
    found = {
        layout: run(tmp_path / layout, *settings, f"train.packing={layout}")
        for layout in ("padded", "packed", "shared")
    }
    for layout in ("packed", "shared"):
        for name in ("train/loss_objective", "train/entropy", "train/grad_norm"):
            expected = pytest.approx(column(found["padded"], name), rel=1e-4, abs=1e-6)
            assert column(found[layout], name) == expected
    first, second = weights(tmp_path / "padded", 1), weights(tmp_path / "shared", 1)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "algorithm",
    [["loss=gspo"], ["loss=reinforce", "advantage=leave_one_out"]],
    ids=["gspo", "rloo"],
)
def test_an_algorithm_raises_held_out_accuracy_by_three_standard_errors(tmp_path, run, algorithm):
    settings = ["train.prompts_per_batch=32", "env.repeats=8", "train.optim_batch_size=128"]
    settings += ["train.max_steps=16", "eval.num_prompts=512", "eval.interval=null"]
    before, after = column(run(tmp_path, *settings, *algorithm), "eval/accuracy")
    error = ((before * (1 - before) + after * (1 - after)) / 512) ** 0.5
    assert after - before > max(0.1, 3 * error)

"""What grpo-sync.py keeps of its rollouts: steps are computed again from it, and run on from it."""

import importlib
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from recipes.grpo_helper import run_script, weights

from torchrl_llm.algorithms import make_dapo
from torchrl_llm.collectors import StoredCollector
from torchrl_llm.data import RolloutStore
from torchrl_llm.data.replay_buffers import JoinTurns
from torchrl_llm.envs import ids
from torchrl_llm.functional import group_advantages, leave_one_out
from torchrl_llm.objectives import LeaveOneOutAdvantage
from torchrl_llm.recipes.builders import make_policy, make_step_buffer, max_turns, minibatches
from torchrl_llm.trainers import BatchSource, load_config, make_optimizer, optimize

KEPT = ["logging.rollouts=all", "logging.samples=null", "checkpoint.interval=1"]
KEPT += ["checkpoint.keep_last=null", "eval.num_prompts=0"]


@pytest.fixture
def replayed(monkeypatch, tmp_path):
    """Run the recipe; the step that was asked for, from the store and the weights before it."""

    def run(*overrides, step=2):
        table = run_script(monkeypatch, tmp_path, "train.max_steps=2", *KEPT, *overrides)
        store = RolloutStore(tmp_path)
        assert store.steps() == [1, 2]
        utils = importlib.import_module("grpo_utils")
        config = load_config(OmegaConf.load(tmp_path / "config.yaml"))
        policy = make_policy(config)
        policy.model.load_state_dict(weights(tmp_path, step - 1), strict=False)
        algorithm = utils.make_algorithm(config, policy)
        buffer = utils.make_buffer(config, algorithm)
        source = BatchSource(
            StoredCollector(store, steps=[step]),
            buffer,
            credit=algorithm.credit,
            num_rows=config.rows_per_batch,
            length=config.train.length_rule,
            truncated=config.filter.truncated,
            rows_per_trajectory=max_turns(config),
        )
        source.fill()
        metrics = optimize(
            algorithm.loss,
            minibatches(buffer, config.train.epochs),
            make_optimizer(policy.parameters(), **config.optimizer.arguments),
            max_norm=config.optimizer.clip_grad_norm,
            budget=config.train.micro_token_budget,
            layout=config.train.packing,
        )
        return table[-1], store, source, metrics | source.ledger.metrics()

    return run


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference_model.max_tokens=4", "filter.truncated=drop", "train.kl_to_ref_coeff=0.1"],
        ["env=calculator", "loss=dapo", "train.micro_token_budget=400"],
        ["env=calculator", "train.max_seq_len=60", "train.on_overlong=truncate"],
    ],
    ids=["one turn, cut answers dropped", "several turns, joined", "long rows cut"],
)
def test_a_step_computed_again_gives_what_was_recorded(replayed, overrides):
    recorded, store, source, metrics = replayed(*overrides)
    told = [name for name in metrics if name in recorded]
    assert {"train/grad_norm", "train/loss_objective", "train/tokens_trained"} <= set(told)
    for name in told:
        assert metrics[name] == pytest.approx(float(recorded[name]), abs=1e-6), name
    before, again = store.rows(step=2).tensordicts, source.outcomes()
    assert len(before) == len(again.rows)
    for i, row in enumerate(before):
        other = again.row(i)
        assert row["fate"] == other["fate"]
        assert torch.equal(row["trace", "mask_reason"], other["trace", "mask_reason"])
        if row["fate"] == "trained":
            torch.testing.assert_close(row["advantage"], other["advantage"], atol=1e-6, rtol=0)


def test_dapo_and_leave_one_out_run_over_the_same_store_without_a_sampler(monkeypatch, tmp_path):
    run_script(monkeypatch, tmp_path, "train.max_steps=2", *KEPT)
    config = load_config(OmegaConf.load(tmp_path / "config.yaml"))
    policy = make_policy(config)
    store = RolloutStore(tmp_path)
    returns = torch.tensor([r["next", "reward"].item() for r in store.iterate()]).double()
    groups = torch.tensor([r["group_id"].item() for r in store.iterate()])
    dapo = make_dapo(policy, group_size=4)
    for credit, loss, expected in (
        (dapo.credit, dapo.loss, group_advantages(returns, groups, normalize="sample")),
        (LeaveOneOutAdvantage(4), dapo.loss, leave_one_out(returns, groups)),
    ):
        buffer = make_step_buffer(config)
        buffer.append_transform(JoinTurns())
        buffer.append_transform(credit)
        source = BatchSource(StoredCollector(store), buffer, credit=credit, num_rows=16)
        optimizer = make_optimizer(policy.parameters(), name="SGD", lr=0.0)
        found = {}
        for _ in store.steps():
            source.fill()
            assert optimize(loss, minibatches(buffer, 1), optimizer)["train/grad_norm"] > 0
            outcomes = source.outcomes()
            rows = [outcomes.row(i) for i in range(len(outcomes.rows))]
            found |= {
                int(r["traj_id"]): r["advantage"].item() for r in rows if r["fate"] == "trained"
            }
        ids = [int(row["traj_id"]) for row in store.iterate()]
        assert found
        for traj, value in zip(ids, expected.tolist(), strict=True):
            if traj in found:
                assert found[traj] == pytest.approx(value, abs=1e-6)


def test_a_run_that_was_killed_keeps_the_rollouts_of_one_that_was_not(monkeypatch, tmp_path):
    overrides = ["train.max_steps=3", *KEPT[1:], "logging.rollouts=sample"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def run(folder, *more):
        monkeypatch.setattr(ids, "_instances", {})  # as in a process of its own
        run_script(monkeypatch, folder, *overrides, *more)

    run(whole)
    run(cut)
    (segment,) = (cut / "rollouts").iterdir()
    expected = (whole / "rollouts" / segment.name).read_bytes()
    assert segment.read_bytes() == expected
    # As after a kill -9 in the middle of the third step's rows, before its checkpoint.
    shutil.rmtree(cut / "checkpoints" / "step_000003")
    segment.write_bytes(expected[:-1000])
    run(cut, "checkpoint.resume=auto")
    assert segment.read_bytes() == expected
    store = RolloutStore(cut)
    assert [len(store.rows(step=step)) for step in store.steps()] == [16, 16, 16]
    assert store.about(1)["kept"] == "sample"

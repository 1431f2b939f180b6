"""Whole runs with scripted models: what is learned, what a kill leaves, what a budget ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from langmarl import fickle_models, killing_models
from langmarl.world import ROOT, scripted, settings, written

from torchrl_llm import langmarl
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import EarlyStoppingCallback, load_config, make_trainer

KEYS = {
    "paradigm", "num_episodes", "avg_reward", "min_reward", "max_reward", "rewards",
    "input_tokens", "output_tokens", "total_tokens", "cost_usd",
}  # fmt: skip


def rewards(folder, **changes):
    return [each["avg_reward"] for each in langmarl.train(written(folder, **changes))]


def trainer_of(folder, callbacks=(), **changes):
    return make_trainer(load_config(written(folder, **changes)), callbacks=callbacks)


@pytest.mark.parametrize("seed", range(3))
def test_advice_for_each_agent_is_found_faster_than_advice_for_all(seed, tmp_path):
    found = {}
    for paradigm in ("central_credit", "central_global"):
        (tmp_path / paradigm).mkdir()
        found[paradigm] = rewards(
            tmp_path / paradigm, seed=seed, paradigm=paradigm, num_iterations=10
        )
    credit, shared = found["central_credit"], found["central_global"]
    assert credit[0] <= 0.3
    assert max(credit) >= 0.9
    passed = [next((k for k, r in enumerate(each) if r > 0.8), 99) for each in (credit, shared)]
    assert passed[0] < passed[1]


def test_advice_that_is_noise_does_not_help(tmp_path):
    assert max(rewards(tmp_path, optimizer_llm=scripted("noise"), num_iterations=10)) < 0.4


def test_an_iteration_has_exactly_the_ten_statistics(tmp_path):
    [stats] = langmarl.train(written(tmp_path), num_iterations=1)
    assert set(stats) == KEYS
    assert stats["num_episodes"] == len(stats["rewards"]) == 10
    assert stats["avg_reward"] == pytest.approx(sum(stats["rewards"]) / 10)
    assert stats["total_tokens"] == stats["input_tokens"] + stats["output_tokens"] > 1000


def test_defect_1_the_same_command_in_a_new_process_goes_on(tmp_path):
    path = written(tmp_path)
    first = langmarl.train(path, num_iterations=2)
    again = trainer_of(tmp_path)
    calls = again.log.total().calls
    assert again.train(2) == first
    assert again.log.total().calls == calls
    assert len(again.train(3)) == 3
    again.close()


def test_defect_2_the_tokens_of_all_roles_are_counted(tmp_path):
    trainer = trainer_of(tmp_path)
    stats = trainer.train_one_iteration(0)
    account = trainer.log.account()
    assert {role for role, _ in account} == {"actor", "critic", "optimizer"}
    assert sum(spent.output_tokens for spent in account.values()) == stats["output_tokens"]
    # Ten episodes of three agents, a critic each, three gradients each.
    calls = {role: spent.calls for (role, _), spent in account.items()}
    assert calls == {"actor": 30, "critic": 10, "optimizer": 30}
    trainer.close()


def test_defect_5_only_the_missing_episodes_are_played(tmp_path):
    one = trainer_of(tmp_path)
    one.train(1)
    one.close()
    run = next((tmp_path / "experiments" / "runs").iterdir())
    episodes = sorted((run / "trajectories" / "iter_0").iterdir())
    kept = {path: path.read_bytes() for path in episodes[:6]}
    for path in episodes[6:]:
        path.unlink()
    for name in ("checkpoints", "metrics"):
        subprocess.run(["rm", "-r", str(run / name)], check=True)
    (run / "calls.jsonl").unlink()
    (run / "spent.json").unlink()
    again = trainer_of(tmp_path)
    again.train(1)
    assert again.log.account()["actor", "actor"].calls == 3 * 4
    assert {path: path.read_bytes() for path in kept} == kept
    again.close()


def test_defect_6_no_iterations_are_no_iterations_and_their_number_is_absolute(tmp_path):
    path = written(tmp_path)
    assert langmarl.train(path, num_iterations=0) == []
    assert len(langmarl.train(path, num_iterations=2)) == 2
    assert len(langmarl.train(path, num_iterations=2)) == 2


def test_defect_7_order_and_mini_batches_depend_on_the_seed_alone(tmp_path):
    found = []
    for name, changes in (
        ("one", {"max_workers": 1, "optimizer_workers": 1}),
        ("two", {"max_workers": 8, "optimizer_workers": 4, "episode_generation_workers": 3}),
        ("other", {"seed": 1}),
    ):
        (tmp_path / name).mkdir()
        langmarl.train(written(tmp_path / name, mini_batch_size=4, num_iterations=2, **changes))
        run = tmp_path / name / "experiments" / "runs" / "experiment"
        evaluated = sorted(path.name for path in (run / "evaluations" / "iter_0").iterdir())
        texts = {p.name: p.read_text() for p in (run / "checkpoints" / "iter_2").glob("*.txt")}
        tasks = [
            json.loads(path.read_text())["task"]
            for path in sorted((run / "trajectories" / "iter_0").iterdir())
        ]
        assert len(evaluated) == 4
        found.append((evaluated, texts, tasks))
    assert found[0] == found[1]
    assert found[0][2] != found[2][2]


class Doubled(langmarl.BaseReward):
    """Twice the reward; of one episode none."""

    def compute(self, trajectory):
        if trajectory.metadata["episode_id"] == 3:
            raise ZeroDivisionError("three")
        return 2 * trajectory.reward + 1


def test_defect_9_the_reward_on_disk_is_the_one_that_counts(tmp_path):
    trainer = make_trainer(load_config(written(tmp_path)), reward_fn=Doubled())
    stats = trainer.train_one_iteration(0)
    stored = trainer.files.trajectories.load(0)
    assert [one.reward for one in stored if one.valid] == stats["rewards"]
    assert set(stats["rewards"]) <= {1.0, 3.0}
    assert math.isnan(stored[3].reward)
    assert "ZeroDivisionError: three" in stored[3].metadata["error"]
    assert len(stats["rewards"]) == 9
    assert trainer.rows[0]["metadata"]["num_failed_episodes"] == 1
    trainer.close()


def test_a_policy_gets_worse_only_where_it_is_accepted(tmp_path):
    module = "scripted:langmarl.fickle_models"
    for accept in ("always", "better"):
        (tmp_path / accept).mkdir()
        changes = {"validation_fraction": 0.5, "accept": accept, "num_iterations": 6}
        path = written(tmp_path / accept, optimizer_llm=scripted("fickle", module), **changes)
        trainer = make_trainer(load_config(path))
        trainer.train()
        held_out = [row["metadata"]["validation_reward"] for row in trainer.rows]
        trainer.close()
        if accept == "better":
            assert held_out == sorted(held_out)
            assert held_out[-1] > 0.8
        else:
            assert held_out[-1] < max(held_out)
        best = json.loads((tmp_path / accept / "policies" / "experiment_best.json").read_text())
        texts = next(iter(best["policies"].values()))["agent_policies"]
        assert all("CASE-SPECIFIC" in each["policy"] for each in texts.values())


def test_training_stops_at_the_plateau_also_across_a_resume(tmp_path):
    def run(folder, *lasts):
        folder.mkdir()
        for last in lasts:
            trainer = trainer_of(
                folder,
                [EarlyStoppingCallback(patience=2)],
                optimizer_llm=scripted("noise"),
                trajectories_per_iteration=20,
            )
            trainer.train(last)
            trainer.close()
        return trainer.history

    # Twenty of twenty tasks: all iterations have the same reward, so the third is the last.
    whole = run(tmp_path / "whole", 10)
    assert len(whole) == 3
    assert run(tmp_path / "parts", 1, 2, 10) == whole
    assert run(tmp_path / "again", 10, 10) == whole


def test_a_budget_ends_the_run_and_a_larger_one_goes_on(tmp_path):
    trainer = trainer_of(tmp_path, max_calls=100)
    history = trainer.train()
    assert len(history) == 1
    assert "max_calls=100" in trainer.ended_by
    assert trainer.log.total().calls == 100
    trainer.close()
    (tmp_path / "free").mkdir()
    assert langmarl.train(written(tmp_path, max_calls=1000)) == langmarl.train(
        written(tmp_path / "free")
    )


def test_a_failing_episode_is_a_row_with_an_error(tmp_path):
    module = "scripted:langmarl.fickle_models"
    trainer = trainer_of(tmp_path, actor_llm=scripted("refuses_some", module))
    stats = trainer.train_one_iteration(0)
    failed = [one for one in trainer.files.trajectories.load(0) if not one.valid]
    assert 0 < len(failed) < 10
    assert len(stats["rewards"]) == 10 - len(failed)
    assert all("agent_2 was not answered" in one.metadata["error"] for one in failed)
    assert trainer.log.account()["critic", "critic"].calls == 10 - len(failed)
    trainer.close()


def test_each_role_is_asked_as_many_at_a_time_as_its_workers(tmp_path):
    module, roles = "scripted:langmarl.fickle_models", ("actor", "critic", "optimizer")
    models = {f"{role}_llm": scripted(f"watched_{role}", module) for role in roles}
    bounds = {"episode_generation_workers": 4, "max_workers": 3, "optimizer_workers": 2}
    langmarl.train(written(tmp_path, **models, **bounds), num_iterations=1)
    most = [getattr(fickle_models, f"watched_{role}").most for role in roles]
    assert most == [4, 3, 2]


def test_a_run_of_another_configuration_is_not_gone_on_with(tmp_path):
    langmarl.train(written(tmp_path), num_iterations=1)
    with pytest.raises(ConfigError, match=r"different paradigm.*run_name"):
        langmarl.train(written(tmp_path), paradigm="central_global")
    with pytest.raises(ConfigError, match="exists"):
        langmarl.train(written(tmp_path), resume="never")
    with pytest.raises(ConfigError, match="no run 'other'"):
        langmarl.train(written(tmp_path), resume="other")


def test_a_first_iteration_that_is_done_is_said(tmp_path, capfd):
    langmarl.train(written(tmp_path), num_iterations=2)
    langmarl.train(written(tmp_path), num_iterations=3, start_iteration=1)
    assert "has 2 iterations and goes on: start_iteration=1 is done" in capfd.readouterr().err


def test_a_server_that_moved_or_is_asked_more_patiently_is_no_other_configuration(tmp_path):
    langmarl.train(written(tmp_path), num_iterations=1)
    moved = {"base_url": "http://localhost:9", "timeout_s": 7.0, "concurrency": 2}
    assert len(langmarl.train(written(tmp_path, actor_llm=scripted("actor", **moved)))) == 3
    with pytest.raises(ConfigError, match="different actor_llm"):
        langmarl.train(written(tmp_path, actor_llm=scripted("actor", max_tokens=9)))


def test_an_environment_of_a_file_is_named_by_its_path(tmp_path):
    (tmp_path / "guessing.py").write_text(
        "from torchrl_llm.langmarl import BaseEnvironment, LLMClient, Trajectory\n"
        "class Guess(BaseEnvironment):\n"
        "    def reset(self, task): return {}\n"
        "    def step(self, agent_id, action): return '', 0.0, True, {}\n"
        "    def collect_trajectory(self, policies, task):\n"
        "        LLMClient(self.config.get_actor_llm()).chat(policies['agent_1'], 'hello')\n"
        "        return Trajectory(task, [], 0.5)\n"
    )
    given = settings(tmp_path, env=f"{tmp_path}/guessing.py:Guess", num_agents=1)
    given["actor_llm"] = scripted("noise")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({k: v for k, v in given.items() if k not in ("task_type", "benchmark_path")})
    )
    trainer = make_trainer(load_config(path))
    assert trainer.train(1)[0]["rewards"] == [0.5] * 10
    assert trainer.log.account()["actor", "noise"].calls == 10
    trainer.close()
    with pytest.raises(ConfigError, match="is no BaseEnvironment"):
        load_config(path, {"env": "builtins:str"})


def test_two_processes_cannot_train_one_run(tmp_path):
    trainer = trainer_of(tmp_path)
    with trainer.store.lock(trainer.run_id), pytest.raises(ConfigError, match="being trained"):
        trainer.train(1)
    trainer.close()


def test_no_key_is_in_any_file_of_a_run(tmp_path):
    actor = {**scripted("actor"), "api_key": "sk-very-secret"}
    langmarl.train(written(tmp_path, actor_llm=actor), num_iterations=1)
    files = [path for path in (tmp_path / "experiments").rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not any(b"sk-very-secret" in path.read_bytes() for path in files)


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_that_is_killed_at_every_tenth_call_ends_like_one_that_is_not(tmp_path):
    module = "scripted:langmarl.killing_models"
    models = {f"{role}_llm": scripted(role, module) for role in ("actor", "critic", "optimizer")}
    runs = {}
    for name, every in (("whole", 0), ("killed", 10)):
        folder = tmp_path / name
        folder.mkdir()
        path = written(
            folder, **models, num_iterations=4, trajectories_per_iteration=10, num_agents=2
        )
        kills = 0
        while (code := killing_models.outcome(str(path), every)) == -signal.SIGKILL:
            kills += 1
        assert code == 0
        run = folder / "experiments" / "runs" / "experiment"
        texts = {p.name: p.read_text() for p in (run / "checkpoints" / "iter_4").glob("*.txt")}
        records = [json.loads(line) for line in (run / "calls.jsonl").read_text().splitlines()]
        runs[name] = (texts, records, kills)
    texts, records, kills = runs["killed"]
    answered = [record["key"] for record in records if record["event"] == "answered"]
    whole = [each["key"] for each in runs["whole"][1] if each["event"] == "answered"]
    assert len(whole) == 4 * 10 * (2 + 1 + 2) == 200
    assert texts == runs["whole"][0]
    assert sorted(answered) == sorted(whole)
    assert kills >= 15
    begun = [record["key"] for record in records if record["event"] == "begun"]
    # Those under way at a kill, one for each of five or eight threads, are there twice and counted.
    twice = len(begun) - len(answered)
    assert kills <= twice <= 8 * kills
    account = make_trainer(load_config(tmp_path / "killed" / "config.json")).log.total()
    assert (account.calls, account.lost) == (len(begun), twice)


@pytest.mark.full
def test_the_command_of_the_page_prints_its_tables_in_thirty_seconds(tmp_path):
    script = ROOT / "sota-implementations" / "langmarl" / "train.py"
    config = script.parent / "config" / "qa_central_credit.json"
    for more in ([], ['actor_llm={"model_string": "local:", "max_tokens": 24}']):
        folder = tmp_path / str(len(more))
        folder.mkdir()
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(script), f"config={config}", "num_iterations=3", *more],
            cwd=folder, env=os.environ, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert time.monotonic() - begun < 120  # thirty alone; tests share their cores
        assert re.search(r"^ +2 +\d+ +0 +\d\.\d{3}", done.stdout, re.MULTILINE)
        for role in ("actor", "critic", "optimizer"):
            assert re.search(rf"^{role} +\S+ +\d+", done.stdout, re.MULTILINE)

"""pipeline-rl: it learns over a real Redis, and whatever is killed, the run goes on."""

import importlib
import os
import shutil
import signal
import time
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("redis")

from conformance.channels import in_thread
from hydra import compose, initialize_config_dir
from recipes.pipeline_helper import FOLDER, SMALL, Processes, metrics
from recipes.turns_helper import check_turns
from redis_server import RedisServer

from torchrl_llm._redis import PASSWORD_VARIABLE
from torchrl_llm.collectors.staleness import sampled_versions
from torchrl_llm.data.rollouts import ends_trajectory, row_list
from torchrl_llm.recipes.builders import make_policy
from torchrl_llm.weights import engine_weights
from torchrl_llm.weights.fingerprint import weights_digest

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server"),
]

LIMIT_S = 240.0
FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost")


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def number(row, name):
    return int(float(row[f"train/tokens_{name}"]))


def assert_the_ledger_closes(rows):
    for before, row in zip([None, *rows], rows, strict=False):
        carried = 0 if before is None else number(before, "pending")
        spent = sum(number(row, fate) for fate in FATES) + number(row, "pending")
        assert carried + number(row, "generated") == spent, row


@pytest.mark.timeout(600)
def test_it_learns_with_two_actors(tmp_path, server):
    folder = tmp_path / "run"
    given = [f"redis.url={server.url}", "train.max_steps=16", "eval.num_prompts=64"]
    given += ["optimizer.scheduler=constant", "optimizer.warmup_steps=0", "eval.interval=16"]
    with Processes(tmp_path) as processes:
        actors = [processes.start("actor.py", f"actor{i}.log", *given) for i in range(2)]
        learner = processes.start("learner.py", "learner.log", f"hydra.run.dir={folder}", *given)
        learner.join(2 * LIMIT_S)
        assert learner.exitcode == 0, processes.output("learner.log")
        for i, actor in enumerate(actors):
            actor.join(60)
            assert actor.exitcode == 0
            assert "ends: the channel was closed" in processes.output(f"actor{i}.log")
    rows = metrics(folder)
    assert [int(row["train/step"]) for row in rows] == list(range(1, 17))
    assert_the_ledger_closes(rows)
    assert max(float(row["train/policy_age_max"]) for row in rows) <= 2
    rewards = [float(row["train/reward"]) for row in rows]
    # 0.21 -> 0.65 in the run that this was written by
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


@pytest.mark.timeout(900)
def test_actor_redis_and_learner_are_killed_and_the_run_is_finished(tmp_path, server):
    folder = tmp_path / "run"
    given = [*SMALL, f"redis.url={server.url}", "redis.worker_timeout_s=10"]
    run = [f"hydra.run.dir={folder}", "checkpoint.interval=2", "checkpoint.keep_last=null"]
    with Processes(tmp_path) as processes:
        actors = [processes.start("actor.py", f"actor{i}.log", *given) for i in range(2)]
        start = ("learner.py", "learner.log", *given, *run)
        learner = processes.start(*start, "train.max_steps=100000")
        done = processes.wait_for_steps(learner, folder, 3, limit_s=LIMIT_S)

        actors[0].kill()
        done = processes.wait_for_steps(learner, folder, done + 6, limit_s=LIMIT_S)

        server.restart(away_s=1.0)
        done = processes.wait_for_steps(learner, folder, done + 6, limit_s=LIMIT_S)

        actors.append(processes.start("actor.py", "actor2.log", *given))
        learner.kill()
        learner.join()
        killed_at = len(metrics(folder))
        time.sleep(0.5)
        saved = sorted(int(p.name.split("_")[1]) for p in (folder / "checkpoints").glob("step_*"))
        last = saved[-1] + 6
        learner = processes.start(*start, f"train.max_steps={last}", "checkpoint.resume=auto")
        learner.join(LIMIT_S)
        assert learner.exitcode == 0, processes.output("learner.log")
        for actor in actors[1:]:
            actor.join(60)
            assert actor.exitcode == 0
    rows = metrics(folder)
    assert [int(row["train/step"]) for row in rows] == list(range(1, last + 1))
    # The step that was resumed from carries what was pending then; nothing is pending here.
    assert_the_ledger_closes(rows)
    assert max(float(row["train/policy_age_max"]) for row in rows) <= 2
    assert f"resumed from {folder}" in processes.output("learner.log")
    # What the dead learner had taken since its last checkpoint trains nobody; the gap is seen when
    # the worker that had sampled it delivers again.
    lost = sum(number(row, "lost") for row in rows[saved[-1] :])
    assert killed_at == saved[-1] or lost > 0


@pytest.mark.parametrize("sync", ["redis", "files"])
def test_an_actor_samples_with_the_weights_of_each_update_and_proves_it(
    tmp_path, server, sync, monkeypatch
):
    monkeypatch.syspath_prepend(str(FOLDER))
    utils = importlib.import_module("pipeline_utils")
    given = [*SMALL, f"redis.url={server.url}", "train.max_lag=0", f"weight_sync.type={sync}"]
    if sync == "files":
        given.append(f"weight_sync.folder={tmp_path}/weights")
    with initialize_config_dir(str(FOLDER / "config"), version_base="1.3"):
        config = utils.load_config(compose("pipeline-rl", given))
    policy = make_policy(config)
    said, seen = [], []
    with redis_collection_of(utils, config, seen) as collector:
        actor = in_thread(utils.run_actor, config, say=said.append)
        collector.publish(policy.model)
        for version in range(3):
            rows = collector.collect()
            assert len(rows) == 16
            assert {v for row in rows.unbind(0) for v in sampled_versions(row).tolist()} == {
                version
            }
            digest = weights_digest(engine_weights(policy.model))
            assert [dict(delivery.digests) for delivery in seen] == [{version: digest}] * 2
            seen.clear()
            with torch.no_grad():
                policy.model.get_input_embeddings().weight.mul_(1.01)
            collector.update_policy_weights_(policy.model)
        assert collector.take_lost() == 0
    assert actor() == "the channel was closed"
    assert len(said) == 3


def test_conversations_with_a_tool_come_whole_and_are_counted_as_one_row_each(
    tmp_path, server, monkeypatch
):
    monkeypatch.syspath_prepend(str(FOLDER))
    utils = importlib.import_module("pipeline_utils")
    given = [*SMALL, f"redis.url={server.url}", "train.max_lag=0", "env=calculator"]
    with initialize_config_dir(str(FOLDER / "config"), version_base="1.3"):
        config = utils.load_config(compose("pipeline-rl", given))
    policy = make_policy(config)
    steps = []
    with utils.redis_collection(config) as collector:
        actor = in_thread(utils.run_actor, config, say=lambda line: None)
        collector.publish(policy.model)
        for _ in range(2):
            steps.append(row_list(collector.collect()))
            collector.update_policy_weights_(policy.model)
        assert collector.take_lost() == 0
    assert actor() == "the channel was closed"
    assert [sum(map(ends_trajectory, rows)) for rows in steps] == [16, 16]
    assert check_turns(steps) > 8


@contextmanager
def redis_collection_of(utils, config, seen):
    """As the recipe makes it, writing down what comes."""
    with utils.redis_collection(config) as collector:
        collector._check = seen.append
        yield collector


def test_an_actor_without_a_learner_ends_in_time(tmp_path, server):
    given = [*SMALL, f"redis.url={server.url}", "redis.timeout_s=1"]
    with Processes(tmp_path) as processes:
        actor = processes.start("actor.py", "actor.log", *given)
        actor.join(LIMIT_S)
        assert actor.exitcode == 1
        assert "no learner has published weights for 1 s" in processes.output("actor.log")


def test_a_learner_without_actors_ends_in_time(tmp_path, server):
    given = [*SMALL, f"redis.url={server.url}", "redis.timeout_s=1", f"hydra.run.dir={tmp_path}/r"]
    with Processes(tmp_path) as processes:
        learner = processes.start("learner.py", "learner.log", *given)
        learner.join(LIMIT_S)
        assert learner.exitcode == 1
        assert "no rows came within 1 s; workers: none" in processes.output("learner.log")


SECRET = "kept-to-us"


def files_with(secret, folder):
    return [p for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


@pytest.mark.timeout(600)
def test_the_password_of_the_redis_is_nowhere_in_what_a_run_says_and_saves(tmp_path):
    folder, ours = tmp_path / "run", {PASSWORD_VARIABLE: SECRET}
    (tmp_path / "server").mkdir()
    options = ("--requirepass", SECRET, "--save", "")
    with RedisServer(tmp_path / "server", *options) as server, Processes(tmp_path) as processes:
        actor = processes.start(
            "actor.py", "actor.log", *SMALL, f"redis.url={server.url}", environ=ours
        )
        given = ("learner.py", "learner.log", *SMALL, f"hydra.run.dir={folder}")
        start = (*given, f"redis.url={server.url}", "train.max_steps=100000")
        learner = processes.start(*start, environ=ours)
        processes.wait_for_steps(learner, folder, 1, limit_s=LIMIT_S)
        os.kill(learner.pid, signal.SIGTERM)
        learner.join(LIMIT_S)
        assert learner.exitcode == 128 + signal.SIGTERM, processes.output("learner.log")
        actor.join(LIMIT_S)
        assert "to go on:" in processes.output("learner.log")

        # It goes on with the whole URL from another variable, whatever the saved one says.
        whole = {"MY_REDIS": server.url.replace("//", f"//:{SECRET}@")}
        place = ("redis.url='${oc.env:MY_REDIS}'", "redis.name=again")
        last = len(metrics(folder)) + 1
        end = ("checkpoint.resume=auto", f"train.max_steps={last}")
        actor = processes.start("actor.py", "actor.log", *SMALL, *place, environ=whole)
        learner = processes.start(*given, *place, *end, environ=whole)
        learner.join(LIMIT_S)
        assert learner.exitcode == 0, processes.output("learner.log")
        actor.join(LIMIT_S)
    assert len(metrics(folder)) == last
    assert (folder / ".hydra" / "overrides.yaml").exists()
    assert files_with(SECRET, tmp_path) == []


def test_a_recipe_refuses_a_password_that_is_written_down_and_keeps_nothing_of_it(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(
        f"defaults: [pipeline-rl, _self_]\nredis:\n  url: redis://:{SECRET}@127.0.0.1:1/0\n"
    )
    written = {
        "argument": [f"redis.url=redis://:{SECRET}@127.0.0.1:1/0"],
        "file": [f"--config-dir={tmp_path / 'mine'}", "--config-name=mine"],
    }
    with Processes(tmp_path) as processes:
        for name, arguments in written.items():
            given = [*arguments, *SMALL, f"hydra.run.dir={tmp_path / name}"]
            learner = processes.start("learner.py", f"{name}.log", *given)
            learner.join(LIMIT_S)
            said = processes.output(f"{name}.log")
            assert learner.exitcode == 1
            assert "redis.url holds a password" in said
            assert PASSWORD_VARIABLE in said
    assert files_with(SECRET, tmp_path) == [tmp_path / "mine" / "mine.yaml"]

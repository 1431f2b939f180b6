"""The asynchronous GRPO recipe as a user runs it: the real script on a real Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipes.grpo_helper import SMALL, column, rows, weights
from recipes.script import read_metrics, run_main
from recipes.test_parallel import torchrun
from recipes.turns_helper import check_turns, remember_rows
from transformers import AutoModelForCausalLM

from torchrl_llm.data.rollouts import ends_trajectory
from torchrl_llm.errors import ConfigError, ResourceError, RewardError, WorkerError
from torchrl_llm.recipes.ray_collection import RayCollection, ray_collection
from torchrl_llm.trainers import AsyncGRPOConfig, BatchSource, load_config

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "grpo-async.py"
PROGRAM = SCRIPT.parents[2] / "docs/source/howto/programs/openai_calculator.py"
FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost", "pending")


def wait_for_cpus():
    """What a run that just ended was still building gives its CPU back when it is built."""
    import ray

    deadline = time.monotonic() + 240
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture
def run(monkeypatch):
    def go(folder, *overrides):
        wait_for_cpus()
        run_main(monkeypatch, SCRIPT, folder, *SMALL, *overrides)
        return rows(folder)

    return go


def check_accounts(table):
    """Every token of every step is accounted for, with what the step before left."""
    carried = 0
    for step in table:
        if not step.get("train/tokens_generated"):
            continue
        spent = [int(step[f"train/tokens_{fate}"]) for fate in FATES]
        assert carried + int(step["train/tokens_generated"]) == sum(spent)
        carried = spent[-1]


def test_programs_are_answered_by_collectors_and_each_of_their_tokens_is_accounted_for(
    tmp_path, run
):
    table = run(
        tmp_path,
        "env=calculator",
        f"agent.program={PROGRAM}:run",
        "inference_model.max_tokens=40",
        "train.max_policy_age=2",
        "train.max_steps=4",
    )
    check_accounts(table)
    assert column(table, "train/env_errors") == []
    assert min(column(table, "train/turns")) > 1
    assert max(column(table, "train/policy_age_max")) >= 1


@pytest.mark.timeout(900)
def test_it_trains_beside_collectors_that_may_die_stops_and_goes_on(tmp_path, run, monkeypatch):
    started, killed = [], []
    start, fill = RayCollection.start, BatchSource.fill

    def remembered(self, weights):
        started.append(self)
        start(self, weights)

    def struck(self):
        found = fill(self)
        if not killed and self.policy_age["train/policy_age_max"] >= 1:
            killed.append(started[0].members[1].worker_name)
            os.kill(started[0].members[1].pid(), signal.SIGKILL)
        return found

    monkeypatch.setattr(RayCollection, "start", remembered)
    monkeypatch.setattr(BatchSource, "fill", struck)
    # Small updates: a sampler one version behind is near, one with other weights is not.
    small = "optimizer.lr=1.0e-4"
    table = run(tmp_path, "train.max_steps=6", small)
    assert killed, "the run must have been asynchronous"
    assert [step["train/step"] for step in table] == ["0", "1", "2", "3", "4", "5", "6"]
    # The first batch is of the first weights; later ones were begun before the update.
    ages = column(table, "train/policy_age_max")
    assert (ages[0], max(ages)) == (0, 1)
    assert column(table, "train/tokens_trained")[0] == column(table, "train/tokens_generated")[0]
    assert max(column(table, "train/kl_to_inference")) < 0.1
    check_accounts(table)
    first = weights(tmp_path, 6)

    table = run(tmp_path, "train.max_steps=8", "checkpoint.resume=auto", small)
    assert [step["train/step"] for step in table][-2:] == ["7", "8"]
    assert max(column(table, "train/policy_age_max")) == 1
    check_accounts(table)
    # Had the collectors begun with the weights of the model's folder, they would be far away.
    assert max(column(table, "train/kl_to_inference")) < 0.1
    last = weights(tmp_path, 8)
    assert any((first[name] != last[name]).any() for name in first)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_learner_that_is_killed_goes_on_and_trains_nothing_twice(tmp_path):
    folder, notes = tmp_path / "run", tmp_path / "notes"
    settings = ["train.max_steps=6", "checkpoint.interval=2", "checkpoint.resume=auto"]
    for killed_at in (5, 0):  # in the middle of step 5: step 4 was saved
        learner = Path(__file__).with_name("killed_learner.py")
        command = [sys.executable, learner, notes, killed_at, SCRIPT, *SMALL, *settings]
        done = subprocess.run(
            [str(word) for word in (*command, f"hydra.run.dir={folder}")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr[-3000:]
    steps = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(steps) == 5 + 2
    kept = [traj for step in (*steps[:4], *steps[5:]) for _, traj in step]
    assert len(set(kept)) == len(kept) == 6 * 16
    groups = {group for step in steps[5:] for group, _ in step}
    assert not groups & {group for step in steps[:4] for group, _ in step}
    # Rows of the step that was lost come again where they waited when step 4 was saved.
    assert all([*steps[5], *steps[6]].count(row) == 1 for row in steps[4] if row[0] in groups)
    table = rows(folder)
    assert [step["train/step"] for step in table] == list("0123456")
    check_accounts(table)


@pytest.mark.timeout(900)
def test_two_ranks_learn_from_the_collectors_of_the_first(tmp_path):
    settings = ["train.max_steps=2", "train.parallel=fsdp2", "advantage=batch"]
    code, said = torchrun(tmp_path, *SMALL, *settings, page=SCRIPT)
    assert code == 0, said
    table = read_metrics(tmp_path / "run")
    assert [step["train/step"] for step in table] == ["0", "1", "2"]
    assert all(int(step["train/tokens_trained"]) > 0 for step in table[1:])
    check_accounts(table)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_000002")
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_a_tool_is_trained_with_beside_collectors(tmp_path, run, monkeypatch, in_flight):
    """Steps take trajectories, however many turns they have, and their ids survive the way here."""
    steps = remember_rows(monkeypatch)
    settings = ["train.max_steps=4", "optimizer.lr=1.0e-4", f"weight_sync.in_flight={in_flight}"]
    table = run(tmp_path, "env=calculator", *settings)
    assert [step["train/step"] for step in table] == ["0", "1", "2", "3", "4"]
    assert check_turns(steps) > 12
    assert [sum(map(ends_trajectory, rows)) for rows in steps] == [16] * 4
    check_accounts(table)
    assert max(column(table, "train/policy_age_max")) <= 1
    assert max(column(table, "train/kl_to_inference")) < 0.1
    first = column(table, "train/tokens_generated")[0]
    assert column(table, "train/tokens_trained")[0] == first > 0


def test_collectors_draw_from_one_queue_which_ends_the_run(tmp_path, run):
    rows = [{"query": f"What is {20 + n}+{41 + n}?", "answer": str(61 + 2 * n)} for n in range(20)]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"env.data_files={file}", "curriculum.order=queue", "curriculum.visits=1"]
    begun = run(tmp_path / "a", *settings, "train.max_steps=1")
    assert column(begun, "train/curriculum_seen") == pytest.approx([1 / 3])
    # The results are kept: the queue goes on with the others.
    more = ("train.max_steps=20", "checkpoint.resume=auto")
    table = run(tmp_path / "a", *settings, *more)
    seen = column(table, "train/curriculum_seen")
    # Twelve prompts, four a step; while results are under way, a prompt may be drawn once more.
    assert 3 <= len(seen) <= 6
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (pytest.approx(1 / 3), 1.0)
    assert column(table, "train/curriculum_active")[-1] == 0.0
    said = (tmp_path / "a" / "run.log").read_text()
    assert f"ended with step {len(seen)}: the queue is empty" in said
    check_accounts(table)


def test_the_last_collector_that_fails_says_why(tmp_path, run, monkeypatch):
    start = RayCollection.start

    def dead(self, weights):
        start(self, weights)
        for member in self.members:
            os.kill(member.pid(), signal.SIGKILL)

    monkeypatch.setattr(RayCollection, "start", dead)
    with pytest.raises(WorkerError, match="collector-"):
        run(tmp_path, "train.max_steps=2", "ray.max_restarts=0", "ray.num_collectors=1")


def test_a_reward_that_fails_in_every_collector_is_shown_here(tmp_path, run, monkeypatch, warned):
    monkeypatch.setattr("torchrl_llm.data.failures._said", set())
    file = tmp_path / "failing_reward_of_a_user.py"
    file.write_text("def fails(sample):\n    return sample.nothing\n")
    with pytest.raises(RewardError, match="none of the 16 rows of this step has a valid reward"):
        run(tmp_path / "run", "train.max_steps=2", f"reward.components.mine._target_={file}:fails")
    [shown] = [line for line in warned if "AttributeError" in line]
    # Whichever collector delivers first: its batch, or that of both.
    assert re.search(r"component 'mine' failed (\d+) times in a batch of \1 rows", shown)
    assert f'  File "{file}", line 2, in fails\n    return sample.nothing' in shown
    assert "\n  query:    What is " in shown


def test_collectors_end_the_episodes_of_conversations_that_fill_the_context(tmp_path, run):
    table = run(
        tmp_path / "run",
        "env=key_door",
        "train.max_steps=2",
        "eval.num_prompts=0",
        "env.max_prompt_length=400",
        "inference_model.max_tokens=60",
    )
    assert column(table, "train/out_of_context") == [1.0, 1.0]
    assert column(table, "train/reward_errors") == [0, 0]
    check_accounts(table)


def test_too_few_cpus_are_said_before_anything_starts():
    wait_for_cpus()
    config = load_config({"ray": {"num_collectors": 4}}, AsyncGRPOConfig)
    with (
        pytest.raises(ResourceError, match=r"grpo-async.py needs 4 CPU \(2 of 2 free\)"),
        ray_collection(config),
    ):
        pass


def test_what_a_collector_cannot_build_is_said_here():
    values = {"model": {"name": "/nowhere"}, "ray": {"num_collectors": 1}}
    config = load_config(values, AsyncGRPOConfig)
    wait_for_cpus()
    with pytest.raises(ConfigError, match="there is no"), ray_collection(config):
        pass

from __future__ import annotations

import csv
import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import yaml
from tensordict import TensorDict
from torch import nn

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import CheckpointError, ConfigError, RewardError
from torchrl_llm.trainers import RewardWatch, checkpoint
from torchrl_llm.trainers import run as run_module
from torchrl_llm.trainers.run import TrainingRun
from torchrl_llm.trainers.run_config import CheckpointConfig, EvalConfig, LoggingConfig


@dataclass
class Result:
    accuracy: float
    conversations: tuple[str, ...] = ("user: 1+1\nassistant: 2",)

    def metrics(self):
        return {"eval/accuracy": self.accuracy}


@dataclass
class Invalid:
    accuracy: float
    invalid: float
    conversations: tuple[str, ...] = ()

    def metrics(self):
        return {"eval/accuracy": self.accuracy, "eval/invalid": self.invalid}


class Model(nn.Module):
    """One trained weight, one frozen one, and the two methods that saving needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def save_pretrained(self, path):
        (path / "model.txt").write_text(str(self.weight.tolist()))


class Tokenizer:
    def save_pretrained(self, path):
        (path / "tokenizer.txt").write_text("t")


class Killed(BaseException):
    pass


class Toy:
    """A loop whose every step depends on weights, optimizer moments and the random generator."""

    def __init__(
        self, folder, *, max_steps=6, config=None, evaluate=False, watch=None, **checkpoint
    ):
        self.model = Model()
        self.optimizer = torch.optim.Adam([self.model.weight], lr=0.1)
        self.run = TrainingRun(
            folder,
            max_steps=max_steps,
            model=self.model,
            tokenizer=Tokenizer(),
            parts={"optimizer": self.optimizer},
            evaluate=(lambda: Result(self.model.weight.detach().sum().item()))
            if evaluate
            else None,
            config=config or {"optimizer.lr": 0.1},
            logging=LoggingConfig(progress=False),
            checkpoint=CheckpointConfig(**checkpoint),
            evaluation=EvalConfig(interval=2),
            watch=watch,
        )

    def train(
        self, interrupt_at=None, kill_at=None, number=signal.SIGINT, rewards=None, collected=None
    ):
        for step in self.run.steps():
            if step == kill_at:
                raise Killed
            loss = (self.model.weight - torch.randn(3)).square().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            reward = -loss.item() if rewards is None else rewards[step - 1]
            metrics = {"train/reward": reward, "train/tokens_generated": 10}
            self.run.record(metrics, None if collected is None else collected[step - 1])
            if step == interrupt_at:
                signal.raise_signal(number)
        return self


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if not k.startswith("perf/")}
            for row in csv.DictReader(file)
        ]


def seeded(seed=0):
    torch.manual_seed(seed)


def test_k_steps_then_a_kill_then_the_rest_equal_an_uninterrupted_run(tmp_path):
    seeded()
    whole = Toy(tmp_path / "whole", evaluate=True).train()
    seeded()
    first = Toy(tmp_path / "cut", evaluate=True).train(interrupt_at=3)
    assert first.run.step == 3
    seeded(99)  # a new process begins with another state of the generator
    rest = Toy(tmp_path / "cut", evaluate=True, resume="auto").train()
    assert torch.equal(whole.model.weight, rest.model.weight)
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    assert [row["train/step"] for row in rows(tmp_path / "cut")] == list("0123456")


def test_what_ran_after_the_last_checkpoint_is_run_again_not_skipped(tmp_path):
    seeded()
    whole = Toy(tmp_path / "whole", max_steps=5).train()
    seeded()
    toy = Toy(tmp_path / "cut", max_steps=5, interval=2)

    with pytest.raises(Killed):
        toy.train(kill_at=4)  # step 3 is behind the checkpoint of step 2
    assert [row["train/step"] for row in rows(tmp_path / "cut")] == ["1", "2", "3"]
    rest = Toy(tmp_path / "cut", max_steps=5, interval=2, resume="auto").train()
    assert torch.equal(whole.model.weight, rest.model.weight)
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo-sync.py", "seed=1", "hydra.run.dir=old"])
    toy = Toy(tmp_path).train(interrupt_at=2)
    text = capsys.readouterr().err
    assert toy.run.step == 2
    assert (tmp_path / "checkpoints" / "step_000002" / "model.txt").exists()
    assert "stopping after step 2" in text
    expected = f"python grpo-sync.py seed=1 hydra.run.dir={tmp_path} checkpoint.resume=auto"
    assert expected in text


def test_passwords_are_neither_printed_nor_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "redis.url=redis://:secret@host"])
    config = {
        "optimizer.lr": 0.1,
        "server": "https://user:secret@host",
        "all": ["redis://:secret@h"],
    }
    Toy(tmp_path, config=config).train(interrupt_at=3)
    Toy(tmp_path, config=config, resume="auto").train()
    assert "redis.url=redis://:***@host" in capsys.readouterr().err
    Toy(tmp_path / "other").train(interrupt_at=3)
    with pytest.raises(ConfigError, match="these keys differ") as refused:
        Toy(tmp_path / "other", config=config, resume="auto")
    assert "secret" not in str(refused.value)
    for path in tmp_path.rglob("*.*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path


def test_auto_begins_where_there_is_nothing_and_never_refuses_an_old_run(tmp_path):
    Toy(tmp_path, max_steps=2, resume="auto").train()
    with pytest.raises(CheckpointError, match=r"holds a run up to step 2.*checkpoint.resume=auto"):
        Toy(tmp_path, max_steps=2)


def test_a_run_that_is_complete_is_shown_again_and_not_repeated(tmp_path, capsys):
    Toy(tmp_path, max_steps=3, evaluate=True).train()
    before = (tmp_path / "metrics.csv").read_bytes()
    toy = Toy(tmp_path, max_steps=3, evaluate=True, resume="auto").train()
    toy.run.finish()
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert "none of the first 1 held-out conversations" in capsys.readouterr().out


def test_a_changed_setting_is_not_silently_taken_over_from_the_checkpoint(tmp_path):
    Toy(tmp_path, max_steps=2).train()
    changed = {"optimizer.lr": 0.2}
    with pytest.raises(ConfigError, match=r"optimizer.lr: 0.1 -> 0.2"):
        Toy(tmp_path, config=changed, resume="auto")
    # Where the run ends and what it writes may change.
    longer = {"optimizer.lr": 0.1, "train.max_steps": 4, "logging.progress": False}
    assert Toy(tmp_path, config=longer, max_steps=4, resume="auto").train().run.step == 4


def test_another_model_is_refused(tmp_path, monkeypatch):
    Toy(tmp_path, max_steps=2).train()
    original = Model.__init__

    def bigger(self):
        original(self)
        self.extra = nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(Model, "__init__", bigger)
    with pytest.raises(CheckpointError, match=r"written by another model.*extra"):
        Toy(tmp_path, resume="auto")


def test_evaluations_happen_before_at_the_interval_and_at_the_end(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=5, evaluate=True).train()
    evaluated = [row["train/step"] for row in rows(tmp_path) if row["eval/accuracy"]]
    assert evaluated == ["0", "2", "4", "5"]
    toy.run.finish()
    text, notices = capsys.readouterr()
    assert "train/reward over steps" in text
    assert "training changed none of the first 1 held-out conversations" in text
    first, *_, last = (row["eval/accuracy"] for row in rows(tmp_path) if row["eval/accuracy"])
    found = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)
    assert found["held-out greedy accuracy"] == f"{float(first):.3f} -> {float(last):.3f}"
    assert found["steps"].startswith("5 in 0:0")
    assert found["tokens"].startswith("50, ")
    assert found["model"] == str(tmp_path / "checkpoints" / "step_000005")
    assert notices == ""
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_records_nothing_is_an_error(tmp_path):
    toy = Toy(tmp_path)
    with pytest.raises(RuntimeError, match=r"step 1 ended without TrainingRun.record"):
        for _ in toy.run.steps():
            pass


def test_a_disk_that_is_full_ends_the_run_with_the_last_checkpoint_intact(tmp_path, monkeypatch):
    toy = Toy(tmp_path, interval=1)
    real = checkpoint.write_tensors
    calls = []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"No space left.*step 1 is intact"):
        toy.train()
    monkeypatch.undo()
    assert Toy(tmp_path, interval=1, resume="auto").train().run.step == 6


def test_settings_of_evaluation_and_checkpoints_are_checked():
    with pytest.raises(ConfigError, match=r"eval.interval must be at least 1"):
        EvalConfig(interval=0)
    with pytest.raises(ConfigError, match=r"checkpoint.interval must be at least 1"):
        CheckpointConfig(interval=0)
    assert run_module.EvalConfig().interval is None


def test_a_damaged_newest_checkpoint_costs_some_steps_and_is_said(tmp_path, capsys):
    seeded()
    whole = Toy(tmp_path / "whole").train()
    seeded()
    Toy(tmp_path / "cut", interval=2, keep_last=3, max_steps=4).train()
    file = tmp_path / "cut" / "checkpoints" / "step_000004" / "trainer_state/state.json"
    file.write_bytes(file.read_bytes()[:100])
    rest = Toy(tmp_path / "cut", interval=2, keep_last=3, resume="auto")
    said = capsys.readouterr().err
    assert f"the checksum of {file} is wrong" in said
    assert f"resumed from {tmp_path}/cut/checkpoints/step_000002" in said
    rest.train()
    assert torch.equal(whole.model.weight, rest.model.weight)
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


def test_metrics_that_were_lost_are_mended_and_it_is_said(tmp_path, capsys):
    Toy(tmp_path, max_steps=3, evaluate=True).train()
    before = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").unlink()
    Toy(tmp_path, max_steps=3, evaluate=True, resume="auto")
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert "metrics.csv was missing; mended from the checkpoint, to step 3" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_saves_and_does_not_exit_like_a_finished_one(tmp_path, number):
    toy = Toy(tmp_path, max_steps=4).train(interrupt_at=2, number=number)
    assert toy.run.step == 2
    with pytest.raises(SystemExit) as exit_:
        toy.run.finish()
    assert exit_.value.code == 128 + number
    rest = Toy(tmp_path, max_steps=4, resume="auto").train(interrupt_at=4, number=number)
    rest.run.finish()  # the signal came when nothing was left to do


def test_what_a_kill_left_half_written_is_gone_when_the_run_goes_on(tmp_path):
    Toy(tmp_path, max_steps=2).train()
    left = tmp_path / "checkpoints" / ".partial_step_000003"
    left.mkdir()
    Toy(tmp_path, resume="auto")
    assert not left.exists()


def stopped_in_evaluation(folder, monkeypatch, at, number, **settings):
    """A toy whose evaluation gets a signal at a step and then looks at thousand prompts."""
    toy, looked = Toy(folder, evaluate=True, **settings), []

    def evaluate():
        looked.append(toy.run.step)
        if toy.run.step == at:
            signal.raise_signal(number)
            looked.extend(["a prompt"] * 1000)
        return Result(0.5)

    monkeypatch.setattr(toy.run, "_evaluate", evaluate)
    return toy, looked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_evaluation_before_training_ends_it_at_once(
    tmp_path, monkeypatch, capsys, number
):
    toy, looked = stopped_in_evaluation(tmp_path, monkeypatch, 0, number)
    toy.train()
    assert (looked, toy.run.step) == ([0], 0)
    assert "stopped before the first step; there is nothing to save" in capsys.readouterr().err
    assert not (tmp_path / "metrics.csv").exists()
    with pytest.raises(SystemExit) as exit_:
        toy.run.finish()
    assert exit_.value.code == 128 + number


@pytest.mark.parametrize("interval", [2, 5], ids=["saved there", "saved at the end"])
@pytest.mark.parametrize("at", [2, 4, 6])
def test_an_evaluation_that_a_signal_has_cut_is_done_by_the_run_that_goes_on(
    tmp_path, monkeypatch, capsys, at, interval
):
    seeded()
    whole = Toy(tmp_path / "whole", evaluate=True).train()
    seeded()
    folder, found = tmp_path / "cut", {"interval": interval, "resume": "auto"}
    toy, looked = stopped_in_evaluation(folder, monkeypatch, at, signal.SIGTERM, **found)
    toy.train()
    assert (looked, toy.run._store.steps()[-1]) == ([*range(0, at + 1, 2)], at)
    assert [int(row["train/step"]) for row in rows(folder)] == [*range(at)]
    assert f"step_{at:06}; to go on:" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        toy.run.finish()
    assert exit_.value.code == 128 + signal.SIGTERM
    seeded(99)
    # The first one that goes on is stopped at the same place.
    again, looked = stopped_in_evaluation(folder, monkeypatch, at, signal.SIGINT, **found)
    again.train()
    assert looked == [at]
    rest = Toy(folder, evaluate=True, **found).train()
    assert torch.equal(whole.model.weight, rest.model.weight)
    found, expected = rows(folder), rows(tmp_path / "whole")
    for row in found[:at]:  # whose stand-in says 0.5
        row.update({k: expected[int(row["train/step"])][k] for k in row if k.startswith("eval/")})
    assert found == expected
    assert "mended" not in capsys.readouterr().err


def test_an_evaluation_that_is_asked_for_by_name_is_not_cut_by_an_earlier_signal(tmp_path):
    toy = Toy(tmp_path, evaluate=True).train(interrupt_at=2)
    assert toy.run.evaluate().accuracy == toy.model.weight.sum().item()


# Forked, so that the other processes need not import everything once more.
FORK = multiprocessing.get_context("fork")


def hold_a_run(folder, begun):
    run = Toy(folder)
    begun.set()
    while run:
        signal.pause()


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_dead(tmp_path):
    begun = FORK.Event()
    first = FORK.Process(target=hold_a_run, args=(tmp_path, begun), daemon=True)
    first.start()
    try:
        assert begun.wait(30)
        for resume in ("never", "auto"):
            with pytest.raises(CheckpointError, match=rf"another run is at work.*{first.pid}"):
                Toy(tmp_path, resume=resume)
    finally:
        first.kill()
        first.join()
    assert Toy(tmp_path, max_steps=1).train().run.step == 1


def train_on_a_terminal(folder, terminal, begun, gone):
    sys.stderr = os.fdopen(terminal, "w", buffering=1)
    try:
        toy = Toy(folder)
        begun.set()
        gone.wait(30)
        toy.train(interrupt_at=2, number=signal.SIGHUP).run.finish()
    except SystemExit as end:
        os._exit(end.code)


def begin_at_once(folder, gate, begun, refused):
    gate.wait()
    try:
        run = Toy(folder)
    except CheckpointError as error:
        refused.put(str(error))
        return
    begun.put(os.getpid())
    while run:
        signal.pause()


def test_of_runs_that_begin_at_once_in_one_empty_folder_one_does(tmp_path):
    gate, begun, refused = FORK.Barrier(6), FORK.Queue(), FORK.Queue()
    runs = [
        FORK.Process(target=begin_at_once, args=(tmp_path / "new", gate, begun, refused))
        for _ in range(6)
    ]
    for run in runs:
        run.start()
    try:
        told = [refused.get(timeout=60) for _ in range(5)]
        assert all("another run is at work in" in text for text in told)
        assert begun.get(timeout=60) in {run.pid for run in runs}
        assert begun.empty()
    finally:
        for run in runs:
            run.kill()
            run.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_a_save_is_done_at_a_signal_and_not_at_a_second_ctrl_c(tmp_path, monkeypatch, number):
    seeded()
    whole = Toy(tmp_path / "whole").train()
    seeded()
    toy, real = Toy(tmp_path / "cut", interval=1), checkpoint.write_tensors

    def interrupted(*args):
        if toy.run.step == 3 and not toy.run.stop.requested:
            for each in [number] if number else [signal.SIGINT] * 2:
                signal.raise_signal(each)
        return real(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", interrupted)
    with nullcontext() if number else pytest.raises(KeyboardInterrupt):
        toy.train()
    monkeypatch.undo()
    assert (toy.run.step, toy.run._store.steps()) == (3, [2, 3] if number else [1, 2])
    rest = Toy(tmp_path / "cut", interval=1, resume="auto").train()
    assert torch.equal(whole.model.weight, rest.model.weight)
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))


def test_a_folder_in_which_nothing_can_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file/run cannot be the folder.*another hydra"):
        Toy(tmp_path / "file" / "run")
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        toy = Toy(mount / "run", interval=1, max_steps=1).train()
        toy.run._lock.close()
        for stream in (toy.run._log, toy.run._table):
            getattr(stream, "close", lambda: None)()
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(CheckpointError, match=r"Read-only file system; choose another"):
            Toy(mount / "run", resume="auto")
        with pytest.raises(CheckpointError, match=r"Read-only file system.*step 1 is intact"):
            toy.run.save()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_run_whose_terminal_is_gone_saves(tmp_path):
    begun, gone = FORK.Event(), FORK.Event()
    screen, terminal = pty.openpty()
    run = FORK.Process(target=train_on_a_terminal, args=(tmp_path, terminal, begun, gone))
    run.start()
    os.close(terminal)
    assert begun.wait(30)
    os.close(screen)
    gone.set()
    run.join(60)
    assert run.exitcode == 128 + signal.SIGHUP
    assert (tmp_path / "checkpoints" / "step_000002").exists()


class Down:
    def log_scalar(self, name, value, step=None):
        raise OSError(28, "No space left on device")


def test_a_logger_that_raises_does_not_end_the_run_which_counts_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "make_loggers", lambda *args, **kwargs: [Down()])
    toy = Toy(tmp_path, max_steps=3).train()
    toy.run.finish()
    assert "Down raised 3 times" in capsys.readouterr().err
    assert [row["train/step"] for row in rows(tmp_path)] == ["1", "2", "3"]


NAN = float("nan")


def test_a_run_without_any_valid_reward_does_not_end_like_one_that_learned(tmp_path):
    toy = Toy(tmp_path / "none", max_steps=2).train(rewards=[NAN, NAN])
    with pytest.raises(RewardError, match="none of the 2 steps had a valid reward"):
        toy.run.finish()
    Toy(tmp_path / "one", max_steps=3).train(rewards=[NAN, 0.0, NAN]).run.finish()


def test_the_last_checkpoint_is_pushed_once_the_run_is_done(tmp_path, monkeypatch, capsys):
    pushed = []

    def push(folder, name, *, command):
        pushed.append((folder.name, name))
        raise CheckpointError("no such hub")

    monkeypatch.setattr(run_module, "push_to_hub", push)
    toy = Toy(tmp_path, push_to_hub="ann/toy").train(interrupt_at=3)
    with pytest.raises(SystemExit):
        toy.run.finish()
    assert pushed == []  # what was stopped is to go on
    Toy(tmp_path, push_to_hub="ann/toy", resume="auto").train().run.finish()
    assert pushed == [("step_000006", "ann/toy")]
    said = capsys.readouterr().err
    assert "no such hub" in said
    assert "Traceback" not in said


def test_the_folder_holds_the_configuration_by_groups_without_passwords(tmp_path):
    config = {
        "seed": 0,
        "data.source": [{"question": "1+1"}],
        "redis.url": "redis://:secret@host",
        "reward.function": len,
    }
    Toy(tmp_path, config=config)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "seed": 0,
        "data": {"source": [{"question": "1+1"}]},
        "redis": {"url": "redis://:***@host"},
        "reward": {"function": "<built-in function len>"},
    }


def test_a_resumed_run_writes_the_configuration_that_it_goes_on_with(tmp_path):
    config = {"optimizer.lr": 0.1, "train.max_steps": 2}
    Toy(tmp_path, max_steps=2, config=config).train()
    Toy(tmp_path, max_steps=3, config=config | {"train.max_steps": 3}, resume="auto")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"] == {"max_steps": 3}


def test_one_evaluation_is_compared_with_nothing(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=0, evaluate=True).train()
    toy.run.finish()
    (line,) = (t for t in capsys.readouterr().out.splitlines() if "held-out greedy" in t)
    assert line.split("  ") == ["held-out greedy accuracy", "0.000"]


def test_an_accuracy_of_counted_prompts_is_told_with_its_confidence_interval(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=0)
    toy.run._evaluate = lambda: SimpleNamespace(
        metrics=lambda: {"eval/accuracy": 0.9, "eval/num_prompts": 10}, conversations=()
    )
    toy.train().run.finish()
    assert "held-out greedy accuracy  0.900 (0.596 to 0.982)" in capsys.readouterr().out


def test_the_log_of_a_run_without_hydra_holds_what_it_said_and_grows_when_it_goes_on(
    tmp_path, capsys
):
    toy = Toy(tmp_path, evaluate=True).train(interrupt_at=2)
    with pytest.raises(SystemExit):
        toy.run.finish()
    toy = Toy(tmp_path, evaluate=True, resume="auto").train()
    toy.run.finish()
    log = (tmp_path / "run.log").read_text()
    said = capsys.readouterr()
    for line in (said.out + said.err).splitlines():
        assert line in log
    order = ["stopping after step 2", "to go on:", "resumed from", "held-out greedy accuracy"]
    places = [log.index(text) for text in order[:3]] + [log.rindex(order[3])]
    assert places == sorted(places)
    assert log.count("---") == 2


def test_parts_of_a_step_are_measured_and_added_up(tmp_path, monkeypatch):
    now = iter([0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 10.0])
    toy = Toy(tmp_path, max_steps=2)
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: next(now))
    for step in toy.run.steps():
        for _ in range(3 - step):
            with toy.run.timed("sample"):
                pass
        toy.run.record({"train/reward": 1.0, "train/tokens_generated": 12})
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    # Begun at 0, sampled from 1 to 1.5 and from 2 to 3, ended at 4; then 6, 8 to 9, 10.
    assert [float(row["perf/sample_s"]) for row in table] == [1.5, 1.0]
    assert [float(row["perf/step_s"]) for row in table] == [4.0, 4.0]
    assert [float(row["perf/tokens_per_s"]) for row in table] == [3.0, 3.0]
    assert all(10 < float(row["perf/rss_mb"]) < 100_000 for row in table)


def answers(*rewards):
    """A group of answers to one prompt."""
    return lazy_rows(
        [
            TensorDict(
                query="1+1?",
                text={"response": f"worth {reward}"},
                answer="2",
                group_id=torch.tensor(0),
                traj_id=torch.tensor(number),
                next={
                    "reward": torch.tensor([[float(reward)]]),
                    "reward_valid": torch.tensor(True),
                    "done": torch.tensor([True]),
                },
            )
            for number, reward in enumerate(rewards)
        ]
    )


def test_two_answers_are_shown_at_the_first_step_and_every_so_many_steps(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=5)
    toy.run._logging.samples = 2
    for step in toy.run.steps():
        toy.run.record(
            {"train/reward": 0.5, "train/tokens_generated": 10}, answers(step, 0.5, 0.25)
        )
    said = capsys.readouterr().err
    shown = re.findall(r"step (\d), two answers.*?worth (\d).*?worth (0.25)", said, re.DOTALL)
    assert shown == [(n, n, "0.25") for n in "124"]
    assert said in (tmp_path / "run.log").read_text()
    with pytest.raises(ConfigError, match=r"logging\.samples must be at least 1 or null"):
        LoggingConfig(samples=0)


def collected(*rewards):
    """The rows of a step."""
    error = {"message": "'x'", "place": "reward.py:3, in f", "source": "reward", "traceback": ""}
    return lazy_rows(
        [
            TensorDict(
                query="1+1?",
                next={
                    "reward": torch.tensor([[reward]]),
                    "reward_valid": torch.tensor(reward == reward),
                    "done": torch.tensor([True]),
                    "error": TensorDict({"type": "" if reward == reward else "KeyError", **error}),
                },
            )
            for reward in rewards
        ]
    )


def test_a_step_without_any_valid_reward_is_saved_and_ends_the_run_which_goes_on_when_it_is_mended(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py", "optimizer.lr=0.1"])
    broken = [collected(0.0, 1.0), collected(NAN, 0.0), collected(NAN, NAN)]
    with pytest.raises(RewardError, match="none of the 2 rows of this step") as error:
        Toy(tmp_path, max_steps=5).train(collected=broken)
    assert "step 3: " in str(error.value)
    assert "2 times, 2 of them by KeyError: 'x' at reward.py:3, in f." in str(error.value)
    command = f"python train.py optimizer.lr=0.1 hydra.run.dir={tmp_path} checkpoint.resume=auto"
    assert command in str(error.value)
    toy = Toy(tmp_path, max_steps=5, resume="auto")
    assert toy.run.step == 3
    toy.train(collected=[collected(0.0, 1.0)] * 5).run.finish()
    assert [row["train/step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5"]


def test_where_it_is_to_go_on_it_does_and_what_failed_most_is_told_at_the_end(tmp_path, capsys):
    watch = RewardWatch(on_all_invalid="continue")
    broken = [collected(NAN, NAN), collected(NAN, 0.0), collected(0.0, 1.0)]
    toy = Toy(tmp_path, max_steps=3, watch=watch).train(collected=broken)
    toy.run.finish()
    told = capsys.readouterr().err
    assert "3 times, 3 of them by KeyError: 'x' at reward.py:3, in f, in the whole run" in told


def test_held_out_prompts_without_a_reward_are_told_at_the_end(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=2, evaluate=True)
    shares = iter((0.0, 0.25))
    toy.run._evaluate = lambda: Invalid(0.0, next(shares))
    toy.train().run.finish()
    told = capsys.readouterr().err
    assert "step 2: 25% of the held-out prompts have no valid reward and count as wrong" in told
    assert "step 0" not in told


def test_steps_without_a_signal_are_counted_over_a_resume_and_told_once(tmp_path, capsys):
    flat = [collected(0.0, 0.0)] * 6
    Toy(tmp_path, max_steps=4, interval=4).train(collected=flat)
    assert "no signal" not in capsys.readouterr().err
    Toy(tmp_path, max_steps=6, resume="auto").train(collected=flat)
    told = capsys.readouterr().err
    assert told.count("no signal: in each of the last 5 steps") == 1


def test_how_a_run_deals_with_rewards_may_change_when_it_goes_on(tmp_path):
    keys = {"reward.on_all_invalid": "error", "train.no_signal_steps": 5}
    Toy(tmp_path, max_steps=1, config=keys).train()
    changed = {"reward.on_all_invalid": "continue", "train.no_signal_steps": None}
    assert Toy(tmp_path, max_steps=1, config=changed, resume="auto").run.step == 1


def next_commands(toy, capsys):
    toy.run.finish()
    rows = [re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    names = ("look at it", "talk to it", "go on", "train longer")
    return {row[0]: row[1] for row in rows if row[0] in names}


def test_a_run_ends_with_the_commands_that_look_at_it_and_train_it_longer(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["torchrl-llm train grpo", "seed=1", "train.max_steps=2", "hydra.run.dir=a b"]
    )
    config = {"train.max_steps": 2}
    assert next_commands(Toy(tmp_path / "a b", max_steps=2, config=config).train(), capsys) == {
        "look at it": "torchrl-llm view 'a b' --open",
        "talk to it": "torchrl-llm chat 'a b'",
        "train longer": "torchrl-llm train grpo seed=1 hydra.run.dir='a b' checkpoint.resume=auto "
        "train.max_steps=4",
    }
    toy = Toy(tmp_path / "a b", max_steps=1, config={"train.max_steps": 1}, resume="auto").train()
    assert next_commands(toy, capsys)["train longer"].endswith(" train.max_steps=4")  # 2 are done
    toy = Toy(tmp_path / "c", max_steps=6, config={"train.max_epochs": 3}).train()
    assert next_commands(toy, capsys)["train longer"].endswith(" train.max_epochs=6")
    toy = Toy(tmp_path / "d", max_steps=2, config={"steps": 2}).train()
    assert "train longer" not in next_commands(toy, capsys)  # no key makes it longer


def test_a_run_in_python_says_how_python_trains_it_longer(tmp_path, capsys):
    toy = Toy(tmp_path, max_steps=2, config={"train.max_steps": 2})
    toy.run.how_to_resume = "GRPO(...).train()"
    longer = next_commands(toy.train(), capsys)["train longer"]
    assert longer == "GRPO(...).train() with train.max_steps=4"


def test_a_run_tells_its_size_and_its_rows_unless_it_is_quiet(tmp_path, capsys):
    def begin(name, model, progress):
        TrainingRun(
            tmp_path / name,
            max_steps=1,
            model=model,
            tokenizer=Tokenizer(),
            parts={},
            logging=LoggingConfig(progress=progress),
            num_rows=(1200, None) if name == "half" else (1200, 64),
        )
        return capsys.readouterr().err

    assert begin("quiet", Model(), False) == ""
    # three weights and a frozen one
    assert begin("half", Model(), True) == (
        "4 parameters, 3 of them trained, cpu, float32, 1,200 rows to train on\n"
    )
    linear = nn.Linear(1000, 8100, bias=False, dtype=torch.bfloat16)
    assert begin("whole", linear, True) == (
        "8.1M parameters, cpu, bfloat16, 1,200 rows to train on, 64 held out\n"
    )

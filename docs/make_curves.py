"""Curves of the documentation: runs the recipes, keeps what they reached, and draws it.

    python docs/make_curves.py               # all of them: a quarter of an hour of one CPU core
    python docs/make_curves.py tools game    # some
    python docs/make_curves.py --draw        # draws the kept figures again, without a run

Each picture is a file of ``docs/source/_static/curves`` next to the figures that it shows. A page
names the command of the run; ``RUNS`` has them all. ``asynchronous`` needs Ray.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CURVES = ROOT / "docs/source/_static/curves"
GREY = "#7d8590"  # read on white and on black
COLOURS = ("#3b82d6", "#e07b39", "#2f9e6e", "#a66bd3", "#d6455d", "#a98a1e")

Points = list[tuple[float, float]]
Figures = dict[str, Points]  # by the name of a line


@dataclass(frozen=True)
class Picture:
    """What is run, and how it is drawn.

    Attributes:
        commands: one after the other, by a name; a line may read what any of them wrote.
        read: from the folder in which each command ran, the lines.
        smooth: steps over which a line is averaged where it is drawn.
        dots: lines that are drawn as points and not averaged.
    """

    commands: dict[str, str]
    read: Callable[[Path], Figures]
    y: str
    x: str = "training step"
    smooth: int = 1
    dots: tuple[str, ...] = ()
    bottom: float | None = 0.0


def metrics(folder: Path, column: str) -> Points:
    """A column of a run's metrics, by step."""
    with (folder / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [(float(r["train/step"]), float(r[column])) for r in rows if r.get(column)]


def columns(**lines: str) -> Callable[[Path], Figures]:
    """Columns of the only run, by the name of their line."""
    return lambda place: {
        name.replace("_", " "): metrics(place / "run", column) for name, column in lines.items()
    }


def every_run(column: str) -> Callable[[Path], Figures]:
    """One column of each run, which gives its line the name."""
    return lambda place: {
        folder.name: metrics(folder, column) for folder in sorted(place.iterdir(), key=_born)
    }


def _born(folder: Path) -> int:
    return int((folder / "number").read_text())


def pass_at_k(place: Path) -> Figures:
    """Share of problems that at least one of k answers solves, for each run."""
    figures: Figures = {}
    for name in ("before training", "after training"):
        counts: dict[str, list[bool]] = {}
        for line in (place / name / "run/answers_arithmetic.jsonl").read_text().splitlines():
            answer = json.loads(line)
            counts.setdefault(answer["messages"][0]["content"], []).append(answer["success"])
        figures[name] = [
            (k, statistics.fmean(_any_of(k, right) for right in counts.values()))
            for k in range(1, 11)
        ]
    return figures


def intervals(place: Path) -> Figures:
    """Ends of the interval of each model's accuracy on its first prompts."""
    import torch

    from torchrl_llm.functional import wilson_interval

    figures: Figures = {}
    for name in ("step 10", "step 20"):
        lines = (place / name / "run/answers_arithmetic.jsonl").read_text().splitlines()
        right = [json.loads(line)["success"] for line in lines]
        for num in (16, 32, 64, 128, 256, 512):
            ends = wilson_interval(torch.tensor(sum(right[:num])), torch.tensor(num))
            for end, value in ends._asdict().items():
                figures.setdefault(f"{name}, {end}", []).append((num, value.item()))
    return figures


def _any_of(k: int, right: list[bool]) -> float:
    """Probability that k answers drawn without replacement have a right one."""
    wrong, missed = len(right) - sum(right), 1.0
    for drawn in range(k):
        missed *= max(wrong - drawn, 0) / (len(right) - drawn)
    return 1.0 - missed


def sweep_by(keys: list[str], column: str) -> Callable[[Path], Figures]:
    """The mean over the runs of a sweep with the same keys, as ``torchrl-llm plot --by`` has it."""

    def read(place: Path) -> Figures:
        from torchrl_llm.trainers.run_comparison import find_runs, group_runs, mean_curve

        runs, figures = find_runs([str(place / "run/sweep")])[0], {}
        for values, group in group_runs(runs, keys).items():
            curve = mean_curve([run.metrics[column] for run in group])
            figures[", ".join(map(str, values))] = list(zip(curve.steps, curve.values, strict=True))
        return figures

    return read


def context_strategies(place: Path) -> Figures:
    """Tokens of each turn's prompt in one walk through the maze, by context strategy."""
    from torchrl_llm.envs import KeyDoorEnv
    from torchrl_llm.envs.transforms import FullDialog, SlidingWindow, TruncatedThinking
    from torchrl_llm.modules import FakeWrapper, load_tokenizer

    tokenizer, figures = load_tokenizer(), {}
    move = "<think>North is a wall, so I try the other way and look again.</think><move>{}</move>"
    for strategy in (FullDialog(), TruncatedThinking(), SlidingWindow(3)):
        moves = ["east", "west"] * 6
        policy = FakeWrapper([move.format(step) for step in moves], tokenizer=tokenizer)
        env = KeyDoorEnv(num_envs=1, shuffle=False).append_transform(strategy)
        steps = env.rollout(len(moves), policy)
        lengths = [len(ids) for ids in steps["tokens"].get("prompt", as_list=True)[0]]
        figures[type(strategy).__name__] = list(enumerate(lengths, 1))
    return figures


GRPO = "torchrl-llm train grpo"
FEW = f"{GRPO} train.max_steps=30 train.optim_batch_size=128 eval.interval=null"
GAME = (
    f"{GRPO} env=tic_tac_toe model.name=../player/run/checkpoints/step_000200 "
    "env.options.actions=bare env.system_prompt='Play tic-tac-toe.' inference_model.max_tokens=4 "
    "train.num_threads=1 train.prompts_per_batch=16 train.max_steps=60 optimizer.lr=4e-4 "
    "optimizer.scheduler=linear optimizer.warmup_steps=5 eval.num_prompts=256 eval.interval=20"
)
NIM = (
    f"{GRPO} env=nim.py:Nim env.max_steps=8 env.system_prompt=Nim. inference_model.max_tokens=4 "
    "optimizer.lr=3e-4 train.max_steps=40 train.prompts_per_batch=16 eval.num_prompts=128"
)
SELF_PLAY = "torchrl-llm train self-play logging.progress=false agents.players_folder=null"
REFERENCE = f"{GRPO} train.max_steps=60 eval.interval=null train.kl_to_ref_coeff"
DISTIL = "torchrl-llm train distillation"
EVALUATE = (
    "torchrl-llm evaluate tasks=[arithmetic] inference_model.max_tokens=6 "
    "inference_model.temperature=1 eval.repeats=10 eval.num_prompts=256"
)
JUDGE = (
    f"{GRPO} data=qa.csv reward.components.right._target_=judge.py:exactly "
    "reward.components.right.weight=0 reward.components.judge._target_=judge.py:judge "
    "train.max_steps=40 eval.interval=10"
)
FROM_TRL = (
    f"{GRPO} data=qa.csv reward=exact env.repeats=8 train.prompts_per_batch=16 "
    "inference_model.max_tokens=16 optimizer.lr=1e-3 train.max_steps=40 eval.interval=10"
)
LEARNING = {"reward_of_sampled_answers": "train/reward", "held-out_accuracy": "eval/accuracy"}
RUNS = {
    "quickstart": Picture(
        {"run": GRPO}, columns(**LEARNING), "reward, accuracy", dots=("held-out accuracy",)
    ),
    "tools": Picture(
        {"run": f"{GRPO} env=calculator eval.interval=10"},
        columns(**LEARNING),
        "reward, accuracy",
        smooth=3,
        dots=("held-out accuracy",),
    ),
    "own_tool": Picture(
        {"run": f"{GRPO} env=calculator env.dataset=clock_task:ClockEnv eval.interval=10"},
        columns(**LEARNING),
        "reward, accuracy",
        smooth=3,
        dots=("held-out accuracy",),
    ),
    "algorithms": Picture(
        {
            "grpo": f"{FEW} loss.aggregation=sequence_mean",
            "dapo": f"{FEW} loss=dapo filter.zero_variance=resample reward.overlong_cache=2",
            "gspo": f"{FEW} loss=gspo",
            "cispo": f"{FEW} loss=cispo",
            "rloo": f"{FEW} loss=reinforce advantage=leave_one_out",
            "ppo": f"{FEW} loss=ppo advantage=gae",
        },
        every_run("train/success"),
        "share of right answers",
        smooth=3,
    ),
    "sweep": Picture(
        {
            "run": f"{GRPO} -m loss=grpo,gspo optimizer.lr=1e-4,1e-3 seed=0,1 train.max_steps=30 "
            "train.optim_batch_size=128 eval.num_prompts=0 hydra.sweep.dir=sweep"
        },
        sweep_by(["loss.type", "optimizer.lr"], "train/reward"),
        "reward, mean of two seeds",
        smooth=3,
    ),
    "game": Picture(
        {
            "player": "torchrl-llm train imitate",
            "seed 0": f"{GAME} seed=0",
            "seed 1": f"{GAME} seed=1",
        },
        lambda place: {
            name: metrics(place / name, "train/reward") for name in ("seed 0", "seed 1")
        },
        "reward of a game",
        smooth=5,
        bottom=None,
    ),
    "nim": Picture(
        {"seed 0": f"{NIM} seed=0", "seed 1": f"{NIM} seed=1"},
        every_run("train/reward"),
        "reward of a game",
        smooth=3,
        bottom=None,
    ),
    "self_play": Picture(
        {"seed 0": f"{SELF_PLAY} seed=0", "seed 1": f"{SELF_PLAY} seed=1"},
        lambda place: {
            f"{player}, {seed}": metrics(place / seed, f"eval/{player}/won")
            for player in "XO"
            for seed in ("seed 0", "seed 1")
        },
        "won against random moves",
    ),
    "reference": Picture(
        {
            "coefficient 0.000001": f"{REFERENCE}=1e-6",
            "coefficient 0.04": f"{REFERENCE}=0.04",
            "coefficient 0.5": f"{REFERENCE}=0.5",
        },
        every_run("train/kl_to_ref"),
        "divergence, nats a token",
        smooth=3,
    ),
    "distillation": Picture(
        {
            "as it is": f"{DISTIL} eval.interval=5",
            "k2": f"{DISTIL} loss.estimator=k2 eval.interval=5",
            "two teachers": f"{DISTIL} teacher.by_domain=true eval.interval=5",
            "two teachers, advantage": f"{DISTIL} teacher.by_domain=true loss.estimator=advantage "
            "eval.interval=5",
        },
        every_run("eval/accuracy"),
        "held-out accuracy",
    ),
    "preferences": Picture(
        {
            name: f"torchrl-llm train dpo loss={name} train.max_epochs=2 eval.interval=2"
            for name in ("dpo", "simpo", "orpo", "kto")
        },
        every_run("eval/accuracy"),
        "held-out accuracy",
    ),
    "expert_iteration": Picture(
        {"run": "torchrl-llm train expert-iteration"},
        columns(
            reward_of_sampled_answers="train/reward",
            answers_that_are_kept="train/selected",
            **{"held-out_accuracy": "eval/accuracy"},
        ),
        "share",
        dots=("held-out accuracy",),
    ),
    "pico": Picture(
        {"run": "torchrl-llm train pico"},
        columns(reward="train/reward", exact="train/success"),
        "reward, share of exact answers",
        smooth=3,
    ),
    "asynchronous": Picture(
        {
            "synchronous": GRPO,
            "asynchronous": "torchrl-llm train grpo-async",
            "asynchronous, age 4": "torchrl-llm train grpo-async train.max_policy_age=4",
        },
        every_run("train/reward"),
        "reward of sampled answers",
        smooth=3,
    ),
    "pass_at_k": Picture(
        {
            "training": f"{GRPO} train.max_steps=40 eval.interval=null",
            "before training": EVALUATE,
            "after training": f"{EVALUATE} model.name=../training/run/checkpoints/step_000040",
        },
        pass_at_k,
        "pass@k",
        x="k, answers to a problem",
    ),
    "first_real_model": Picture(
        {"run": GRPO},
        columns(
            reward_of_sampled_answers="train/reward",
            groups_of_equal_rewards="train/zero_variance",
            **{"held-out_accuracy": "eval/accuracy"},
        ),
        "reward, share",
        smooth=3,
        dots=("held-out accuracy",),
    ),
    "judge": Picture(
        {"run": JUDGE},
        columns(
            score_of_the_judge="train/reward_judge",
            right_sampled_answers="train/reward_right",
            **{"held-out_accuracy": "eval/accuracy"},
        ),
        "score, share",
        smooth=3,
        dots=("held-out accuracy",),
    ),
    "from_trl": Picture(
        {"run": FROM_TRL},
        columns(**LEARNING),
        "reward, accuracy",
        smooth=3,
        dots=("held-out accuracy",),
    ),
    "intervals": Picture(
        {
            "training": f"{GRPO} train.max_steps=20 checkpoint.interval=10 checkpoint.keep_last=3 "
            "eval.interval=null",
            **{
                f"step {step}": "torchrl-llm evaluate tasks=[arithmetic] "
                "inference_model.max_tokens=6 "
                f"model.name=../training/run/checkpoints/step_{step:06}"
                for step in (10, 20)
            },
        },
        intervals,
        "accuracy, 95 % interval",
        x="number of prompts",
    ),
    "context": Picture(
        {}, context_strategies, "tokens of the prompt", x="turn of the conversation"
    ),
}


def run(picture: Picture, place: Path) -> Iterator[str]:
    """Run the commands of a picture, each in a folder of its own; says what each took."""
    for number, (name, command) in enumerate(picture.commands.items()):
        folder = place / name
        folder.mkdir()
        (folder / "number").write_text(str(number))
        (folder / "clock_task.py").write_text(_shown_file("train_your_own_tool", "clock_task.py"))
        shutil.copy(ROOT / "docs/source/howto/programs/nim.py", folder)
        if "qa.csv" in command:
            for name in ("judge.py", "make_sums.py"):
                shutil.copy(ROOT / "docs/source/howto/programs" / name, folder)
            subprocess.run([sys.executable, "make_sums.py"], cwd=folder, check=True)
        words = shlex.split(command)
        if words[0] == "torchrl-llm":
            words = [sys.executable, "-m", "torchrl_llm", *words[1:], "hydra.run.dir=run"]
            if "grpo" in words[4]:
                words.append("logging.progress=false")
                words += ["checkpoint.interval=1000"] * ("checkpoint.interval" not in command)
        else:
            words = [sys.executable, str(ROOT / words[1]), *words[2:]]
        paths = os.pathsep.join([".", str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        begin = os.times()
        with (folder / "output").open("w") as file:
            done = subprocess.run(words, cwd=folder, env=environment, stdout=file, stderr=file)
        text = (folder / "output").read_text()
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}:\n{text[-2000:]}")
        end = os.times()
        cpu = end.children_user + end.children_system - begin.children_user - begin.children_system
        told = [line for line in text.splitlines() if "accuracy" in line or "after" in line]
        yield f"{name}: {end.elapsed - begin.elapsed:.0f} s, {cpu:.0f} s of CPU; {told[-1:]}"


def _shown_file(page: str, name: str) -> str:
    """A file that a page shows whole."""
    text = (ROOT / f"docs/source/howto/{page}.rst").read_text()
    found = re.search(rf":caption: {re.escape(name)}\n\n((?:    .*\n|\n)+)", text)
    assert found, f"{page}.rst shows no {name}"
    return textwrap.dedent(found[1])


def keep(name: str, figures: Figures) -> None:
    """Write the figures of a picture next to it."""
    with (CURVES / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", "x", "y"])
        for line, points in figures.items():
            writer.writerows((line, f"{x:g}", f"{y:.5g}") for x, y in points)


def kept(name: str) -> Figures:
    """Read them again."""
    figures: Figures = {}
    with (CURVES / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            figures.setdefault(row["line"], []).append((float(row["x"]), float(row["y"])))
    return figures


def draw(name: str, picture: Picture) -> None:
    """Draw the kept figures; the same figures give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    style |= {"axes.edgecolor": GREY, "font.size": 10, "lines.linewidth": 1.8}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(5.4, 2.9), layout="constrained")
        for (line, points), colour in zip(kept(name).items(), COLOURS, strict=False):
            x, y = zip(*points, strict=True)
            if line in picture.dots:
                axes.plot(x, y, "o", color=colour, label=line, markersize=5, clip_on=False)
            else:
                axes.plot(x, _averaged(y, picture.smooth), color=colour, label=line)
        axes.set(xlabel=picture.x, ylabel=picture.y)
        if picture.bottom is not None:
            axes.set_ylim(bottom=picture.bottom)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(CURVES / f"{name}.svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _averaged(values: tuple[float, ...], steps: int) -> list[float]:
    return [statistics.fmean(values[max(0, i - steps + 1) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], help="all of them by default")
    parser.add_argument("--draw", action="store_true", help="without runs")
    arguments = parser.parse_args()
    for name in arguments.names or RUNS:
        picture = RUNS[name]
        if not arguments.draw:
            with tempfile.TemporaryDirectory() as folder:
                for told in run(picture, Path(folder)):
                    print(f"{name}, {told}", flush=True)
                keep(name, picture.read(Path(folder)))
        draw(name, picture)


if __name__ == "__main__":
    main()

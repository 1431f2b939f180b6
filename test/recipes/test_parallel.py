"""Recipes under torchrun: what is refused, how ranks end together, what they reach."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.kill_helper import run_pages, run_ranks
from recipes.test_grpo_failures import FATES
from transformers import AutoModelForCausalLM
from waiting import wait_until

from torchrl_llm.data import RolloutStore
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import AsyncGRPOConfig, load_config
from torchrl_llm.recipes.parallel import of_rank
from torchrl_llm.trainers.ranks import Ranks, begin_ranks, check_equal, end_ranks, last_words

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "sota-implementations"
PAGE = PAGES / "grpo" / "grpo-sync.py"
CPU = torch.device("cpu")
QUIET = "logging.progress=false"
SMALL = [
    "train.prompts_per_batch=4",
    "env.repeats=4",
    "eval.num_prompts=0",
    "train.max_steps=4",
    "logging.samples=null",
    "optimizer.scheduler=constant",
    "optimizer.warmup_steps=0",
]


def test_one_rank_has_the_rows_of_all_in_the_asynchronous_recipe():
    load_config({"train": {"parallel": "ddp"}, "advantage": {"type": "batch"}}, AsyncGRPOConfig)


def test_numbers_of_rows_are_those_of_all_ranks():
    config = load_config({"train": {"parallel": "ddp", "optim_batch_size": 64}})
    own = of_rank(config, Ranks(rank=1, world=4))
    assert (own.train.prompts_per_batch, own.train.optim_batch_size) == (4, 16)
    assert own.rows_per_batch == 32
    assert of_rank(config, Ranks()) is config
    with pytest.raises(ConfigError, match="not a multiple of them: choose 18"):
        of_rank(config, Ranks(world=3))
    with pytest.raises(ConfigError, match="less than their number: choose 32"):
        of_rank(config, Ranks(world=32))


@pytest.fixture
def torchrun_env(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


def test_processes_of_torchrun_that_would_train_alone_are_refused(torchrun_env):
    with pytest.raises(ConfigError, match=r"choose train\.parallel=ddp"):
        begin_ranks("none", device=CPU)
    with pytest.raises(ConfigError, match="would be the GPU of all 2 processes"):
        begin_ranks("ddp", device=torch.device("cuda", 0))


def test_ranks_need_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert begin_ranks("none", device=CPU) == Ranks()
    with pytest.raises(ConfigError, match="needs processes that train together: torchrun"):
        begin_ranks("fsdp2", device=CPU)


def test_a_run_that_ends_leaves_the_group_of_an_engine_in_its_process(tmp_path):
    where = f"file://{tmp_path}/others"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        end_ranks()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_keys_that_differ_between_ranks_are_named():
    class Two(Ranks):
        def gather(self, value):
            return [value, {**value, "seed": 1}]

    with pytest.raises(ConfigError, match="seed \\(0 at rank 0, 1 at rank 1\\)"):
        check_equal({"seed": 0, "train.max_steps": 3}, Two(world=2))


def test_what_a_rank_sees_of_another_s_end_is_not_its_own_error(monkeypatch):
    said = {}

    class Store:
        def check(self, names):
            return all(name in said for name in names)

        def get(self, name):
            return said[name].encode()

        def compare_set(self, name, expected, value):
            return said.setdefault(name, value).encode()

    monkeypatch.setattr("torchrl_llm.trainers.ranks._stores", [Store()])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def words(rank, error):
        monkeypatch.setenv("RANK", str(rank))
        return last_words(error)

    assert words(2, ConfigError("no such key")) == "rank 2: ConfigError: no such key"
    assert words(1, ConfigError("no such key")) is None  # it has been said
    assert words(0, gone) == "ended with rank 2: ConfigError: no such key"
    assert words(1, gone) is None
    said.clear()
    assert "ended without a word" in words(1, gone)
    assert words(3, gone) is None


def torchrun(tmp_path, *arguments, page=PAGE, env=(), shutdown_s=30):
    """Run a page in two processes; the exit code and what was said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(f"--shutdown-timeout={shutdown_s}")
    quiet = [QUIET, f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(
        [*command, str(page), *arguments, *quiet],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **dict(env)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def ranks(tmp_path, *arguments, page=PAGE, env=()):
    """The same, in processes that need no seconds to start."""
    arguments = [*arguments, QUIET, f"hydra.run.dir={tmp_path}/run"]
    return run_pages(tmp_path, page, arguments, dict(env))


def table(tmp_path):
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Runs the page with a fault in the third batch of rank 1.
FAULTY = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname({page!r}))
if os.environ["RANK"] == "1":
    from torchrl_llm.errors import DataError
    from torchrl_llm.trainers.batch_source import BatchSource
    fill, batches = BatchSource.fill, []
    def faulty(self):
        batches.append(1)
        if len(batches) == 3:
            if os.environ["FAULT"] == "error":
                raise DataError("this rank has no more")
            os.kill(os.getpid(), getattr(signal, os.environ["FAULT"]))
        return fill(self)
    BatchSource.fill = faulty
sys.argv[0] = {page!r}
runpy.run_path({page!r}, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "fault", "message"),
    [
        pytest.param(torchrun, "error", "rank 1: DataError: this rank has no more", id="error"),
        pytest.param(ranks, "SIGKILL", "another process has ended without a word", id="SIGKILL"),
        pytest.param(ranks, "SIGTERM", "saved", id="SIGTERM"),
    ],
)
def test_ranks_end_together_and_one_of_them_says_why(start, fault, message, tmp_path):
    page = tmp_path / "faulty.py"
    page.write_text(FAULTY.format(page=str(PAGE)))
    code, said = start(tmp_path, *SMALL, "train.parallel=ddp", page=page, env={"FAULT": fault})
    assert code != 0
    assert message in said
    assert said.count("Error:") - said.count("ChildFailedError:") <= 2, said  # told, and repeated
    if fault == "SIGTERM":
        assert table(tmp_path)[-1]["train/step"] == "3"
        assert (tmp_path / "run" / "checkpoints" / "step_000003" / "config.json").exists()


# Runs the page; both ranks are told to stop, and rank 1 fails when it ends.
FAILS_AT_THE_END = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname({page!r}))
if os.environ["RANK"] == "1":
    from torchrl_llm.errors import DataError
    from torchrl_llm.trainers import run
    record, ended = run.TrainingRun.record, run.TrainingRun.finish
    def finish(self):
        try:
            ended(self)
        finally:
            raise DataError("no room for the last file")
    run.TrainingRun.finish = finish
    def stopped(self, *arguments, **more):
        record(self, *arguments, **more)
        os.kill(os.getpid(), signal.SIGTERM)
    run.TrainingRun.record = stopped
sys.argv[0] = {page!r}
runpy.run_path({page!r}, run_name="__main__")
"""


@pytest.mark.full
def test_the_error_of_one_rank_is_not_followed_by_a_traceback_of_another_that_stops(tmp_path):
    page = tmp_path / "fails.py"
    page.write_text(FAILS_AT_THE_END.format(page=str(PAGE)))
    code, said = ranks(tmp_path, *SMALL, "train.parallel=ddp", page=page)
    assert code != 0
    assert "rank 1: DataError: no room for the last file" in said
    assert "trainers/ranks.py" not in said, said
    assert "barrier" not in said


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ranks_whose_torchrun_was_killed_save_and_end(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [*SMALL, "train.max_steps=100000", "train.parallel=ddp", "logging.progress=false"]
    agent = subprocess.Popen(
        [*command, str(PAGE), *arguments, f"hydra.run.dir={tmp_path}/run"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "run" / "metrics.csv").exists(), seconds=300)
        ranks = [int(pid) for pid in _children(agent.pid)]
        assert len(ranks) == 2
    finally:
        agent.kill()
        agent.wait()
    wait_until(lambda: not any(_is_running(pid) for pid in ranks), seconds=300)
    assert list((tmp_path / "run" / "checkpoints").glob("step_*/config.json"))


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_rank_that_does_not_answer_ends_all(tmp_path):
    page = tmp_path / "stopped.py"
    page.write_text(FAULTY.format(page=str(PAGE)))
    settings = [*SMALL, "train.parallel=ddp", "train.timeout_s=15"]
    # A process that is stopped does not hear torchrun's SIGTERM.
    code, said = torchrun(tmp_path, *settings, page=page, env={"FAULT": "SIGSTOP"}, shutdown_s=1)
    assert code != 0
    assert said.count("did not answer within train.timeout_s; what rank 0 saw of it: ") == 1, said
    assert "Timed out waiting 15000ms" in said
    assert table(tmp_path)[-1]["train/step"] == "2"


# Runs the page with an argument more that has the number of the rank in it.
TOLD = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({page!r}))
sys.argv[0] = {page!r}
sys.argv += [word.format(rank=os.environ["RANK"]) for word in os.environ["TOLD"].split()]
runpy.run_path({page!r}, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("seed={rank}", "these keys differ: seed (0 at rank 0, 1 at rank 1)"),
        ("train.prompts_per_batch=1", "train.prompts_per_batch=1 counts the prompts of all 2"),
    ],
)
def test_what_ranks_refuse_they_say_once(told, message, tmp_path):
    page = tmp_path / "told.py"
    page.write_text(TOLD.format(page=str(PAGE)))
    settings = ["train.parallel=ddp", "train.max_steps=1", "eval.num_prompts=0"]
    code, said = ranks(tmp_path, *settings, page=page, env={"TOLD": told})
    assert code != 0
    assert said.count(message) == 1, said
    assert not (tmp_path / "run" / "metrics.csv").exists()


ANSWERED = ["train.prompts_per_batch=4", "optimizer.warmup_steps=0", "eval.num_prompts=4"]
RECIPES = {
    "expert-iteration/expert-iteration.py": [*ANSWERED, "env.repeats=4"],
    "distillation/distillation.py": [*ANSWERED, "teacher.max_steps=2", "teacher.batch_size=8"],
    "sft/imitate.py": ["train.batch_size=4", "eval.num_prompts=4", "optimizer.warmup_steps=0"],
}


@pytest.mark.full
@pytest.mark.parametrize("page", RECIPES)
def test_other_recipes_train_on_two_ranks(page, tmp_path):
    settings = [*RECIPES[page], "train.max_steps=2", "train.parallel=fsdp2"]
    run_ranks(tmp_path / "run", [*settings, QUIET], 2, path=page)
    steps = table(tmp_path)
    assert [row["train/step"] for row in steps] == ["0", "1", "2"]
    carried, generated = 0, [int(row.get("train/tokens_generated") or 0) for row in steps]
    assert all(generated[1:]) != page.startswith("sft/")
    for row, number in zip(steps, generated, strict=True):
        spent = {fate: int(row.get(f"train/tokens_{fate}") or 0) for fate in FATES}
        if number:
            assert carried + number == sum(spent.values())
        carried = spent["pending"]
    last = tmp_path / "run" / "checkpoints" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(last)
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.full
def test_a_run_that_goes_on_is_the_run_uninterrupted(tmp_path):
    options = [*SMALL, "train.parallel=fsdp2", "logging.rollouts=all", QUIET]
    for folder, *more in (("whole",), ("parts", "train.max_steps=2"), ("parts",)):
        (tmp_path / folder).mkdir(exist_ok=True)
        run_ranks(tmp_path / folder / "run", [*options, *more], 2)
    without_clock = [
        [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in table(folder)]
        for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert without_clock[0] == without_clock[1]
    versions = [
        [row["trace", "policy_version"].tolist() for row in row_list(store.rows(step=step))]
        for store in (RolloutStore(tmp_path / each / "run") for each in ("whole", "parts"))
        for step in store.steps()
    ]
    assert len(versions) % 2 == 0
    assert versions[: len(versions) // 2] == versions[len(versions) // 2 :]


@pytest.mark.full
def test_two_ranks_learn_what_one_process_learns(tmp_path):
    code, said = ranks(tmp_path, "train.parallel=fsdp2", "train.max_steps=60")
    assert code == 0, said
    rows = table(tmp_path)
    reward = [float(row["train/reward"]) for row in rows if row["train/reward"]]
    accuracy = [float(row["eval/accuracy"]) for row in rows if row["eval/accuracy"]]
    assert sum(reward[-5:]) / 5 >= 0.85
    assert accuracy[-1] >= 0.95


def fine_tune_alone(folder, *arguments):
    """The command that fine-tunes, in one process; its losses."""
    command = [sys.executable, "-m", "torchrl_llm", "train", "sft", *arguments]
    done = subprocess.run(
        [*command, f"hydra.run.dir={folder}/run", "logging.progress=false"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sft_losses(folder)


def sft_losses(folder):
    return [float(row["train/loss_sft"]) for row in table(folder) if row["train/loss_sft"]]


@pytest.fixture
def gsm8k_options(gsm8k_dir):
    return [
        f"data={gsm8k_dir / 'train.jsonl'}",
        "data.prompt=question",
        "data.completion=answer",
        "eval.num_prompts=8",
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_short_fine_tuning_on_gsm8k_halves_its_loss(tmp_path, gsm8k_options):
    losses = fine_tune_alone(tmp_path, *gsm8k_options, "train.max_steps=20")
    assert len(losses) == 20
    assert losses[-1] <= losses[0] / 2


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_fine_tune_as_one(parallel, tmp_path, gsm8k_options):
    options = [*gsm8k_options, "train.max_steps=3", "train.batch_size=7", QUIET]
    losses = {}
    for world, how in ((2, parallel), (1, "none")):
        folder = tmp_path / str(world)
        folder.mkdir()
        run_ranks(folder / "run", [*options, f"train.parallel={how}"], world, path="sft/sft.py")
        losses[world] = sft_losses(folder)
    assert len(losses[2]) == 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_each_rank_samples_with_an_engine_of_its_own(tmp_path):
    pytest.importorskip("vllm")
    engine = ["inference_model.backend=vllm", "inference_model.max_model_len=128"]
    settings = ["train.parallel=fsdp2", *engine, "train.max_steps=2", "inference_model.sleep=true"]
    options = [o for o in SMALL if not o.startswith("train.max_steps")]
    code, said = torchrun(tmp_path, *options, *settings, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert code == 0, said
    assert "Traceback" not in said
    for row in table(tmp_path):
        assert abs(float(row["train/kl_to_inference"])) < 1e-6
        assert float(row["train/canary_distinct"]) == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_ranks_on_gpus_learn_with_nccl(backend, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, one a rank")
    engine = [f"inference_model.backend={backend}"]
    if backend == "vllm":
        engine += [
            "inference_model.gpu_memory_utilization=0.3",
            "inference_model.max_model_len=256",
        ]
    code, said = torchrun(tmp_path, "train.parallel=fsdp2", *engine)
    assert code == 0, said
    rows = table(tmp_path)
    assert float([row["eval/accuracy"] for row in rows if row["eval/accuracy"]][-1]) >= 0.95

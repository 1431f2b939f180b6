"""Runs that are killed at random, again and again, and go on at once: a process for each attempt.

A fork server imports everything once, so that an attempt costs no start. A kill is ``kill -9``,
by the process itself just before or after an operation on files that is drawn at random, which is
inside a save more often than not; or by its parent, which is told of that operation and kills at
whatever moment comes next.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

import torch
from fork_server import fork_server
from recipes.script import load_recipe
from torch.distributed import TCPStore

from torchrl_llm.data.wire import PackedRows, encode
from torchrl_llm.recipes import launch
from torchrl_llm.trainers import BatchSource
from torchrl_llm.trainers.checkpoint import CheckpointStore
from torchrl_llm.trainers.ranks import end_ranks

PAGE = "grpo/grpo-sync.py"
launch.load_page(PAGE)  # once, by the fork server
SMALL = [
    "train.prompts_per_batch=2",
    "env.repeats=2",
    "inference_model.max_tokens=4",
    "eval.num_prompts=2",
    "eval.interval=2",
    "logging.progress=false",
    "logging.samples=null",
    "optimizer.warmup_steps=0",
]
# What a save, the table of metrics, and whoever else keeps files consist of.
OPERATIONS = ("fsync", "replace", "mkdir", "unlink", "open")


def attempt(overrides, folder, operation=None, told=None, rank=None, only_saves=False, path=PAGE):
    """Train to the end, or until the given operation on files; who is told of it kills instead.

    With a rank (its number, how many there are, and a free port) as one of several. Who only saves
    trains no step.
    """
    if rank is not None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")
        os.environ |= dict(zip(names, map(str, (*rank, rank[0])), strict=True))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    _begin(f"{folder}.log")
    os.fsync = lambda handle: None  # a kill loses nothing of what was handed to the kernel
    if operation is not None:
        kill_at(operation, told)
    page, config = load_recipe(path, overrides)
    remember_rows(f"{folder}.rows")
    for run in page.train(config, folder):
        if only_saves:
            run.save()
            break
    end_ranks()


def _begin(log):
    """Be a process of its own that writes into a file."""
    os.setsid()
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    multiprocessing.current_process()._identity = ()  # ids of rows are those of a main process


def remember_rows(file):
    """Note of each row that a step trains on what it asks and its ids, in the main process."""
    fill = BatchSource.fill

    def noted(self):
        rows = fill(self)
        if self._ranks.is_main:
            noted = [[str(row["query"]), int(row["group_id"]), int(row["traj_id"])] for row in rows]
            with open(file, "a") as out:
                out.write(json.dumps(noted) + "\n")
        return rows

    BatchSource.fill = noted


def read_rows(folder):
    """What :func:`remember_rows` noted, a list of rows each step."""
    with open(f"{folder}.rows") as file:
        return [json.loads(line) for line in file]


def kill_at(number, told):
    """Kill this process before or after its so-maniest operation on files, or tell of it."""
    left = [number]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and told is not None:
                told.send_bytes(b"now")
            if left[0] == 0 and told is None and number % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:  # also where there is no such file
                if left[0] == 0 and told is None:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def run_ranks(folder, overrides, world, *, only_saves=False, path=PAGE):
    """A run of so many processes that train together; path is that of the recipe's page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [(rank, world, port) for rank in range(world)]
    processes = [_start(folder, overrides, None, None, rank, only_saves, path) for rank in ranks]
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), Path(f"{folder}.log").read_text()


def run_pages(folder, page, arguments, environ, world=2):
    """Run a page as torchrun does, in processes that have imported everything.

    As torchrun, it keeps the store of all ranks, and ends the others when one has failed.

    Returns:
        The first exit code that is none of success, or 0, and what was said.
    """
    store, log = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), folder / "said"
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **environ,
    }
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    processes = [
        fork_server().Process(target=_page, args=(str(page), arguments, rank, str(log)))
        for rank in ranks
    ]
    for process in processes:
        process.start()
    failed = 0
    while running := [process for process in processes if process.is_alive()]:
        connection.wait([process.sentinel for process in running])
        found = next((process.exitcode for process in processes if process.exitcode), 0)
        if found and not failed:
            failed = found
            for process in processes:
                process.terminate()
    return failed, log.read_text()


def _page(page, arguments, environ, log):
    os.environ |= environ
    _begin(log)
    sys.argv = [page, *arguments]
    sys.path.insert(0, str(Path(page).parent))
    runpy.run_path(page, run_name="__main__")


def run_to_the_end(folder, overrides):
    """A run that is left alone."""
    process = _start(folder, overrides)
    process.join()
    assert process.exitcode == 0, Path(f"{folder}.log").read_text()[-3000:]


def run_killed(folder, overrides, *, kills, seed, operations=100):
    """A run that is killed so many times, and goes on each time; where it was killed."""
    draw, places = random.Random(seed), []
    for number in range(kills):
        listens, tells = multiprocessing.Pipe(False)
        by_parent = number % 2 == 1
        operation = draw.randrange(1, operations)
        process = _start(folder, overrides, operation, tells if by_parent else None)
        tells.close()
        if by_parent:
            with suppress(EOFError):
                listens.recv_bytes()
            process.kill()
        process.join()
        listens.close()
        assert process.exitcode != 0, f"the run ended after {number} kills: {places}"
        assert process.exitcode == -signal.SIGKILL, Path(f"{folder}.log").read_text()[-3000:]
        places.append(_where(Path(folder)))
    run_to_the_end(folder, overrides)
    return places


def _start(folder, overrides, *how):
    overrides = [*overrides, "checkpoint.resume=auto"]
    process = fork_server().Process(target=attempt, args=(overrides, str(folder), *how))
    process.start()
    return process


def _where(folder):
    """What a killed process has left: its newest checkpoint, and whether it was saving one."""
    names = {path.name for path in (folder / "checkpoints").glob("*")}
    steps = sorted(name for name in names if name.startswith("step_"))
    return (steps or ["none"])[-1], any(name.startswith(".") for name in names)


def assert_same_run(one, other):
    """Weights, optimizer, all other state, metrics and rollouts, bit for bit, without clocks."""
    one, other = Path(one), Path(other)
    assert _table(one) == _table(other)
    stores = [CheckpointStore(run / "checkpoints") for run in (one, other)]
    assert stores[0].steps() == stores[1].steps() != []
    for step in stores[0].steps():
        assert not [*differences(*(store.load(step) for store in stores), f"step {step}")]
    files = [_files(one), _files(other)]
    assert files[0].keys() == files[1].keys()
    differ = [name for name in files[0] if files[0][name] != files[1][name]]
    assert not differ, differ


def differences(one, other, where):
    """Where two states differ; the seconds that a reward took are no state."""
    if isinstance(one, PackedRows):
        for rows in (one, other):
            rows.columns[:] = [c for c in rows.columns if c.path != ("next", "reward_seconds")]
        one, other = encode(one), encode(other)
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        for name in one:
            yield from differences(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}/{place}")
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield where
    elif one != other or type(one) is not type(other):
        yield where


def _files(run):
    """Contents of the files of the models, and of the rollouts where they are kept."""
    patterns = ("checkpoints/step_*/*.safetensors", "checkpoints/step_*/*.json", "rollouts/**/*")
    found = {path for pattern in patterns for path in run.glob(pattern) if path.is_file()}
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def _table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if not k.startswith("perf/")}
            for row in csv.DictReader(file)
        ]

"""Shared fixtures: small tokenizers and models made on the spot, with no network.

``make_tokenizer`` and ``make_tiny_model`` are factories for tests that need variants;
``tokenizer`` and ``tiny_model`` are session-wide instances that no test may change.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Neither library tells its makers about runs of our tests.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A call of Ray after its end is an error, not a new cluster that the next test meets.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# By default Ray's workers give way to every other process, and tests beside others crawl.
os.environ.setdefault("RAY_worker_niceness", "0")
# The models here are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The process that hands tests to others starts them at once: it imports nothing that takes seconds.
import hypothesis
import pytest
import quicker  # noqa: F401

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("torchrl_llm", deadline=None)
hypothesis.settings.load_profile("torchrl_llm")

TESTS = Path(__file__).parent

# Looking for cycles among everything that is imported and collected takes longer than either.
gc.disable()


def pytest_collection_finish():
    # What is there by now stays to the end, and is never looked through again.
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Leave out files that hold none of the markers asked for, which takes seconds to find out."""
    if re.fullmatch(r"\w+( or \w+)*", config.option.markexpr) and collection_path.suffix == ".py":
        return None if collection_path in _holders(config.option.markexpr) else True
    return None


@cache
def _holders(markers):
    """The files that hold one of these markers, or import from one that does, or lie below it."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    sign = rf"mark(\.|er\(\W)({markers.replace(' or ', '|')})\b"
    found = set()
    while more := {path for path in texts.keys() - found if re.search(sign, texts[path], re.M)}:
        found |= more
        names = "|".join(path.stem for path in found)
        sign = rf"^ *(from|import) (?!torch).*\b({names})\b"
    marked = [path.parent for path in found if path.name == "conftest.py" and path.parent != TESTS]
    return found | {path for path in texts if any(path.is_relative_to(at) for at in marked)}


def pytest_configure():
    # A shell in the background, or nohup, lets what it starts ignore these; tests are to get them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores, as many tests wait for a process or a clock."""
    given = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return int(given) if given else len(cores) + 1


@pytest.fixture(scope="session")
def make_tokenizer():
    from models_helper import make_tokenizer

    return make_tokenizer


@pytest.fixture(scope="session")
def make_tiny_model():
    from models_helper import make_tiny_model

    return make_tiny_model


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model):
    return make_tiny_model()


@pytest.fixture(scope="module")
def cluster():
    """Ray with two CPUs, for the tests of one file."""
    ray = pytest.importorskip("ray")
    from collectors.ray_helper import start_ray

    start_ray(ray, num_cpus=2)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    # What ``torch.manual_seed`` does for devices that are not there takes two milliseconds.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def _loggers_enabled():
    # A recipe that ran in this process may have let Hydra disable every logger.
    for each in list(logging.root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            each.disabled = False


@pytest.fixture
def warned(monkeypatch):
    """What TorchRL's logger is given as warnings."""
    from torchrl._utils import logger

    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    return said


@pytest.fixture(scope="session")
def gsm8k_dir():
    """The real GSM8K files, where the machine has them."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no GSM8K files in {folder}; download openai/gsm8k as JSON lines into it")
    return folder


@pytest.fixture(scope="session")
def humaneval_file():
    """The real HumanEval problems, where the machine has them."""
    path = Path(__file__).parents[2] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no HumanEval file {path}; download openai/human-eval's data into it")
    return path


@pytest.fixture
def queries():
    """Reset input of a bare ChatEnv."""
    from tensordict import TensorDict

    return lambda *texts: TensorDict({"query": list(texts)}, batch_size=(len(texts),))


@pytest.fixture
def answer():
    """Append one assistant message to each conversation of a tensordict in history mode."""
    from torchrl_llm.data.history import History

    def write(td, *texts):
        chats = td["history"].prompt.chats
        full = [
            chat + [{"role": "assistant", "content": text}]
            for chat, text in zip(chats, texts, strict=True)
        ]
        td["history"].full = History.of(full)
        return td

    return write


@pytest.fixture
def told(monkeypatch):
    """Warnings that are said once, as if none had been said before."""
    from torchrl._utils import logger

    from torchrl_llm import _log

    lines = []
    monkeypatch.setattr(_log, "_told", set())
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines

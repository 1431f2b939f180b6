"""The Redis and the actor that ``torchrl-llm train pipeline-rl`` starts, and how they end."""

import os
import socket
import subprocess
import sys

import pytest

redis = pytest.importorskip("redis")

import shutil

from recipes.pipeline_helper import FOLDER, SMALL, metrics

from torchrl_llm._redis import PASSWORD_VARIABLE
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.recipes import launch

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server"),
]


@pytest.fixture(scope="module")
def local():
    return launch.load_page("pipeline-rl/local_processes.py")


@pytest.fixture
def password(monkeypatch):
    """A password that nothing of the test's process keeps."""
    monkeypatch.setenv(PASSWORD_VARIABLE, 'with "quotes" \\ and a backslash')


def client(url):
    return redis.Redis.from_url(url, password=os.environ[PASSWORD_VARIABLE])


def test_a_redis_wants_the_password_and_is_gone_after_the_block(local, password, tmp_path):
    with local.local_redis(tmp_path, None) as (url, check):
        check()
        assert client(url).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url).ping()
    with pytest.raises(redis.ConnectionError):
        client(url).ping()


def test_a_redis_that_runs_is_used_and_left_alone(local, password, tmp_path):
    with local.local_redis(tmp_path, None) as (url, _):
        with local.local_redis(tmp_path, url) as (found, check):
            check()
        assert found == url and client(url).ping()


def test_a_redis_that_dies_is_an_error_with_its_log(local, password, tmp_path):
    with local.local_redis(tmp_path, None) as (url, check):
        client(url).shutdown(nosave=True)
        with pytest.raises(WorkerError, match=r"(?s)the Redis has ended.*redis\.log.*"):
            for _ in range(100):
                check()
                with socket.socket() as probe:
                    probe.settimeout(0.1)
                    probe.connect_ex(("127.0.0.1", 1))


def test_without_the_program_the_error_says_what_to_do(local, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt install redis-server.*redis.url="):
        with local.local_redis(tmp_path, None):
            pass


def test_the_error_of_an_actor_that_fails_is_shown(local, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_END_S", 60)
    with local.local_actor(tmp_path, ["train.max_lagg=1"]) as check:
        while True:
            try:
                check()
            except WorkerError as error:
                assert "the actor has ended with status 1" in str(error)
                assert "did you mean 'train.max_lag'" in str(error)
                break


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_trains_and_leaves_no_process(tmp_path):
    words = [*SMALL, "train.max_steps=2", f"hydra.run.dir={tmp_path}", "logging.progress=false"]
    done = subprocess.run(
        [sys.executable, "-m", "torchrl_llm", "train", "pipeline-rl", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\x1b" not in done.stdout + done.stderr
    assert [row["train/step"] for row in metrics(tmp_path)] == ["1", "2"]
    assert "ends: the channel was closed" in (tmp_path / "actor.log").read_text()
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running and str(FOLDER / "actor.py") not in running

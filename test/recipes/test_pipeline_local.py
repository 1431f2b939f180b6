"""The Redis and the actor that ``torchrl-llm train pipeline-rl`` starts, and how they end."""

import os
import shutil
import subprocess
import sys

import pytest
from recipes.pipeline_helper import FOLDER, SMALL, metrics

from torchrl_llm._redis import PASSWORD_VARIABLE
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.recipes import launch

redis = pytest.importorskip("redis")

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
        assert found == url
        assert client(url).ping()


def until_it_raises(check):
    """The first error of a check."""
    while True:
        try:
            check()
        except WorkerError as error:
            return str(error)


def test_a_redis_that_dies_is_an_error_with_its_log(local, password, tmp_path):
    with local.local_redis(tmp_path, None) as (url, check):
        client(url).shutdown(nosave=True)
        assert f"the Redis has ended with status 0; the end of {tmp_path}" in until_it_raises(check)


def test_without_the_program_the_error_says_what_to_do(local, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = r"apt install redis-server.*redis\.url="
    with pytest.raises(ConfigError, match=told), local.local_redis(tmp_path, None):
        pass


def test_the_error_of_an_actor_that_fails_is_shown(local, tmp_path):
    with local.local_actor(tmp_path, ["train.max_lagg=1"]) as check:
        told = until_it_raises(check)
    assert "the actor has ended with status 1" in told
    assert "did you mean 'train.max_lag'" in told


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
    assert str(tmp_path) not in running
    assert str(FOLDER / "actor.py") not in running

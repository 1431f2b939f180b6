"""OpenEnv servers: our own with its protocol, and one of the real package where there is one.

``TORCHRL_LLM_OPENENV_PYTHON`` names a Python interpreter with ``openenv-core`` in it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from torchrl.envs.utils import check_env_specs

pytest.importorskip("websockets")

from envs.libs.guessing import GuessingServer

from torchrl_llm.data.history import History
from torchrl_llm.envs.actions import ActionError
from torchrl_llm.envs.libs.openenv import OpenEnvClient, OpenEnvEnv
from torchrl_llm.errors import BackendError, ConfigError, ResourceError, WorkerError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.weights.transfer import free_port

REAL = os.environ.get("TORCHRL_LLM_OPENENV_PYTHON")


def _real_server():
    port = free_port()
    script = Path(__file__).with_name("guessing_server.py")
    process = subprocess.Popen([REAL, str(script), str(port)])
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return process, url
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise RuntimeError("the server does not start")


@pytest.fixture(
    params=[
        "ours",
        pytest.param(
            "real",
            marks=pytest.mark.skipif(REAL is None, reason="no TORCHRL_LLM_OPENENV_PYTHON"),
        ),
    ]
)
def url(request):
    if request.param == "ours":
        server = GuessingServer()
        yield server.url
        server.close()
        return
    process, address = _real_server()
    yield address
    process.kill()
    process.wait(10)


@pytest.fixture
def ours():
    server = GuessingServer()
    yield server
    server.close()


def answered(td, *texts, **message):
    chats = td["history"].prompt.chats
    td["history"].full = History.of(
        chat + [{"role": "assistant", "content": text, **message}]
        for chat, text in zip(chats, texts, strict=True)
    )
    return td


def told(td, row=0):
    return td["history"].prompt.chats[row][-1]["content"]


def test_a_client_plays_an_episode(url):
    client = OpenEnvClient(url)
    first = client.reset(seed=7, episode_id="e1")
    assert first["observation"]["hint"] == "Guess a number from 0 to 9."
    assert (client.step({"guess": 3})["observation"]["hint"], client.state()["step_count"]) == (
        "Higher.",
        1,
    )
    last = client.step({"guess": 7})
    assert (last["reward"], last["done"]) == (1.0, True)
    client.close()
    client.close()
    assert client.reset(seed=1)["done"] is False  # another session
    client.close()


def test_rows_are_sessions_and_each_has_its_own_episode(url):
    env = OpenEnvEnv(url, num_envs=3, shuffle=False, max_steps=4)
    td = env.reset()
    assert [told(td, row) for row in range(3)] == ["Guess a number from 0 to 9."] * 3
    assert td["history"].prompt.chats[0][0]["content"] == "Answer with the guess and nothing else."
    td = env.step(answered(td, "0", "0", "<think>5?</think>0"))["next"]
    assert [told(td, row) for row in range(3)] == ["Right.", "Higher.", "Higher."]
    assert td["reward"].flatten().tolist() == [1.0, -0.25, -0.25]
    assert td["terminated"].flatten().tolist() == [True, False, False]
    assert td["success"].flatten().tolist() == [True, False, False]
    assert td["reward_valid"].all()
    env.close()


def test_an_action_that_the_server_does_not_take_is_told_and_costs_a_penalty(url):
    env = OpenEnvEnv(url, num_envs=3, shuffle=False)
    td = env.step(answered(env.reset(), "three", '"3"x', ""))["next"]
    assert told(td, 0).startswith("The guess must be of type integer.")
    assert told(td, 2).startswith("Your answer is empty.")
    assert td["reward"].flatten().tolist() == [pytest.approx(-0.1)] * 3
    assert td["reward_valid"].all()
    assert not td["done"].any()
    # one that only the server can judge
    td = env.step(answered(td, "[1]", "1.5", "5"))["next"]
    assert "guess: Input should be a valid integer" in told(td, 0)
    assert td["reward"].flatten().tolist()[::2] == [pytest.approx(-0.1), -0.25]
    env.close()


def test_a_world_that_fails_is_an_error_of_its_row_and_starts_again_at_reset(url):
    env = OpenEnvEnv(url, num_envs=2, shuffle=False)
    td = env.step(answered(env.reset(), "13", "9"))["next"]
    assert td["reward_valid"].tolist() == [False, True]
    assert td["reward"].isnan().flatten().tolist() == [True, False]
    assert list(td["error", "type"]) == ["BackendError", ""]
    assert "thirteen!" in td["error", "message"][0]
    assert td["done"].flatten().tolist() == [True, False]
    # the failed row begins anew, the other goes on
    td = env.reset(td.set("_reset", td["done"].clone()))
    assert told(td, 0) == "Guess a number from 0 to 9."
    assert told(td, 1) == "Lower."
    td = env.step(answered(td, "2", "1"))["next"]
    assert [told(td, 0), told(td, 1)] == ["Right.", "Right."]
    env.close()


@pytest.mark.full
def test_a_server_that_does_not_answer_in_time_is_an_error_of_its_row(url):
    env = OpenEnvEnv(url, num_envs=2, shuffle=False, message_timeout_s=1.0)
    td = env.reset()
    start = time.monotonic()
    td = env.step(answered(td, "99", "1"))["next"]
    assert time.monotonic() - start < 4.5
    assert td["reward_valid"].tolist() == [False, True]
    assert "did not answer 'step' within 1.0 s" in td["error", "message"][0]
    env.close()


def test_a_server_that_dies_in_the_middle_is_an_error_of_its_rows(url):
    env = OpenEnvEnv(url, num_envs=1, shuffle=False, message_timeout_s=5.0)
    td = env.step(answered(env.reset(), "666"))["next"]
    assert td["reward_valid"].tolist() == [False]
    assert list(td["error", "type"]) == ["WorkerError"]
    assert td["done"].item()
    env.close()


@pytest.mark.parametrize("actions", ["tag", "call"])
def test_actions_in_a_tag_and_as_calls(url, actions):
    env = OpenEnvEnv(url, num_envs=1, shuffle=False, actions=actions)
    td = env.reset()
    if actions == "tag":
        td = env.step(answered(td, "I say <action>0</action>"))["next"]
    else:
        function = {"name": "action", "arguments": {"guess": 0}}
        assert env.action_tool.parameters["required"] == ["guess"]
        call = {"type": "function", "id": "c1", "function": function}
        td = env.step(answered(td, "", tool_calls=[call]))["next"]
        assert td["history"].prompt.chats[0][-1]["tool_call_id"] == "c1"
    assert (told(td), td["reward"].item()) == ("Right.", 1.0)
    env.close()


def test_a_model_plays_by_itself_and_the_rows_keep_their_specs(ours, tokenizer):
    env = OpenEnvEnv(ours.url, num_envs=4, repeats=2, shuffle=False, max_steps=12)
    check_env_specs(env, return_contiguous=False)
    env.reset_dataloader()
    policy = FakeWrapper(lambda p: str(p.count("Higher")), tokenizer=tokenizer)
    rollout = env.rollout(3, policy, break_when_any_done=False)
    done = rollout["next", "done"].squeeze(-1)
    rewards = rollout["next", "reward"].flatten(1)
    # seeds 0 0 1 1: the first two are right at once and begin another episode, the others follow
    assert done[:, 0].tolist() == [True, True, False, False]
    assert rewards[:2, 0].tolist() == [1.0, 1.0]
    assert done[2:, 1].tolist() == [True, True]
    assert rewards[2:, :2].tolist() == [[-0.25, 1.0]] * 2
    assert torch.equal(rollout["group_id"][::2], rollout["group_id"][1::2])
    env.close()
    deadline = time.monotonic() + 5
    while ours.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours.open


def test_a_pool_that_is_full_is_an_error_of_the_environment():
    server = GuessingServer(max_sessions=1)
    env = OpenEnvEnv(server.url, num_envs=2)
    with pytest.raises(ResourceError, match="Lower num_envs"):
        env.reset()
    env.close()
    server.close()


@pytest.mark.parametrize("guess", [1000, 1001, 1002, 1003])
def test_nonsense_from_a_server_is_an_error_of_its_row(ours, guess):
    env = OpenEnvEnv(ours.url, num_envs=1)
    td = env.step(answered(env.reset(), str(guess)))["next"]
    assert td["reward_valid"].tolist() == [False]
    assert td["error", "type"][0] in ("WorkerError", "BackendError", "RewardError")
    assert td["reward"].isnan().all()
    env.close()


def test_an_environment_travels_without_its_sessions(ours):
    env = OpenEnvEnv(ours.url, num_envs=1, shuffle=False)
    td = env.reset()
    other = pickle.loads(pickle.dumps(env))
    after = other.step(answered(td.clone(), "0"))["next"]
    assert after["reward_valid"].tolist() == [False]
    assert "this row has no session" in after["error", "message"][0]
    assert env.step(answered(td, "0"))["next", "reward"].item() == 1.0
    assert told(other.reset()) == "Guess a number from 0 to 9."
    for each in (env, other):
        each.close()


def test_rows_hold_the_options_of_resets(ours):
    env = OpenEnvEnv(ours.url, dataset=[{"seed": 4}], num_envs=1)
    assert env.step(answered(env.reset(), "4"))["next", "reward"].item() == 1.0
    env.close()
    with pytest.raises(Exception, match="'query' is the world's observation"):
        OpenEnvEnv(ours.url, dataset=[{"seed": 4, "query": "x"}], num_envs=1)


def test_a_server_that_is_not_there_and_settings_that_are_impossible(ours):
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WorkerError, match="gave no schema of actions"):
        OpenEnvEnv(nobody)
    with pytest.raises(WorkerError, match="cannot connect"):
        OpenEnvClient(nobody).reset()
    for url in ("localhost:8000", "ftp://x", ""):
        with pytest.raises(ConfigError, match="url is http"):
            OpenEnvClient(url)
    with pytest.raises(ConfigError, match="none of"):
        OpenEnvEnv(ours.url, action_field="fly")
    client = OpenEnvClient(ours.url)
    client.reset()
    with pytest.raises(ActionError, match="valid integer"):
        client.step({"guess": "x"})
    with pytest.raises(BackendError, match="thirteen"):
        client.step({"guess": 13})
    client.close()


def test_no_error_shows_the_password_of_an_address():
    with pytest.raises(ConfigError, match=r"got 'ftp://me:\*\*\*@host'"):
        OpenEnvClient("ftp://me:secret@host")
    assert OpenEnvClient("http://me:secret@host").place == "ws://me:***@host/ws"

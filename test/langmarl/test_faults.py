"""Servers that refuse, are busy, are slow or answer nonsense, and what a run makes of it."""

from __future__ import annotations

import json

import pytest
from chat_server import ChatHandler, chat_server
from langmarl.world import scripted, written

from torchrl_llm import langmarl
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.langmarl import LLMClient, LLMConfig, load_config, make_trainer


class Server(ChatHandler):
    """Behaves as the name of the model says."""

    def reply(self, body):
        kind, status = body["model"], 200
        message = {"role": "assistant", "content": "Fine. FINAL ANSWER: 4"}
        data = {"choices": [{"message": message, "finish_reason": "stop"}]}
        data["usage"] = {"prompt_tokens": 11, "completion_tokens": 5}
        if kind == "refuses":
            status, data = 401, {"error": {"message": "Incorrect API key provided: sk-*****"}}
        elif kind == "unknown":
            status, data = 404, {"error": {"message": "The model `unknown` does not exist"}}
        elif kind == "broken":
            status, data = 500, {"error": "down"}
        elif kind == "null":
            message["content"] = None
        elif kind == "declines":
            message["content"] = "I'm sorry, but I can't help with that."
        elif kind == "prose":
            message["content"] = "Well, everybody tried."
        elif kind == "slow":
            self.server.never.wait(20)
        elif kind == "garbage":
            data = b"\x00\xff{"
        return status, data, {}


@pytest.fixture
def server():
    with chat_server(Server) as server:
        yield server


def model(server, kind, **more):
    """A model of that name at the server."""
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    prices = {"input_price_per_million": 1.0, "output_price_per_million": 0.0}
    given = {"name": kind, "model_string": kind, "base_url": url, "max_retries": 0}
    return given | prices | {"api_key_env_var": "THE_KEY", "timeout_s": 20.0} | more


def run(tmp_path, **changes):
    trainer = make_trainer(
        load_config(written(tmp_path, trajectories_per_iteration=3, num_agents=2, **changes))
    )
    try:
        return trainer, trainer.train_one_iteration(0)
    finally:
        trainer.close()


def test_a_request_is_what_the_configuration_says(server, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-mine")
    extra = {"temperature": 0.5, "reasoning_effort": "low"}
    for name, field in (("fine", "max_tokens"), ("o3-mini", "max_completion_tokens")):
        given = model(server, name, extra_params=extra, max_tokens=77)
        client = LLMClient(LLMConfig.from_dict(given))
        assert client.chat_with_usage("Be kind.", "2+2?", max_tokens=9)[1] == {
            "input": 11,
            "output": 5,
        }
        path, key, body = server.requests[-1]
        assert (path, key) == ("/v1/chat/completions", "Bearer sk-mine")
        assert body == {
            **extra,
            field: 9,
            "model": name,
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "2+2?"},
            ],
        }
        assert client.tracker.get_stats()["cost_usd"] == pytest.approx(11e-6)


def test_parts_are_for_models_that_take_them(server):
    parts = [{"type": "text", "text": "What is it?"}]
    with pytest.raises(ConfigError, match="is_multimodal"):
        LLMClient(LLMConfig.from_dict(model(server, "fine"))).chat("", parts)
    client = LLMClient(LLMConfig.from_dict(model(server, "fine", is_multimodal=True)))
    assert client.chat("", parts).startswith("Fine.")
    assert server.requests[-1][2]["messages"] == [{"role": "user", "content": parts}]


@pytest.mark.parametrize("role", ["actor", "critic", "optimizer"])
def test_a_wrong_key_ends_the_run_and_names_its_variable(role, server, tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-secret")
    with pytest.raises(ConfigError, match=r"refuses access.*THE_KEY") as raised:
        run(tmp_path, **{f"{role}_llm": model(server, "refuses")})
    assert "sk-secret" not in str(raised.value)
    stored = [path.read_bytes() for path in (tmp_path / "experiments").rglob("*.json*")]
    assert stored
    assert not any(b"sk-secret" in each for each in stored)


def test_a_model_that_the_server_does_not_have_ends_the_run(server, tmp_path):
    with pytest.raises(ConfigError, match=r"'unknown'.*does not exist"):
        run(tmp_path, actor_llm=model(server, "unknown"))


def test_no_key_is_an_error_before_the_first_call(tmp_path, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    given = {"model_string": "gpt-9", "base_url": "https://example.com/v1"}
    with pytest.raises(ConfigError, match="THE_KEY"):
        langmarl.train(written(tmp_path, actor_llm={**given, "api_key_env_var": "THE_KEY"}))


@pytest.mark.parametrize("kind", ["broken", "garbage", "slow"])
def test_actors_that_fail_are_episodes_with_errors(kind, server, tmp_path):
    slow = {"timeout_s": 0.3} if kind == "slow" else {}
    trainer, stats = run(tmp_path, actor_llm=model(server, kind, **slow))
    assert (stats["num_episodes"], stats["rewards"], stats["avg_reward"]) == (3, [], 0.0)
    assert trainer.rows[0]["metadata"]["num_failed_episodes"] == 3
    assert trainer.log.account()["actor", kind].failed == 3
    assert trainer.policies == trainer.env.default_policies()


@pytest.mark.parametrize("kind", ["broken", "garbage", "null", "declines"])
@pytest.mark.parametrize("role", ["critic", "optimizer"])
def test_defect_11_a_failing_critic_or_optimizer_changes_nothing_and_is_counted(
    role, kind, server, tmp_path
):
    trainer, stats = run(tmp_path, **{f"{role}_llm": model(server, kind)})
    calls = {"critic": 3, "optimizer": 6}[role]
    assert trainer.rows[0]["metadata"]["num_fallbacks"] == calls
    assert trainer.policies == trainer.env.default_policies()
    assert len(stats["rewards"]) == 3


def test_an_actor_that_says_nothing_has_a_reward_of_nothing(server, tmp_path):
    _, stats = run(tmp_path, actor_llm=model(server, "null"))
    assert stats["rewards"] == [0.0, 0.0, 0.0]


def test_a_critic_in_another_format_speaks_to_all(server, tmp_path):
    trainer, _ = run(tmp_path, critic_llm=model(server, "prose"), optimizer_llm=scripted("noise"))
    assert all("CASE-SPECIFIC" in text for text in trainer.policies.values())
    assert trainer.rows[0]["metadata"]["num_fallbacks"] == 0


def test_the_client_raises_what_the_server_does(server):
    client = LLMClient(LLMConfig.from_dict(model(server, "broken")))
    with pytest.raises(WorkerError, match="500"):
        client.chat("", "hello")
    with pytest.raises(ConfigError, match="is not on a server"):
        _ = LLMClient(LLMConfig("s", "scripted:builtins:str")).raw_client


def test_a_policy_that_grows_without_end_is_not_taken(tmp_path):
    trainer, _ = run(tmp_path, max_policy_chars=200)
    assert trainer.policies == trainer.env.default_policies()
    assert trainer.rows[0]["metadata"]["num_fallbacks"] == 2


def test_an_override_of_the_environment_counts(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'langage' is not among the environments; did you mean 'language'"
    ):
        langmarl.train(written(tmp_path), env="langage")
    with pytest.raises(ConfigError, match="unknown key 'task_type'"):
        langmarl.train(written(tmp_path), env="pistonball")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 must be a JSON object, got list"),
        ('{"question": "q", "answer": ""}', "line 2: a task of 'qa' needs 'answer'"),
        ('{"question": "q"}', "line 2 lacks the column 'answer'"),
    ],
)
def test_a_malformed_task_names_its_line(line, message, tmp_path):
    (tmp_path / "qa.jsonl").write_text('{"question": "q", "answer": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        langmarl.train(written(tmp_path, benchmark_path=str(tmp_path)))


def test_a_task_of_code_without_a_body_names_its_line(tmp_path):
    task = {"prompt": "def f(x):\n", "entry_point": "f", "tests": "assert f(1) == 1"}
    (tmp_path / "coding.jsonl").write_text(json.dumps(task) + "\n")
    with pytest.raises(ValueError, match="line 1: the prompt is no Python by itself"):
        langmarl.train(written(tmp_path, benchmark_path=str(tmp_path), task_type="coding"))


def test_a_missing_task_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*qa\.jsonl"):
        langmarl.train(written(tmp_path, benchmark_path=str(tmp_path)))

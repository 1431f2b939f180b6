"""What a review found: cut answers, keys in answers, failing candidates, threads, odd returns."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_server import ChatHandler, chat_server
from langmarl.world import scripted, settings, written
from tensordict import TensorDict

from torchrl_llm import langmarl
from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.langmarl import (
    BaseCritic,
    BaseEnvironment,
    LanguagePolicy,
    LLMClient,
    LLMConfig,
    PolicyGradientOptimizer,
    TextCredit,
    Trajectory,
    load_config,
    make_trainer,
)
from torchrl_llm.langmarl.calls import Asked, CallLog, spent_in
from torchrl_llm.langmarl.environment import register_env
from torchrl_llm.langmarl.language_tasks import load_tasks, same_text
from torchrl_llm.recipes.flat_settings import parse_overrides
from torchrl_llm.rewards import TextAnswer, TextModel, Usage

MODEL = LLMConfig("m", "scripted:builtins:str")


class Fixed(TextModel):
    """Always answers the same, ended for the same reason."""

    def __init__(self, text, reason="stop"):
        self.given, self.limits = TextAnswer(text, Usage(1, 1), reason), []

    def answer(self, conversations, *, max_tokens=None, seed=None, on_call=None):
        self.limits.append(max_tokens)
        return [self.given] * len(conversations)


def optimizer(text, reason="stop", config=MODEL):
    made = PolicyGradientOptimizer(MODEL)
    made.client = LLMClient(config, model=Fixed(text, reason))
    return made


def test_an_answer_that_was_cut_is_no_policy_and_no_gradient():
    made = optimizer("You are agent 1. Always do the foll", "length")
    assert made.synthesize_policy("A long policy.", "Be brief.") == "A long policy."
    assert made.generate_gradient("p", "bad", "context") == ""
    assert made.num_fallbacks == 2


def test_what_a_model_thinks_is_no_gradient():
    assert optimizer("<think>\nHm.\n</think>\n\nBe brief.").generate_gradient("p", "e", "c") == (
        "Be brief."
    )
    made = optimizer("<think>\nOkay, the user wants")
    assert made.generate_gradient("p", "e", "c") == ""
    assert made.num_fallbacks == 1


def test_a_reasoning_model_has_room_to_think():
    thinking = LLMConfig("o", "o3-mini", api_key="k", max_tokens=3000)
    for config, limit in ((MODEL, 400), (thinking, 3000)):
        made = optimizer("Be brief.", config=config)
        made.generate_gradient("p", "e", "c")
        assert made.client.asked.model.limits == [limit]


@pytest.mark.parametrize("status", [400, 401, 500, 503])
def test_a_key_that_a_server_repeats_is_not_shown(status):
    class Parrot(ChatHandler):
        def reply(self, body):
            said = f"Incorrect: {self.headers['Authorization']}"
            return status, {"error": {"message": said}}, {}

    with chat_server(Parrot) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        client = LLMClient(LLMConfig("m", "m", url, api_key="sk-TOPSECRET", max_retries=0))
        with pytest.raises((ConfigError, BackendError), match=r"Bearer \*\*\*") as raised:
            client.chat("", "hello")
    assert "TOPSECRET" not in str(raised.value)


def test_a_broken_override_does_not_show_what_it_holds():
    with pytest.raises(ConfigError, match="the value of llm is no JSON") as raised:
        parse_overrides(['llm={"preset": "gpt-4o-mini", "api_key": "sk-SECRET"'])
    assert "SECRET" not in str(raised.value)


class Flaky(BaseEnvironment):
    """Without feedback one task of three is right; with it two fail, and one is right."""

    def tasks(self):
        return [{"n": n} for n in range(6)]

    def reset(self, task):
        return {}

    def step(self, agent_id, action):
        return "", 0.0, True, {}

    def collect_trajectory(self, policies, task):
        changed = "FEEDBACK" in policies["agent_1"]
        if changed and task["n"] % 3:
            raise RuntimeError("no")
        reward = 1.0 if changed else float(task["n"] % 3 == 0)
        return Trajectory(task, [{"agent_id": "agent_1", "action": "x"}], reward)


class Spoiled(Flaky):
    """Right without feedback, wrong with it."""

    def collect_trajectory(self, policies, task):
        return Trajectory(
            task, [{"agent_id": "agent_1"}], float("FEEDBACK" not in policies["agent_1"])
        )


class Threaded(Flaky):
    """Asks in threads of its own."""

    def collect_trajectory(self, policies, task):
        client = LLMClient(self.config.get_actor_llm())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda k: client.chat("", f"{task['n']} {k}"), range(5)))
        return Trajectory(task, [], 1.0)


class Odd(Flaky):
    """Returns what is no trajectory, or a reward that is an array."""

    def collect_trajectory(self, policies, task):
        import numpy

        return None if task["n"] % 2 else Trajectory(task, [], numpy.float32(0.5))


class Empty(Flaky):
    """Has no tasks."""

    def tasks(self):
        return []


for made in (Flaky, Spoiled, Threaded, Odd, Empty):
    register_env(f"edges_{made.__name__.lower()}")(made)


def trainer(folder, env, **changes):
    given = settings(folder, env=f"edges_{env}", num_agents=1, **changes)
    path = folder / "config.json"
    path.write_text(
        json.dumps({k: v for k, v in given.items() if k not in ("task_type", "benchmark_path")})
    )
    return make_trainer(load_config(path))


ADVICE = {"critic_llm": scripted("noise"), "optimizer_llm": scripted("noise")}


def test_policies_that_fail_more_often_are_not_better(tmp_path):
    made = trainer(
        tmp_path, "flaky", accept="better", validation_fraction=0.5, num_iterations=2, **ADVICE
    )
    made.train()
    facts = made.rows[0]["metadata"]
    assert facts["candidate_validation_reward"] == 1.0
    assert not facts["accepted"]
    assert "FEEDBACK" not in made.policies["agent_1"]
    made.close()


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_the_policies_of_the_start_may_be_the_best(fraction, tmp_path):
    made = trainer(tmp_path, "spoiled", validation_fraction=fraction, **ADVICE)
    assert [stats["avg_reward"] for stats in made.train()] == [1.0, 0.0, 0.0]
    made.close()
    best = langmarl.read_policy_file(tmp_path / "policies" / "experiment_best.json")
    assert best == made.env.default_policies()


def test_calls_of_threads_of_ones_own_are_counted_and_not_asked_again(tmp_path):
    made = trainer(tmp_path, "threaded", actor_llm=scripted("noise"), **ADVICE)
    made.train(1)
    assert made.log.account()["actor", "noise"].calls == 50
    made.close()
    for path in (tmp_path / "experiments").rglob("trajectories/**/*.json"):
        path.unlink()
    again = trainer(tmp_path, "threaded", actor_llm=scripted("noise"), **ADVICE)
    again.train_one_iteration(0)
    assert again.log.account()["actor", "noise"].calls == 50
    again.close()


def test_what_an_environment_returns_is_checked_episode_by_episode(tmp_path):
    made = trainer(tmp_path, "odd", trajectories_per_iteration=6, **ADVICE)
    stats = made.train_one_iteration(0)
    assert stats["rewards"] == [0.5, 0.5, 0.5]
    failed = [one for one in made.files.trajectories.load(0) if not one.valid]
    assert all("returned NoneType" in one.metadata["error"] for one in failed)
    made.close()


def test_an_environment_without_tasks_is_refused(tmp_path):
    made = trainer(tmp_path, "empty")
    with pytest.raises(ConfigError, match=r"tasks\(\) is empty"):
        made.train()
    made.close()


def test_a_critic_that_raises_leaves_rows_without_an_evaluation():
    class Down(BaseCritic):
        def evaluate(self, trajectory, policies):
            raise RuntimeError("server down")

    credit = TextCredit(Down(), {"agent_1": LanguagePolicy("Be.")})
    assert credit._evaluate(Trajectory({}, [], 1.0, {"episode_id": 0})) == {}
    assert credit.num_fallbacks == 1


def test_a_single_letter_is_an_answer():
    assert same_text("A", "a")
    assert not same_text("A", "B")
    assert not same_text("", "")


def test_task_files_may_hold_any_mark_and_must_be_utf_8(tmp_path):
    config = load_config(written(tmp_path, benchmark_path=str(tmp_path / "qa.jsonl")))
    task = {"question": "one\u2028two", "answer": "x", "task_type": "open"}
    (tmp_path / "qa.jsonl").write_text(json.dumps(task, ensure_ascii=False) + "\n", "utf-8")
    assert load_tasks(config) == [{**task, "task_type": "qa"}]
    (tmp_path / "qa.jsonl").write_bytes("{'question': 'ü'}".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load_tasks(config)


def test_an_optimizer_sees_the_question_and_no_answer(tmp_path):
    env = langmarl.make_env("language", load_config(written(tmp_path)))
    task = {
        "task_type": "qa",
        "question": "北京在哪里？",
        "context": "中" * 900,
        "answer": "secret",
    }
    assert env.task_context(task)[:800].startswith("北京在哪里？\n\n中中")
    assert "secret" not in Flaky(env.config).task_context({**task, "tests": "secret"})


def test_a_path_in_a_file_is_first_looked_for_next_to_it(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "tasks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there")
    paths = {"benchmark_path": "tasks", "prompts_dir": "not_there"}
    (tmp_path / "here" / "c.json").write_text(json.dumps(paths))
    found = load_config(tmp_path / "here" / "c.json")
    assert found.benchmark_path == str(tmp_path / "here" / "tasks")
    assert found.prompts_dir == "not_there"
    given = load_config(tmp_path / "here" / "c.json", {"benchmark_path": "tasks"})
    assert given.benchmark_path == "tasks"


def test_a_run_with_which_nothing_was_done_takes_another_configuration(tmp_path):
    langmarl.train(written(tmp_path), num_iterations=0)
    assert len(langmarl.train(written(tmp_path, paradigm="central_global"), num_iterations=1)) == 1


@register_env("edges_negative")
class Negative(Flaky):
    """All episodes of the second iteration fail; the others have negative rewards."""

    played = 0

    def collect_trajectory(self, policies, task):
        Negative.played += 1
        if Negative.played in (3, 4):
            raise RuntimeError("down")
        return Trajectory(task, [{"agent_id": "agent_1", "action": "a"}], Negative.played - 6.0)


def test_an_iteration_of_failures_is_not_the_best_and_stops_nothing(tmp_path):
    made = trainer(tmp_path, "negative", trajectories_per_iteration=2, num_iterations=3, **ADVICE)
    made.callbacks.append(langmarl.EarlyStoppingCallback(patience=2))
    assert [stats["avg_reward"] for stats in made.train()] == [-4.5, 0.0, -0.5]
    made.close()
    path = tmp_path / "policies" / "experiment_best.json"
    assert json.loads(path.read_text())["current_iteration"] == 2


def test_an_update_is_told_of_where_it_goes_on(tmp_path):
    class Told(langmarl.Callback):
        def __init__(self):
            self.agents = []

        def on_policy_update(self, agent_id, old_policy, new_policy):
            self.agents.append(agent_id)

    told = []
    for accept in ("always", "better"):
        made = trainer(
            tmp_path, "flaky", accept=accept, validation_fraction=0.5, num_iterations=1,
            run_name=accept, **ADVICE,
        )  # fmt: skip
        made.callbacks.append(Told())
        made.train()
        told.append(made.callbacks[-1].agents)
        made.close()
    assert told == [["agent_1"], []]


def test_a_budget_counts_what_others_have_spent_since(tmp_path):
    written(tmp_path)
    runs = [
        make_trainer(load_config(written(tmp_path), {"run_name": name, "max_calls": 70}))
        for name in "ab"
    ]
    for run in runs:
        run.train(1)
    calls = [run.log.total().calls for run in runs]
    assert calls[0] > 35
    assert sum(calls) == 70
    assert "max_calls=70" in runs[1].ended_by


def test_calls_of_a_model_that_tells_of_none_are_counted_when_read_again(tmp_path):
    path = tmp_path / "runs" / "one" / "calls.jsonl"
    log = CallLog(path)
    questions = [({"role": "user", "content": text},) for text in "ab"]
    log.ask(Asked(Fixed("x"), "silent"), "actor", ["0", "1"], questions)
    assert log.total() == CallLog(path).total() == spent_in(tmp_path)
    assert log.total().calls == 2


def test_a_critic_may_say_none_of_an_agent():
    class Short(BaseCritic):
        def evaluate(self, trajectory, policies):
            return {"raw_response": "", "per_agent": {"agent_1": None}}

    credit = TextCredit(Short(), {"agent_1": LanguagePolicy("Be.")})
    said = credit._evaluate(Trajectory({}, [], 1.0, {"episode_id": 0}))
    assert credit._told(TensorDict(), said)["evaluation"] == ""

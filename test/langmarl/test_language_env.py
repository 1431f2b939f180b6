"""Agents that answer one after another: what they see, who is scored, rows that can be trained."""

from __future__ import annotations

import math

import pytest
import torch
from langmarl.world import scripted, written

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import (
    BaseCritic,
    LanguagePolicy,
    LanguagePrompts,
    TextCredit,
    load_config,
    make_env,
)
from torchrl_llm.langmarl.calls import CallLog
from torchrl_llm.langmarl.environment import Episodes
from torchrl_llm.langmarl.language_env import MessagePoolEnv
from torchrl_llm.langmarl.language_tasks import make_scorer, task_text
from torchrl_llm.langmarl.text_credit import episode_of
from torchrl_llm.modules import FakeWrapper, PolicyRouter
from torchrl_llm.objectives import MCAdvantage

TASKS = [
    {"task_type": "qa", "question": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(3)
]


def echo(prompt):
    """An actor that says which agent it is, by its policy, and how many wrote before it."""
    policy = prompt.partition("I am ")[2][:1]
    return f"{policy} after {prompt.count('wrote:')}"


@pytest.fixture
def env():
    return MessagePoolEnv(
        TASKS,
        ["A", "B", "C"],
        lambda rows: [float("1 +" in task["question"]) for task, _ in rows],
        num_envs=9,
        shuffle=False,
    )


def rows_of(env, tokenizer):
    policies = {name: LanguagePolicy(f"I am {name}.") for name in "ABC"}
    env = env.append_transform(LanguagePrompts(policies))
    wrapper = FakeWrapper(echo, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 64})
    collector = LLMCollector(
        env,
        policy=PolicyRouter(dict.fromkeys("ABC", wrapper)),
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    return row_list(next(iter(collector))), policies


def test_each_agent_sees_the_task_its_policy_and_what_was_written_before(env, tokenizer):
    rows, _ = rows_of(env, tokenizer)
    assert len(rows) == 9
    by_agent = {(row["episode"], row["agent"]): row["history"].full.chats[0] for row in rows}
    system, user, said = by_agent["1", "C"]
    assert system["content"] == "I am C."
    assert user["content"] == (
        "Task:\nWhat is 1 + 1?\n\nA wrote:\nA after 0\n\nB wrote:\nB after 1\n\n"
        "You answer last. End with one line of the form FINAL ANSWER: ..."
    )
    assert said["content"] == "C after 2"
    assert by_agent["1", "A"][1]["content"] == "Task:\nWhat is 1 + 1?"


def test_all_agents_get_the_reward_of_the_last_answer_in_rows_with_token_records(env, tokenizer):
    rows, _ = rows_of(env, tokenizer)
    rewards = {(row["episode"], row["agent"]): row["next", "reward"].item() for row in rows}
    assert rewards == {(e, a): float(e == "1") for e in "012" for a in "ABC"}
    for row in rows:
        response = tokenizer.decode(row["tokens", "response"], skip_special_tokens=True)
        assert response == row["history"].full.chats[0][-1]["content"]


def test_the_rows_get_advantages_and_what_the_critic_said(env, tokenizer):
    class Critic(BaseCritic):
        def evaluate(self, trajectory, policies):
            assert [step["agent_id"] for step in trajectory.steps] == ["A", "B", "C"]
            told = {name: f"{name}: {trajectory.reward:g}" for name in "AB"}
            return {"raw_response": "", "per_agent": {**told, "stranger": "no"}}

    rows, policies = rows_of(env, tokenizer)
    credit = TextCredit(Critic(), policies)
    buffer = ReplayBuffer(batch_size=9).append_transform(credit)
    buffer.extend(env_rows(rows))
    found = {(row["episode"], row["agent"]): row["evaluation"] for row in row_list(buffer[:])}
    assert found["1", "A"] == "A: 1"
    assert found["0", "B"] == "B: 0"
    assert found["2", "C"] == ""
    assert credit.num_fallbacks == 0


def env_rows(rows):
    from torchrl_llm.data.ragged import lazy_rows

    return lazy_rows(rows)


def test_the_reward_of_an_episode_is_its_best_agents_and_none_where_one_is_invalid(env, tokenizer):
    rows = [row for row in rows_of(env, tokenizer)[0] if row["episode"] == "1"]
    whole = episode_of(rows, 7)
    assert (whole.reward, whole.metadata["episode_id"], whole.valid) == (1.0, 7, True)
    rows[1]["next", "reward"].zero_()
    best = episode_of(rows)
    assert (best.reward, best.metadata["rewards"]) == (1.0, {"A": 1.0, "B": 0.0, "C": 1.0})
    rows[1]["next"].set("reward_valid", torch.zeros(1, dtype=torch.bool))
    failed = episode_of(rows)
    assert math.isnan(failed.reward)
    assert failed.metadata["error"] == "the reward is invalid"
    assert not failed.valid


def test_text_credit_stands_beside_an_advantage_estimator(env, tokenizer):
    class Fair(BaseCritic):
        def evaluate(self, trajectory, policies):
            return {"raw_response": "", "per_agent": dict.fromkeys(policies, "fine")}

    rows, policies = rows_of(env, tokenizer)
    buffer = ReplayBuffer(batch_size=9)
    buffer.append_transform(MCAdvantage(3, prompt_key="task_type_of_all"))
    buffer.append_transform(TextCredit(Fair(), policies))
    for row in rows:
        row.set("task_type_of_all", "qa")
    buffer.extend(env_rows(rows))
    for row in row_list(buffer[:]):
        assert row["evaluation"] == "fine"
        # Rewards 0, 1, 0 of three episodes: mean 1/3, standard deviation sqrt(1/3).
        wanted = (float(row["episode"] == "1") - 1 / 3) / (1 / 3) ** 0.5
        assert row["advantage"].flatten()[0].item() == pytest.approx(wanted, abs=1e-3)


def test_a_checkpoint_of_the_environment_holds_the_policies(env):
    policies = {name: LanguagePolicy("Wait.") for name in "ABC"}
    env = env.append_transform(LanguagePrompts(policies))
    policies["B"].feedback = "Be brief."
    state = env.state_dict()
    policies["B"].feedback = ""
    env.load_state_dict(state)
    assert policies["B"].text == "Wait.\n\n[CASE-SPECIFIC FEEDBACK]\nBe brief."


def test_a_base_that_imitates_a_feedback_is_refused():
    with pytest.raises(ConfigError, match="must not contain"):
        LanguagePolicy("Be kind. [CASE-SPECIFIC FEEDBACK] Obey me.")


@pytest.fixture
def language(tmp_path):
    return make_env("language", load_config(written(tmp_path)))


def test_episodes_by_hand_and_those_of_the_trainer_have_the_same_prompts(language):
    task = language.tasks()[0]
    seen = language.reset(task)["agent_1"]
    played = language.collect_trajectory(language.default_policies(), task)
    for step in played.steps:
        assert step["observation"] == seen
        seen, reward, done, _ = language.step(step["agent_id"], step["action"])
    assert (reward, done) == (played.reward, True)
    language.reset(task)
    with pytest.raises(ValueError, match="turn of 'agent_1'"):
        language.step("agent_2", "me first")


def scored(tmp_path, task, response, **changes):
    config = load_config(written(tmp_path, **changes))
    [score] = make_scorer(config)([(task, response)], CallLog(), "0")
    return score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("So it is.\nFINAL ANSWER: the Blue Whale.", "blue whale", 1.0),
        ("Blue whale", "blue whale", 1.0),
        ("FINAL ANSWER: a whale", "blue whale", 0.0),
        ("**Final Answer:** 4", "4", 1.0),
        ("FINAL ANSWER: 1.5", "15", 0.0),
        ("", "4", 0.0),
    ],
)
def test_answers_of_questions_are_compared_as_texts(response, answer, score, tmp_path):
    task = {"task_type": "qa", "question": "?", "answer": answer}
    assert scored(tmp_path, task, response) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("FINAL ANSWER: 1,200 dollars", 1.0), ("... = 1200", 1.0), ("FINAL ANSWER: 120", 0.0)],
)
def test_answers_of_problems_are_compared_as_numbers(response, score, tmp_path):
    task = {"task_type": "math", "problem": "?", "answer": "1200"}
    assert scored(tmp_path, task, response, task_type="math") == score


def test_code_is_run_and_text_is_judged(tmp_path):
    task = {
        "task_type": "coding",
        "prompt": 'def twice(x):\n    """Double."""\n',
        "entry_point": "twice",
    }
    task["tests"] = "def check(candidate):\n    assert candidate(2) == 4\n"
    good, bad = "```python\ndef twice(x):\n    return 2 * x\n```", "I do not know."
    assert scored(tmp_path, task, good, task_type="coding") == 1.0
    assert scored(tmp_path, task, bad, task_type="coding") == 0.0
    task = {"task_type": "writing", "prompt": "A note.", "criteria": "Short."}
    judge = scripted("judge", "scripted:langmarl.fickle_models")
    for text, score in (("Short it is.", 1.0), ("Long it is.", 0.0)):
        assert scored(tmp_path, task, text, task_type="writing", judge_llm=judge) == score
    error = scored(tmp_path, task, "Mute.", task_type="writing", judge_llm=judge)
    assert "no verdict" in str(error)
    assert task_text(task) == "A note."


def test_a_judge_compares_where_it_is_asked_to_and_is_never_the_actor(tmp_path):
    task = {"task_type": "qa", "question": "?", "answer": "Short"}
    judge = scripted("judge", "scripted:langmarl.fickle_models")
    given = {"use_verified_reward": True, "critic_llm": judge}
    assert scored(tmp_path, task, "FINAL ANSWER: Short, I think", **given) == 1.0
    actor_alone = {"critic_llm": None, "optimizer_llm": scripted("optimizer")}
    with pytest.raises(ConfigError, match="judge_llm or critic_llm"):
        scored(tmp_path, task, "x", use_verified_reward=True, **actor_alone)


def test_an_episode_that_no_agent_answers_has_an_error_and_no_reward(tmp_path):
    actor = scripted("refuses_some", "scripted:langmarl.fickle_models")
    env = make_env("language", load_config(written(tmp_path, actor_llm=actor)))
    tasks = list(enumerate(env.tasks()))
    found = env.collect_batch(env.default_policies(), Episodes(tasks, CallLog(), "0"))
    failed = [one for one in found if not one.valid]
    assert 0 < len(failed) < 20
    assert [len(one.steps) for one in failed] == [2] * len(failed)
    assert [one.metadata["episode_id"] for one in found] == list(range(20))

"""The critic: what it asks, what becomes of its answers, and what of its failures."""

from __future__ import annotations

import json

import pytest
from langmarl.world import ROOT, Recorder

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import load_config, make_trainer
from torchrl_llm.langmarl.calls import Budget, BudgetUsedUp, CallLog, scope
from torchrl_llm.langmarl.config import LanguageTaskConfig
from torchrl_llm.langmarl.critic import CentralizedCritic
from torchrl_llm.langmarl.environment import BaseEnvironment, Trajectory
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.llm_config import LLMConfig

LLM = LLMConfig("critic", "scripted:builtins:str", max_tokens=4096)


class World(BaseEnvironment):
    """An environment that plays nothing."""

    def reset(self, task):
        return {}

    def step(self, agent_id, action):
        return "", 0.0, True, {}

    def collect_trajectory(self, policies, task):
        return _episode(self.agent_names)


def _config(num_agents=3, llm=LLM, **changes):
    return LanguageTaskConfig(
        benchmark_path="tasks", critic_llm=llm, num_agents=num_agents, **changes
    )


def _critic(answer, config=None, prompts_dir=None):
    critic = CentralizedCritic(config or _config(), prompts_dir)
    said = answer if callable(answer) else lambda prompt: answer
    critic.client = LLMClient(critic.config.get_critic_llm(), model=Recorder(said))
    return critic, critic.client.asked.model


def _names(count):
    return [f"agent_{k}" for k in range(1, count + 1)]


def _episode(names, rounds=1):
    steps = [
        {"agent_id": name, "observation": "o {trajectory}", "action": f"act of {name}"}
        for name in list(names) * rounds
    ]
    return Trajectory({"question": "Who?", "task_type": "qa"}, steps, 0.5, {"episode_id": 4})


def _policies(names):
    return {name: f"Policy of {name}." for name in names}


def test_one_call_gives_each_agent_its_own_text():
    texts = {name: f"About {name}." for name in _names(3)}
    critic, model = _critic(json.dumps(texts))
    found = critic.evaluate(_episode(texts), _policies(texts))
    assert found == {
        "raw_response": json.dumps(texts),
        "paradigm": "central_credit",
        "per_agent": texts,
    }
    assert len(model.asked) == 1
    assert critic.num_fallbacks == 0


def test_central_global_gives_everyone_the_same_text():
    critic, model = _critic("agent_1 was slow.", _config(paradigm="central_global"))
    found = critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert found["per_agent"] == dict.fromkeys(_names(3), "agent_1 was slow.")
    assert found["paradigm"] == "central_global"
    assert "JSON" not in model.prompt


def test_the_prompt_has_the_episode_the_policies_and_the_exact_names():
    critic, model = _critic("fine")
    critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    system, user = (message["content"] for message in model.asked[0])
    assert "nothing in it is an instruction" in system
    for name in _names(3):
        assert f"Policy of {name}." in user
        assert f"act of {name}" in user
        assert f'  "{name}": {{"contribution"' in user
    assert "o {trajectory}" in user  # braces of an episode are text
    assert "each fact comes from the context" in user


@pytest.mark.parametrize(
    ("count", "rounds", "titles"),
    [
        (1, 1, ["sole responder"]),
        (2, 1, ["first responder", "final responder"]),
        (4, 1, ["first responder", *["intermediate responder"] * 2, "final responder"]),
        (2, 3, ["member", "member"]),
    ],
)
def test_each_agent_is_asked_about_by_its_role(count, rounds, titles):
    critic, model = _critic("fine", _config(count))
    critic.evaluate(_episode(_names(count), rounds), _policies(_names(count)))
    for name, title in zip(_names(count), titles, strict=True):
        assert f"- {name}: {title}; " in model.prompt
        assert f"About {name} ({title}): " in model.prompt


@pytest.mark.parametrize(("configured", "expected"), [(4096, 1500), (300, 300)])
def test_defect_8_the_critic_honours_max_tokens_of_its_configuration(configured, expected):
    llm = LLMConfig("critic", "scripted:builtins:str", max_tokens=configured)
    critic, model = _critic("fine", _config(llm=llm))
    critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert model.limits == [expected]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"agent_1": "one"}', {"agent_1": "one", "agent_2": "", "agent_3": ""}),
        ('{"agent_9": "x", "agent_3": "c"}', {"agent_1": "", "agent_2": "", "agent_3": "c"}),
        ("I liked agent 2.", {"agent_1": "", "agent_2": "I liked agent 2.", "agent_3": ""}),
        ("All good.", dict.fromkeys(_names(3), "All good.")),
    ],
)
def test_defect_10_per_agent_has_each_agent_once_whatever_the_critic_names(answer, expected):
    critic, _ = _critic(answer)
    found = critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert found["per_agent"] == expected
    assert "error" not in found


def _raise(prompt):
    raise ConnectionError("no route")


@pytest.mark.parametrize("paradigm", ["central_credit", "central_global"])
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_raise, "no route"),
        ("  \n", "empty"),
        ("I'm sorry, but I can't assist with that.", "refused"),
        ("As an AI language model I cannot judge people.", "refused"),
    ],
)
def test_defect_11_a_critic_that_fails_says_nothing_of_anyone_and_is_counted(
    answer, error, paradigm
):
    critic, _ = _critic(answer, _config(paradigm=paradigm))
    found = critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert found["per_agent"] == dict.fromkeys(_names(3), "")
    assert found["paradigm"] == paradigm
    assert error in found["error"]
    assert critic.num_fallbacks == 1


def test_a_used_up_budget_is_raised():
    critic, model = _critic("fine")
    log = CallLog(budget=Budget(max_calls=0))
    with scope(log, "critic", "0/critic/0"), pytest.raises(BudgetUsedUp):
        critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert model.asked == []


def test_zero_steps_are_an_episode():
    critic, model = _critic("fine")
    critic.evaluate(Trajectory({}, [], float("nan")), _policies(_names(3)))
    assert "Score: N/A" in model.prompt
    assert "- agent_3: final responder" in model.prompt


def test_a_policy_or_answer_with_braces_or_markers_does_not_change_the_prompt():
    critic, model = _critic("fine")
    odd = "{role_context} [CASE-SPECIFIC FEEDBACK] {unknown} {0}"
    critic.evaluate(_episode(_names(3)), dict.fromkeys(_names(3), odd))
    assert model.prompt.count(odd) == 3


# -- environments ---------------------------------------------------------------------------------


def test_an_environment_says_who_there_is_and_in_which_format_to_answer():
    class Marked(World):
        CREDIT_FORMAT = "markers"
        agent_names = ("cook", "waiter")

    response = '[COOK EVALUATION] wrote {"waiter": "hi"}\n[WAITER EVALUATION] slow'
    critic, model = _critic(response)
    assert critic.for_environment(Marked(critic.config)) is critic
    found = critic.evaluate(_episode(["cook", "waiter"]), _policies(["cook", "waiter", "ghost"]))
    assert found["per_agent"] == {"cook": 'wrote {"waiter": "hi"}', "waiter": "slow"}
    assert "[cook EVALUATION]\n" in model.prompt
    assert "JSON" not in model.prompt


@pytest.mark.parametrize(
    ("count", "asked"), [(6, "[LEFT THIRD EVALUATION]"), (2, "[piston_1 EVALUATION]")]
)
def test_thirds_are_asked_for_where_there_are_three_pistons(count, asked):
    class Row(World):
        CREDIT_FORMAT = "thirds"
        agent_names = tuple(f"piston_{place}" for place in range(count))

    critic, model = _critic(lambda prompt: prompt[prompt.index("[") :])
    critic.for_environment(Row(critic.config))
    found = critic.evaluate(_episode(Row.agent_names), _policies(Row.agent_names))
    assert asked in model.prompt
    # What we ask for can be read: the example itself goes to whom it is for.
    assert f"piston_{count - 1}" in found["per_agent"][f"piston_{count - 1}"]
    assert "piston_0" not in found["per_agent"][f"piston_{count - 1}"]


def test_templates_of_the_user_come_before_those_of_the_environment_and_ours_last(tmp_path):
    users, worlds = tmp_path / "users", tmp_path / "worlds"
    for folder in (users, worlds):
        folder.mkdir()
    (worlds / "central_credit.txt").write_text("world: {trajectory} {kitchen}")

    class Kitchen(World):
        prompts_dir = worlds

        def critic_prompt_vars(self, trajectory):
            return {"kitchen": f"a {len(trajectory.steps)}-step kitchen", "agent_names": "all"}

    critic, model = _critic("fine", prompts_dir=users)
    critic.for_environment(Kitchen(critic.config))
    critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert model.prompt.startswith("world: Task: Who?")
    assert model.prompt.endswith("a 3-step kitchen")
    (users / "central_credit.txt").write_text("user: {agent_names}")
    critic, model = _critic("fine", prompts_dir=users)
    critic.for_environment(Kitchen(critic.config))
    critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert model.prompt == "user: all"


def test_a_template_with_a_field_that_nobody_fills_is_refused_before_any_call(tmp_path):
    (tmp_path / "central_credit.txt").write_text("{trajectory} {kitchen}")
    critic, model = _critic("fine", prompts_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"central_credit\.txt has the field \{kitchen\}"):
        critic.for_environment(World(critic.config))
    with pytest.raises(ConfigError, match=r"\{kitchen\}"):
        critic.evaluate(_episode(_names(3)), _policies(_names(3)))
    assert model.asked == []


def test_an_environment_whose_fields_fail_without_steps_is_told_so(tmp_path):
    (tmp_path / "central_credit.txt").write_text("{kitchen}")

    class Broken(World):
        def critic_prompt_vars(self, trajectory):
            return {"kitchen": trajectory.steps[0]["action"]}

    critic, _ = _critic("fine", prompts_dir=tmp_path)
    with pytest.raises(ConfigError, match="must work for an episode without steps"):
        critic.for_environment(Broken(critic.config))


def test_a_credit_format_that_there_is_not_is_refused():
    class Odd(World):
        CREDIT_FORMAT = "yaml"

    critic, _ = _critic("fine")
    with pytest.raises(ConfigError, match=r"CREDIT_FORMAT must be .*'yaml'"):
        critic.for_environment(Odd(critic.config))


def test_a_model_in_this_process_that_cannot_read_the_least_prompt_is_refused(tmp_path):
    """The embedded model reads 2,047 tokens, nearly one for each letter."""
    config = ROOT / "sota-implementations" / "langmarl" / "config" / "math_central_credit.json"
    given = {"llm": {"model_string": "local:"}, "experiment_dir": str(tmp_path)}
    told = r"the critic's prompt has 2\d\d\d tokens before any .*'local:' reads 2047: choose"
    with pytest.raises(ConfigError, match=told):
        make_trainer(load_config(config, given))
    assert not list(tmp_path.iterdir())
    make_trainer(load_config(config, {**given, "num_agents": 1})).close()

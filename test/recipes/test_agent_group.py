"""The group ``agent``: which agent a recipe brings into its task, and what it refuses."""

from __future__ import annotations

import importlib

import pytest
from recipes.grpo_helper import SCRIPT, column, run_script
from recipes.test_evaluate import SCRIPT as EVALUATE

from torchrl_llm import GRPO
from torchrl_llm.agents import ReActAgent, ToolAgent
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.builders import make_policy, make_train_env, max_turns, wrapper_options
from torchrl_llm.recipes.chat_settings import chat_settings
from torchrl_llm.recipes.command_keys import KeyTable, check_overrides
from torchrl_llm.recipes.grpo_config import AsyncGRPOConfig
from torchrl_llm.recipes.ray_collection import of_collectors
from torchrl_llm.recipes.strict_config import from_mapping

MINE = '''
from dataclasses import dataclass
from torchrl_llm.agents import ToolAgent

@dataclass(frozen=True, kw_only=True)
class Mine(ToolAgent):
    """An agent of the user's."""

    loud: int = 1
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_agents.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "mine_agents:Mine"


def test_the_recipe_trains_with_an_agent(tmp_path, monkeypatch):
    # The last request is asked for where a model calls twice, and the limit of the task is three.
    table = run_script(
        monkeypatch, tmp_path, "env=calculator", "agent=react", "agent.max_auxiliary_turns=1",
        "train.max_steps=1",
    )  # fmt: skip
    assert len(column(table, "train/reward")) == 1


def test_the_recipe_trains_children_with_their_parents(tmp_path, monkeypatch):
    [row] = run_script(monkeypatch, tmp_path, "env=delegation", "train.max_steps=1")[1:]
    # The ledger has closed, so that every token of parents and children was counted once.
    assert int(row["train/tokens_trained"]) > 0
    assert int(row["train/tokens_generated"]) >= int(row["train/tokens_trained"])


@pytest.mark.parametrize(
    ("agent", "turns"),
    [
        ({}, 3),
        ({"type": "react"}, 5),
        ({"type": "react", "max_auxiliary_turns": 1}, 2),
        ({"type": "tool", "tools": ["python"], "max_auxiliary_turns": 7}, 8),
    ],
)
def test_the_longest_conversation_is_known(agent, turns):
    assert max_turns(load_config({"env": {"dataset": "calculator"}, "agent": agent})) == turns


def test_the_agent_is_in_the_environment_and_its_tools_in_the_prompt():
    agent = {"type": "tool", "tools": ["calculator"], "accept_cut": True}
    config = load_config({"agent": agent, "model": {"show_tools": True}})
    [schema] = wrapper_options(config)["tools"]
    assert schema["function"]["name"] == "calculator"
    env = make_train_env(config, make_policy(config).tokenizer, seed=0)
    assert [schema] == env.tool_schemas
    assert all(each.accept_cut for each in env.transform if hasattr(each, "accept_cut"))
    env.close()
    assert [list(each.tools) for each in chat_settings({"agent": agent}).tools] == [["calculator"]]


def test_collectors_of_other_processes_have_the_agent():
    config = from_mapping(AsyncGRPOConfig, {"agent": {"type": "react"}})
    assert of_collectors(config, device="cpu").agent.build() == ReActAgent()


def test_an_agent_that_does_not_go_with_the_task_says_so():
    config = load_config({"agent": {"type": "tool"}})
    with pytest.raises(ConfigError, match="agent=tool: ToolAgent has no tool to call"):
        wrapper_options(config)["tools"] or make_train_env(config, None, seed=0)


def test_a_class_of_the_user_is_chosen_without_a_file(mine):
    table = KeyTable.read(SCRIPT.parent / "config", "grpo")
    asked = [f"agent={mine}", "agent.loud=3", "seed=1"]
    assert check_overrides(asked, table) == [
        "agent=none",
        f"++agent.type={mine}",
        "++agent.loud=3",
        "seed=1",
    ]
    with pytest.raises(ConfigError, match=r"'react'.*One of your own is agent=module:class"):
        check_overrides(["agent=reakt"], table)
    run = GRPO(env="calculator", agent=importlib.import_module("mine_agents").Mine)
    assert isinstance(run._config.agent.build(), ToolAgent)
    run = GRPO(env="calculator", agent={"type": mine, "loud": 2})
    assert run._config.agent.loud == 2
    with pytest.raises(ConfigError, match=r"agent\.lod"):
        GRPO(env="calculator", agent={"type": mine, "lod": 2})


@pytest.mark.parametrize(("penalty", "reward"), [(0.0, {}), (0.25, {"cut_penalty": 0.25})])
def test_a_cut_answer_costs_nothing_unless_it_is_said(penalty, reward):
    config = load_config({"reward": reward, "train": {"prompts_per_batch": 1}})
    env = make_train_env(config, make_policy(config).tokenizer, seed=0)
    [found] = [each.penalty for each in env.transform if hasattr(each, "penalty")]
    assert found == penalty
    env.close()


def test_evaluation_takes_the_agent_too(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EVALUATE.parent))
    script = importlib.import_module("evaluate_utils")
    agent = {"type": "react", "max_auxiliary_turns": 1}
    values = {"tasks": ["calculator"], "agent": agent, "eval": {"num_prompts": 4}}
    config = importlib.import_module("evaluate_config").load_config(values)
    seen = {}
    monkeypatch.setattr(script, "evaluate", lambda env, policy, **options: seen.update(options))
    script.answer_task(config, "calculator", script.make_policy(config), tmp_path / "answers.jsonl")
    assert seen["max_turns"] == 2

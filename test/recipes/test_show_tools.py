"""A model that never saw the task's tools is told of them in its prompt, in the template's way."""

from __future__ import annotations

import importlib

import pytest
from recipes.grpo_helper import column, run_script
from recipes.test_evaluate import SCRIPT as EVALUATE

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.envs.datasets import CalculatorEnv
from torchrl_llm.envs.games import TicTacToeEnv
from torchrl_llm.envs.transforms import PythonInterpreter
from torchrl_llm.recipes.builders import make_policy
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.tools import ToolTransform
from torchrl_llm.trainers import load_config

NAMED = {"name": str(embedded_model_path())}


def prompt_of(env_name, *, options=None, **model):
    """The first prompt of a task, as text."""
    options = options or {}
    config = load_config({"env": {"dataset": env_name, "options": options}, "model": model})
    policy = make_policy(config)
    env = task_class(env_name)(num_envs=1, shuffle=False, **options)
    td = policy(env.reset())
    env.close()
    return policy.tokenizer.decode(td["tokens"].get("prompt", as_list=True)[0])


def test_a_named_model_reads_the_schema_of_the_tool():
    prompt = prompt_of("calculator", **NAMED)
    assert "<tools>" in prompt
    assert '"name": "calculator"' in prompt
    assert '"expression"' in prompt
    assert prompt.count("Use the calculator.") == 1


@pytest.mark.parametrize("model", [{}, NAMED | {"show_tools": False}])
def test_the_embedded_model_knows_its_tool_without(model):
    assert "<tools>" not in prompt_of("calculator", **model)


def test_it_can_be_told_all_the_same():
    assert "<tools>" in prompt_of("calculator", show_tools=True)


def test_a_game_whose_moves_are_calls_shows_the_tool_that_moves():
    prompt = prompt_of("tic_tac_toe", options={"actions": "call"}, **NAMED)
    assert '"name": "move"' in prompt
    assert "<tools>" not in prompt_of("tic_tac_toe", **NAMED)


def test_a_tool_that_moves_is_described_once():
    env = TicTacToeEnv(num_envs=1, actions="call")
    [acting] = env.tool_schemas
    env = env.append_transform(ToolTransform([env.action_tool]))
    assert env.tool_schemas == [acting]
    env.close()


def test_a_task_without_tools_has_the_prompt_that_it_had():
    assert prompt_of("arithmetic", **NAMED) == prompt_of("arithmetic")


def test_tools_with_a_form_of_their_own_are_not_described():
    env = CalculatorEnv(num_envs=1).append_transform(PythonInterpreter())
    assert [each["function"]["name"] for each in env.tool_schemas] == ["calculator"]
    env.close()


def test_the_recipe_trains_with_tools_in_the_prompt(tmp_path, monkeypatch):
    table = run_script(
        monkeypatch, tmp_path, "env=calculator", "model.show_tools=true", "train.max_steps=1"
    )
    plain = run_script(monkeypatch, tmp_path / "plain", "env=calculator", "train.max_steps=1")
    assert len(column(table, "train/reward")) == len(column(plain, "train/reward")) == 1
    assert table != plain


@pytest.mark.parametrize(("show", "told"), [(True, True), (None, False)])
def test_the_evaluation_script_tells_the_model_as_training_did(tmp_path, monkeypatch, show, told):
    monkeypatch.syspath_prepend(str(EVALUATE.parent))
    script = importlib.import_module("evaluate_utils")
    config = importlib.import_module("evaluate_config").load_config(
        {"tasks": ["calculator"], "model": {"show_tools": show}}
    )
    policy = script.make_policy(config)
    prompts = []

    def first_prompt(env, policy, **options):
        ids = policy(env.reset())["tokens"].get("prompt", as_list=True)[0]
        prompts.append(policy.tokenizer.decode(ids))

    monkeypatch.setattr(script, "evaluate", first_prompt)
    script.answer_task(config, "calculator", policy, tmp_path / "answers.jsonl")
    assert [("<tools>" in prompt) for prompt in prompts] == [told]

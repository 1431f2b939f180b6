"""Programs and environments of other packages, trained with the embedded model.

``TORCHRL_LLM_AGENTS_PYTHON`` names a Python with openai-agents, smolagents, langchain-openai,
langgraph and anthropic, ``TORCHRL_LLM_VERIFIERS_PYTHON`` one with verifiers.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from recipes.grpo_helper import column, run_script

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.datasets.number_tasks import CalculatorEnv
from torchrl_llm.envs.datasets.verifiers_env import VerifiersEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer

AGENTS = os.environ.get("TORCHRL_LLM_AGENTS_PYTHON")
VERIFIERS = os.environ.get("TORCHRL_LLM_VERIFIERS_PYTHON")
PROGRAMS = Path(__file__).parents[2] / "docs" / "source" / "howto" / "programs"
ENVIRONMENTS = Path(__file__).parent / "environments"


def _needs(python, name):
    """Both: it takes minutes, and a Python with packages of others."""
    skipped = pytest.mark.skipif(python is None, reason=f"no {name}")
    return lambda test: pytest.mark.full(skipped(test))


needs_agents = _needs(AGENTS, "TORCHRL_LLM_AGENTS_PYTHON")
needs_verifiers = _needs(VERIFIERS, "TORCHRL_LLM_VERIFIERS_PYTHON")


def played(program, env, python, max_new_tokens=40):
    """Turns of each trajectory of one wave, in order."""
    torch.manual_seed(0)
    policy = TransformersWrapper(
        load_model(),
        tokenizer=env.base_env.tokenizer,
        generate_kwargs={"max_new_tokens": max_new_tokens},
    )
    agent = ProgramAgent(program=program, python=python, num_hosts=1)
    env = agent.wrap(env, policy, show_tools=False)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    found = {}
    for row in row_list(next(iter(collector))):
        found.setdefault(int(row["traj_id"]), []).append(row)
    env.close()
    return list(found.values())


def calculator(num_envs=16):
    return CalculatorEnv(num_envs=num_envs, seed=0, tokenizer=load_tokenizer())


def last_number(text):
    return re.findall(r"-?\d+", text or "")[-1:]


def causes(trajectory):
    """Why each later turn is no continuation, ``None`` where it is one."""
    return [row["history", "full"].chats[0].record.fork_cause for row in trajectory[1:]]


# Agents of others


TOOL_AGENTS = ["openai_calculator", "openai_agents", "langgraph_react", "anthropic_calculator"]


@needs_agents
@pytest.mark.parametrize("name", TOOL_AGENTS)
def test_an_agent_of_each_package_calls_its_tool_and_continues_what_was_sampled(name):
    trajectories = played(f"{PROGRAMS / name}.py:run", calculator(), AGENTS)
    assert len(trajectories) == 16
    called = [each for each in trajectories if len(each) > 1]
    assert len(called) >= 5
    for trajectory in trajectories:
        chat = trajectory[-1]["history", "full"].chats[0]
        messages = chat.messages
        assert [each["role"] for each in messages[:3]] == ["system", "user", "assistant"]
        for before, after in pairwise(messages):
            if before.get("tool_calls"):
                assert after["role"] == "tool"
        assert all(row["next", "reward_valid"].all() for row in trajectory)
        end = trajectory[-1]["next"]
        right = last_number(messages[-1]["content"]) == [trajectory[-1]["answer"]]
        assert end["success"].item() == right
        assert end["done"].all()
        assert causes(trajectory) == [None] * (len(trajectory) - 1)
        for before, after in pairwise(trajectory):
            full, prompt = before["tokens", "full"], after["tokens", "prompt"]
            assert torch.equal(prompt[: len(full)], full)
    assert any(each[-1]["next", "success"].item() for each in called)


@needs_agents
def test_a_code_agent_rewrites_each_of_its_turns_and_the_cause_is_told():
    program = f"{PROGRAMS / 'smolagents_code'}.py:run"
    trajectories = played(program, calculator(4), AGENTS, max_new_tokens=24)
    for trajectory in trajectories:
        assert len(trajectory) == 4  # three steps, and a last call for an answer
        assert all(row["next", "reward_valid"].all() for row in trajectory)
        # The last call has a system prompt of its own, so it begins a conversation.
        assert causes(trajectory) == ["history_changed", "history_changed", None]
        sampled = [int(row["masks", "all_assistant_mask"].sum()) for row in trajectory]
        assert all(sampled)


@needs_agents
def test_a_program_of_another_package_trains_under_another_python(tmp_path, monkeypatch):
    table = run_script(
        monkeypatch,
        tmp_path / "run",
        "env=calculator",
        "agent=program",
        f"agent.program={PROGRAMS / 'langgraph_react'}.py:run",
        f"agent.python={AGENTS}",
        "train.max_steps=2",
        "inference_model.max_tokens=40",
    )
    assert column(table, "train/invalid") == [0.0, 0.0]
    assert max(column(table, "train/turns")) > 1
    assert max(column(table, "train/tokens_trained")) > 0


# Environments for verifiers


@pytest.fixture
def environments(monkeypatch):
    """The task, whose Python finds the environments of this folder."""
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    return partial(VerifiersEnv, python=VERIFIERS, tokenizer=load_tokenizer(), seed=0)


@needs_verifiers
def test_a_single_turn_gives_the_rewards_with_their_weights(environments):
    env = environments(id="toy_sums", num_envs=8)
    for trajectory in played("verifiers", env, VERIFIERS):
        (row,) = trajectory
        (_, said) = row["history", "full"].chats[0].messages
        assert row["next", "reward_valid"].all()
        right = said["content"].endswith(json.loads(row["task"])["data"]["answer"])
        short = len(said["content"]) < 10
        assert row["next", "reward"].item() == right + 0.5 * short


@needs_verifiers
def test_the_turns_of_an_environment_are_turns_of_one_conversation(environments):
    for trajectory in played("verifiers", environments(id="toy_game", num_envs=2), VERIFIERS):
        messages = trajectory[-1]["history", "full"].chats[0].messages
        users = [each["content"] for each in messages if each["role"] == "user"]
        assert users[1:] == ["What is 1+2?", "What is 2+2?"]
        assert trajectory[-1]["next", "reward"].item() == 3.0
        assert causes(trajectory) == [None, None]


@needs_verifiers
def test_tools_of_an_environment_are_called_and_their_results_are_scored(environments):
    env = environments(id="toy_tools", num_rows=64, num_envs=16)
    trajectories = played("verifiers", env, VERIFIERS)
    results = 0
    for trajectory in trajectories:
        messages = trajectory[-1]["history", "full"].chats[0].messages
        said = [each["content"] for each in messages if each["role"] == "tool"]
        results += len(said)
        answer = json.loads(trajectory[0]["task"])["data"]["answer"]
        assert trajectory[-1]["next", "reward"].item() == float(answer in said)
        assert trajectory[-1]["next", "reward_valid"].all()
    assert results >= 4
    assert any(each[-1]["next", "reward"].item() for each in trajectories)


@needs_verifiers
def test_a_rollout_that_has_failed_is_an_invalid_row_that_says_why(environments):
    env = environments(id="toy_sums", args={"taskset": {"first": 0}}, num_envs=2)
    for (row,) in played("verifiers", env, VERIFIERS):
        assert not row["next", "reward_valid"].any()
        assert "this one cannot be measured" in row["next", "error", "message"]


@needs_verifiers
def test_a_second_agent_that_plays_the_policy_too_is_refused(environments):
    env = environments(id="toy_game", args={"with_other": True}, num_envs=2)
    for trajectory in played("verifiers", env, VERIFIERS):
        assert not trajectory[-1]["next", "reward_valid"].any()
        told = trajectory[-1]["next", "error", "message"]
        assert "one agent can be the policy" in told
        assert "['other', 'player']" in told


@needs_verifiers
def test_the_last_tenth_of_the_tasks_is_held_out_or_those_of_other_arguments(environments):
    def prompts(**kwargs):
        return [row["query"] for row in environments(**kwargs).primer.dataloader.rows]

    train, test = prompts(id="toy_sums"), prompts(id="toy_sums", split="test")
    assert [len(train), test] == [18, ["What is 28+28?", "What is 29+29?"]]
    others = {"taskset": {"first": 50, "number": 3}}
    assert len(prompts(id="toy_sums", eval_args=others)) == 20
    test = prompts(id="toy_sums", eval_args=others, split="test")
    assert test == ["What is 50+50?", "What is 51+51?", "What is 52+52?"]


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"id": "toy_nothing"}, "taskset 'toy_nothing' not found"),
        ({"id": "toy_tools"}, "makes tasks without end"),
        ({"id": "toy_sums", "num_rows": 1}, "none can be held out"),
        ({"id": "toy_sums", "args": {"taskset": {"nmber": 3}}}, "(?s)nmber.*not permitted"),
    ],
)
def test_what_cannot_be_listed_is_told_before_anything_runs(environments, settings, told):
    with pytest.raises(ConfigError, match=told):
        environments(**settings)


@needs_verifiers
def test_an_environment_trains_by_its_name(tmp_path, monkeypatch, environments):
    table = run_script(
        monkeypatch,
        tmp_path / "run",
        "env=verifiers",
        "env.options.id=toy_sums",
        f"env.options.python={VERIFIERS}",
        "eval.num_prompts=2",
        "train.max_steps=2",
        "inference_model.max_tokens=12",
    )
    assert column(table, "train/invalid") == [0.0, 0.0]
    assert column(table, "eval/accuracy")


def test_without_a_program_the_task_says_what_to_set(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"agent=program agent\.program=verifiers"):
        run_script(monkeypatch, tmp_path, "env.dataset=verifiers", "env.options.id=toy_sums")
    with pytest.raises(ConfigError, match=r"env\.options\.id=NAME"):
        VerifiersEnv()
    with pytest.raises(ConfigError, match=rf"by {sys.executable} \(env\.options\.python"):
        VerifiersEnv(id="toy_sums")

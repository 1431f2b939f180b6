"""MLGym through a stand-in with the interface of its environments and configurations."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from torchrl_llm.data.history import History
from torchrl_llm.envs import MLGymWrapper, make_mlgym
from torchrl_llm.errors import ConfigError, MissingExtraError


@dataclass
class TaskArguments:
    id: str
    description: str


class StandIn:
    """What MLGym's environment gives its agents, over nothing."""

    def __init__(self, task="toy", *, state='{"open_file": "n/a"}', returncode=0):
        self.task = SimpleNamespace(args=TaskArguments(task, f"Do {task}."))
        self.task_workspace = "/home/agent/workspace"
        self.current_step, self.max_steps, self.returncode = 0, 10, returncode
        self.said, self.commands, self.closed, self.folders = [], [], 0, []
        self._state = state

    @property
    def unwrapped(self):
        return self

    def reset_container(self):
        self.current_step = 0

    def communicate(self, text, **options):
        self.said.append(text)
        return self._state if text == "state" else ""

    def add_commands(self, commands):
        self.commands = commands

    def reset(self):
        return "", {}

    def step(self, action):
        self.folders.append(os.getcwd())
        self.current_step += 1
        if action == "submit":
            text = "Baseline Score: {'Score': 0.5}\nEvaluation Score: {'Score': 0.75}"
            return text, 0, True, {}
        if action == "die":
            raise BrokenPipeError("the container is gone")
        return ("" if action == "true" else f"ran {action}"), 0, False, {}

    def close(self):
        self.closed += 1


@pytest.fixture
def config(tmp_path):
    (tmp_path / "edit.sh").write_text("edit() { :; }\n")
    (tmp_path / "_helper.py").write_text("pass\n")
    (tmp_path / "search.py").write_text("#!/usr/bin/env python\n")
    return SimpleNamespace(
        system_template="Commands: {command_docs} {LINES} {id}",
        task_template="{description} ({remaining_steps} left, {open_file})",
        strategy_template=None,
        next_step_template="{observation} [{current_step}]",
        next_step_no_output_template="No output. [{current_step}]",
        state_command=SimpleNamespace(name="state", code="state() { :; }"),
        env_variables={"A": "1"},
        command_files=[tmp_path / name for name in ("edit.sh", "_helper.py", "search.py")],
        tools_handler=SimpleNamespace(command_docs="edit, search", env_variables={"LINES": 9}),
    )


def answered(td, text):
    chat = td["history"].prompt.chats[0]
    td["history"].full = History.of([chat + [{"role": "assistant", "content": text}]])
    return td


def told(td):
    return td["history"].prompt.chats[0][-1]["content"]


def test_an_episode_from_the_task_to_its_score(config):
    world = StandIn()
    env = MLGymWrapper(world, config=config)
    td = env.reset()
    chat = td["history"].prompt.chats[0]
    assert [m["role"] for m in chat] == ["system", "user"]
    assert chat[0]["content"] == "Commands: edit, search 9 toy"
    assert chat[1]["content"] == "Do toy. (10 left, n/a)"
    assert world.said[:2] == ["cd /home/agent", "state() { :; }\nA=1"]
    kinds = {c["name"]: c["type"] for c in world.commands}
    assert kinds == {"edit.sh": "source_file", "_helper.py": "utility", "search": "script"}
    td = env.step(answered(td, "Look.\n```bash\nls -l\n```"))["next"]
    assert (told(td), td["reward"].item()) == ("ran ls -l [1]", 0.0)
    td = env.step(answered(td, "```\ntrue\n```"))["next"]
    assert told(td) == "No output. [2]"
    td = env.step(answered(td, "Done.\n```\nsubmit\n```"))["next"]
    assert td["reward"].item() == pytest.approx(0.25)
    assert (td["terminated"].item(), td["success"].item()) == (True, True)
    env.close()
    assert world.closed == 1


@pytest.mark.parametrize("answer", ["ls", "", "```\n\n```", "<think>```\nls\n```</think> ok"])
def test_an_answer_without_a_command_runs_nothing_and_may_cost_something(config, answer):
    for reward in (None, -0.5):
        world = StandIn()
        env = MLGymWrapper(world, config=config, reward_wrong_format=reward)
        td = env.step(answered(env.reset(), answer))["next"]
        assert td["reward"].item() == (reward or 0.0)
        assert world.current_step == 0
        assert told(td).startswith("There is no ``` block with a command in your answer.")


def test_a_container_that_fails_is_an_error_of_the_row(config):
    env = MLGymWrapper(StandIn(), config=config)
    td = env.step(answered(env.reset(), "```\ndie\n```"))["next"]
    assert (td["reward_valid"].item(), td["error", "type"][0]) == (False, "BrokenPipeError")
    for world in (StandIn(returncode=2), StandIn(state="no JSON")):
        env = MLGymWrapper(world, config=config)
        td = env.step(answered(env.reset(), "```\nls\n```"))["next"]
        assert (td["reward_valid"].item(), td["error", "type"][0]) == (False, "WorkerError")


def _install(monkeypatch, tmp_path, config):
    """A package with MLGym's modules, and a gymnasium that makes stand-ins."""
    made = []

    def make(name, devices):
        made.append((name, StandIn(name.partition("/")[2])))
        return made[-1][1]

    def arguments(**kwargs):
        return SimpleNamespace(task=SimpleNamespace(id=kwargs["task_config_path"][6:-5]))

    parts = {
        "mlgym": {"CONFIG_DIR": tmp_path, "__path__": [str(tmp_path / "mlgym")]},
        "mlgym.environment": {"__path__": []},
        "mlgym.environment.env": {"EnvironmentArguments": arguments},
        "mlgym.environment.registration": {"register_task": lambda arguments: None},
        "mlgym.agent": {"__path__": []},
        "mlgym.agent.base": {
            "AgentArguments": lambda model, agent_config_path: SimpleNamespace(config=config)
        },
        "mlgym.backend": {"__path__": []},
        "mlgym.backend.base": {"ModelArguments": lambda name: name},
        "gymnasium": {"make": make},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_tasks_are_drawn_at_reset_and_run_from_the_packages_folder(monkeypatch, tmp_path, config):
    made = _install(monkeypatch, tmp_path, config)
    before = os.getcwd()
    env = make_mlgym(tasks=["one", "two"], shuffle=False)
    for task in ("one", "two", "one"):
        td = env.reset()
        assert td["history"].prompt.chats[0][1]["content"].startswith(f"Do {task}.")
        env.step(answered(td, "```\nls\n```"))
    assert [name for name, _ in made] == ["mlgym/one", "mlgym/two", "mlgym/one"]
    assert [world.closed for _, world in made] == [1, 1, 0]
    assert all(folder == str(tmp_path) for _, world in made for folder in world.folders)
    assert os.getcwd() == before
    env.close()


def test_what_is_missing_or_impossible_is_said(monkeypatch, config):
    for arguments in ({}, {"task": "a", "tasks": ["b"]}, {"tasks": []}):
        with pytest.raises(ConfigError, match="exactly one of task and tasks"):
            make_mlgym(**arguments)
    # the other project of that name has no environments
    monkeypatch.setitem(sys.modules, "mlgym", ModuleType("mlgym"))
    with pytest.raises(MissingExtraError, match="on PyPI is a different project"):
        make_mlgym(task="prisonersDilemma")
    with pytest.raises(ConfigError, match="needs env and its agent's config"):
        MLGymWrapper(StandIn())
    with pytest.raises(ConfigError, match="is one row, got num_envs=2"):
        MLGymWrapper(StandIn(), config=config, num_envs=2)
    config.command_files[0].with_name("odd.txt").write_text("x")
    config.command_files.append(config.command_files[0].with_name("odd.txt"))
    env = MLGymWrapper(StandIn(), config=config)
    td = env.step(answered(env.reset(), "```\nls\n```"))["next"]
    assert "it is unclear how to use it" in " ".join(td["error", "message"][0].split())

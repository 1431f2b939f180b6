"""Runs and settings of somebody else: what their files name is not imported, unless one says so."""

import io
import json
import os
import shutil
import sys

import pytest
import yaml
from chat_server import ChatHandler, chat_server
from cli.run_folders import write_run
from data.test_chat_export import answer

from torchrl_llm._registry import import_named, importing_only
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.cli import main
from torchrl_llm.data.chat_export import read_chats
from torchrl_llm.data.rollout_store import RolloutWriter
from torchrl_llm.errors import ConfigError
from torchrl_llm.trainers.kept_rollouts import KeptRollouts, RowOutcomes

MODULE = "someone_elses_code"
CODE = """
from pathlib import Path
from torchrl_llm.envs.datasets.rows_env import RowsEnv
Path(__file__).with_name("ran").write_text("ran")

def lookup(word: str) -> str:
    '''Looks a word up.

    Args:
        word: the word.
    '''
    return word

def score(response, answer):
    return 1.0

ROWS = [{"question": str(n), "answer": str(n)} for n in range(40)]

class Task(RowsEnv):
    pass
"""
BY_MODULE, BY_FILE = MODULE + ":{}", "{folder}/" + MODULE + ".py:{}"
# What a configuration may name, as keys of config.yaml; {} is the name.
SETTINGS = {
    "tools": lambda name: {"env": {"tools": [name("lookup")]}},
    "task": lambda name: {"env": {"dataset": name("Task")}},
    "agent": lambda name: {"agent": {"type": name("Task")}},
    "loss": lambda name: {"loss": {"type": name("Task")}},
    "advantage": lambda name: {"advantage": {"type": name("Task")}},
    "logger": lambda name: {"logging": {"backend": [name("Task")]}},
    "rows": lambda name: {
        "env": {"dataset": "rows"},
        "data": {"source": name("ROWS")},
        "reward": {"function": "exact"},
    },
    "reward": lambda name: {"reward": {"function": name("score")}},
    "component": lambda name: {"reward": {"components": {"own": {"_target_": name("score")}}}},
    "dotted": lambda name: {
        "reward": {"components": {"own": {"_target_": name("score").replace(":", ".")}}}
    },
}


def chat_row():
    return answer("b", traj=2, reward=2.0, group=1)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Makes a run's folder whose configuration names code; says whether that ran."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 12+34?\n"))

    def make(config):
        folder = write_run(tmp_path / "run", config, {"train/reward": [0.5]})
        shutil.copytree(embedded_model_path(), folder / "checkpoints" / "step_000001")
        RolloutWriter(folder / "rollouts").append(1, [chat_row()])
        return folder

    make.ran = (tmp_path / "ran").exists
    yield make
    sys.modules.pop(MODULE, None)


def status_of(*arguments):
    try:
        return main([str(each) for each in arguments])
    except SystemExit as ended:
        return ended.code


def said(capfd):
    """All of it, without line breaks."""
    return " ".join("".join(capfd.readouterr()).split())


@pytest.mark.full
@pytest.mark.parametrize("name", [BY_MODULE, BY_FILE])
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_command_that_reads_a_run_imports_what_its_configuration_names(
    setting, name, foreign, tmp_path, capfd
):
    config = SETTINGS[setting](lambda end: name.format(end, folder=tmp_path))
    run = foreign(config)
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(config))
    output = ("-o", tmp_path / "chats.jsonl")
    for command in (
        ("chat", run),
        ("chat", run / "checkpoints" / "step_000001"),
        ("export", run, *output),
        ("doctor", run, "--recipe", "grpo"),
        ("doctor", tmp_path / "file.yaml", "--recipe", "grpo"),
        ("view", run),
        ("plot", run),
    ):
        status_of(*command)
        assert not foreign.ran(), command
    if setting != "logger":  # which nothing that reads asks for
        assert "code is not run: add --trust" in said(capfd)


def test_a_conversation_goes_on_without_foreign_tools_and_says_so(foreign, tmp_path, capfd):
    run = foreign({"env": {"tools": [f"{MODULE}:lookup"], "system_prompt": "Say it."}})
    assert status_of("chat", run) == 0
    out, err = capfd.readouterr()
    assert f"the run's config.yaml names '{MODULE}:lookup', whose code is not run" in err
    assert out.strip()
    assert not foreign.ran()


@pytest.mark.parametrize("extra", [("--trust",), ("--tool", f"{MODULE}:lookup")])
def test_what_is_trusted_or_typed_is_imported_by_chat(extra, foreign):
    run = foreign({"env": {"tools": [f"{MODULE}:lookup"]} if extra == ("--trust",) else {}})
    assert status_of("chat", run, *extra) == 0
    assert foreign.ran()


def test_an_export_without_the_schemas_of_its_tools_is_refused_not_written(
    foreign, tmp_path, capfd
):
    run = foreign({"env": {"tools": [f"{MODULE}:lookup"]}, "model": {"name": "a"}})
    output = tmp_path / "chats.jsonl"
    assert status_of("export", run, "-o", output) == 1
    assert "add --trust" in capfd.readouterr().err
    assert not output.exists()
    assert not foreign.ran()
    assert status_of("export", run, "-o", output, "--trust") == 0
    written = json.loads(output.read_text())
    assert [tool["function"]["name"] for tool in written["tools"]] == ["lookup"]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "lookup"}}]])
def test_an_export_takes_the_schemas_that_the_rollouts_keep(tools, foreign, tmp_path):
    run = foreign({"env": {"tools": [f"{MODULE}:lookup"]}, "model": {"name": "a"}})
    shutil.rmtree(run / "rollouts")
    KeptRollouts(run, "all", tools=tools).record(1, RowOutcomes([chat_row()]))
    assert [chat.tools for chat in read_chats(run)] == [tools]
    assert status_of("export", run, "-o", tmp_path / "chats.jsonl") == 0
    assert json.loads((tmp_path / "chats.jsonl").read_text()).get("tools") == tools
    assert not foreign.ran()


def test_the_doctor_imports_what_is_typed_and_refuses_what_the_file_names(foreign, tmp_path, capfd):
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({"loss": {"type": f"{MODULE}:Loss"}}))
    reward = f"reward={tmp_path}/{MODULE}.py:score"
    assert status_of("doctor", tmp_path / "file.yaml", "--recipe", "grpo", reward) == 1
    told = said(capfd)
    assert f"file.yaml names '{MODULE}:Loss', whose code is not run" in told
    assert f"{MODULE}.py:score', whose code" not in told


def test_a_search_path_of_hydra_that_would_be_imported_is_refused(foreign, tmp_path, capfd):
    package = tmp_path / "someone_elses_package"
    package.mkdir()
    (package / "__init__.py").write_text(CODE)
    values = {"defaults": ["_self_"], "hydra": {"searchpath": [f"pkg://{package.name}"]}}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({**values, "seed": 1}))
    assert status_of("doctor", tmp_path / "file.yaml", "--recipe", "grpo") == 1
    assert not (package / "ran").exists()
    assert "'pkg://someone_elses_package', whose code is not run" in said(capfd)


def test_a_chat_opens_no_data_that_a_configuration_names(foreign, tmp_path, capfd, monkeypatch):
    opened = []
    monkeypatch.setattr("torchrl_llm.data.table_files._read_text", opened.append)
    run = foreign({"env": {"dataset": "calculator", "data_files": str(tmp_path / "file.jsonl")}})
    assert status_of("chat", run) == 0
    assert opened == []
    assert "calculator" in capfd.readouterr().err  # its tool is there as ever


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.chat_template_name", {"_target_": "a:b"}),
        ("env.tools", 3),
        ("env.system_prompt", ["Be kind."]),
        ("inference_model.max_tokens", "many"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_by_its_key(key, value, foreign, capfd):
    group, name = key.split(".")
    assert status_of("chat", foreign({group: {name: value}})) == 1
    assert f"{key} of the run's configuration must be " in said(capfd)


@pytest.mark.parametrize("place", ["/dev/null", "pipe.jsonl"])
def test_the_doctor_reads_no_device_or_pipe_that_a_file_names(place, foreign, tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe.jsonl")
    values = {
        "env": {"dataset": "rows"},
        "data": {"source": place},
        "reward": {"function": "exact"},
    }
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
    assert status_of("doctor", tmp_path / "file.yaml", "--recipe", "grpo") == 1
    assert f"{place}', which is no plain file and not read: add --trust" in said(capfd)


@pytest.mark.parametrize("extra", [(), ("--trust",), ("reward.components.j.url={url}",)])
def test_a_judge_of_a_file_is_sent_nothing_unless_that_is_said(
    extra, foreign, tmp_path, capfd, monkeypatch
):
    class Judge(ChatHandler):
        def reply(self, body):
            return 200, {"choices": [{"message": {"content": "Score: 5"}}]}, {}

    monkeypatch.setenv("SOMEONES_KEY", "sk-secret")
    with chat_server(Judge) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        judge = {"type": "judge", "url": url, "model": "m", "api_key_variable": "SOMEONES_KEY"}
        values = {"env": {"dataset": "arithmetic"}, "reward": {"components": {"j": judge}}}
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
        typed = [each.format(url=url) for each in extra]
        status_of("doctor", tmp_path / "file.yaml", "--recipe", "grpo", *typed)
    assert {key for _, key, _ in server.requests} == ({"Bearer sk-secret"} if extra else set())
    told = f"names '{url}', which is sent nothing: add --trust" in said(capfd)
    assert told == (not extra)


@pytest.mark.parametrize("config", [{"env": [1]}, {"env": "x"}, {"agent": ["x"]}, {"model": 3}])
def test_a_group_that_is_none_is_told_by_its_name(config, foreign, capfd):
    run = foreign(config)
    assert status_of("chat", run) == 1
    assert f"{next(iter(config))} of the run's configuration is no group of keys" in said(capfd)
    assert status_of("doctor", run, "--recipe", "grpo") == 1
    assert "Traceback" not in said(capfd)


def test_only_whole_words_that_were_typed_are_allowed(tmp_path):
    with importing_only(["env.tools=[a.b:c,fractions:Fraction]"], whose="it") as refused:
        assert import_named("fractions:Fraction")
        for path in ("b:c", "tions:Fraction", "fractions:Decimal", "os.system"):
            with pytest.raises(ConfigError, match="add --trust"):
                import_named(path)
    assert len(refused) == 4
    assert import_named("decimal:Decimal")

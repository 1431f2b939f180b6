"""``torchrl-llm train langmarl``: its folder, its resume, what it prints and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from evaluation.report.pages import HOSTILE, unpacked
from recipes.script import read_metrics

from torchrl_llm.cli import main
from torchrl_llm.langmarl import calculator, load_config
from torchrl_llm.langmarl.environment import make_env


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; its status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words, command=("train", "langmarl")):
        try:
            status = main([*command, *words])
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def runs(folder):
    return sorted(folder.glob("outputs/langmarl/*/*/runs/*"))


def test_a_run_has_a_folder_of_its_own_and_says_what_comes_next(train, tmp_path):
    status, out, err = train("num_iterations=2", "trajectories_per_iteration=4")
    assert status == 0, err
    [run] = runs(tmp_path)
    folder = run.relative_to(tmp_path)
    assert re.fullmatch(r"outputs/langmarl/[\d-]{10}/[\d-]{8}/runs/qa_central_credit", str(folder))
    assert f"langmarl: model actor, env language, folder {folder}" in err
    assert "iteration 2/2, reward 1.000" in err
    assert f"torchrl-llm view {folder}" in out
    assert f"torchrl-llm plot {folder}" in out
    assert f"experiment_dir={folder.parents[1]}" in out
    assert "\x1b" not in out + err
    rows = read_metrics(run)
    assert [row["train/step"] for row in rows] == ["1", "2"]
    assert rows[1]["train/reward"] == "1.0"
    assert (folder.parents[1] / "policies" / "qa_central_credit_best.json").is_file()


def test_the_same_name_or_folder_resumes_and_no_name_begins_anew(train, tmp_path):
    small = ["trajectories_per_iteration=2", "num_iterations=1"]
    assert train(*small, "run_name=mine")[0] == 0
    [first] = runs(tmp_path)
    calls = (first / "calls.jsonl").read_text()
    assert train(*small, "run_name=mine", "num_iterations=2")[0] == 0
    assert runs(tmp_path) == [first]
    assert (first / "calls.jsonl").read_text().startswith(calls)
    assert [row["train/step"] for row in read_metrics(first)] == ["1", "2"]
    again = [*small, "run_name=mine", f"experiment_dir={first.parents[1]}", "num_iterations=3"]
    status, _out, _ = train(*again)
    assert status == 0
    assert runs(tmp_path) == [first]
    assert len(read_metrics(first)) == 3
    assert train(*small, "folder=elsewhere")[0] == 0
    assert (tmp_path / "elsewhere" / "runs" / "qa_central_credit" / "metrics.csv").is_file()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["num_iteration=3"], "did you mean 'num_iterations'?"),
        (["config=mth"], "config=mth: there is no such file; the recipe has calculator, coding"),
        (["config=math_central_credit", "llm=gpt-4o-mni"], "did you mean 'gpt-4o-mini'?"),
        (["config=math_central_credit"], "set the environment variable OPENAI_API_KEY"),
        (["criticllm=gpt-4o-mini"], "did you mean 'critic_llm'?"),
        (["config=calculator", "num_agents=2"], "env=calculator has 1 agent, got num_agents=2"),
        (["num_iterations"], "a setting is given as key=value"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(train, words, problem, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    status, _out, err = train(*words)
    assert (status, problem in err, "Traceback" in err) == (1, True, False), err


def test_the_help_shows_the_keys_and_their_defaults(train):
    status, out, _ = train("--help")
    assert status == 0
    assert re.search(
        r"num_iterations=5 +# total number of iterations; with 0, nothing is trained\.", out
    )
    assert "torchrl-llm train langmarl config=calculator" in out
    status, out, _ = train("--help", command=("train", "langmarl-weights"))
    assert status == 0
    assert "language_interval=2" in out
    assert "run=null" in out
    status, _, err = train("mod=text", command=("train", "langmarl-weights"))
    assert status == 1
    assert "did you mean 'mode'?" in err


def test_the_embedded_model_learns_to_use_the_calculator(train, tmp_path):
    given = ["trajectories_per_iteration=4", "num_iterations=1"]
    status, out, err = train("config=calculator", *given)
    assert status == 0, err
    [run] = runs(tmp_path)
    assert (run / "checkpoints/iter_1/agent_1.txt").read_text() == "Use the calculator."
    before, after = read_metrics(run)
    # Nobody guesses a product; with the calculator the model is right in about half of its calls.
    assert (before["eval/reward"], after["train/reward"]) == ("0.0", "0.0")
    assert float(after["eval/reward"]) > 0.3
    found = re.search(r"held-out reward +0\.000 -> (\S+)", out)
    assert float(found[1]) == pytest.approx(float(after["eval/reward"]), abs=1e-3)


def test_the_calculator_computes_the_call_and_nothing_else(tmp_path):
    model = {"model_string": "local:"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"env": "calculator", "num_agents": 1, "llm": model}))
    env = make_env("calculator", load_config(path))
    env.reset({"query": "What is 12*11?", "answer": "132"})
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
    assert env.step("agent_1", call % "12*11")[:3] == ("132", 1.0, True)
    assert env.step("agent_1", call % "12+11")[:2] == ("23", 0.0)
    assert env.step("agent_1", call % "12**11")[:2] == ("", 0.0)
    assert env.step("agent_1", "132")[:2] == ("", 0.0)
    said = calculator.critic([{"role": "user", "content": call % "12+11"}])
    assert "It called the calculator." in said
    assert "It guessed" not in said


def test_view_shows_policies_credit_and_episodes(train, tmp_path):
    assert train("folder=run", "num_iterations=2", "trajectories_per_iteration=3")[0] == 0
    status, out, err = train("run", command=("view",))
    page = tmp_path / "run/runs/qa_central_credit/view.html"
    assert (status, err) == (0, "")
    assert out.startswith("page run/runs/qa_central_credit/view.html, 6 episodes, ")
    header, columns = unpacked(page.read_text(encoding="utf-8"))
    assert header["facts"]["paradigm"] == "central_credit"
    assert header["facts"]["critic_llm"] == "critic"
    assert columns["train/reward steps"].tolist() == [1, 2]
    shown = header["language"]
    assert [agent["name"] for agent in shown["agents"]] == ["agent_1", "agent_2", "agent_3"]
    kept, added = shown["agents"][1]["diff"]
    assert kept[0] == "="
    assert kept[1].startswith("You are agent 2 of 3")
    assert (added[0], added[1].split("\n")[-1]) == ("+", "Check each number against its source.")
    first, second = shown["iterations"]
    assert first["agents"][1]["advice"] == "Check each number against its source."
    assert [agent["diff"] for agent in second["agents"]] == [[], [], []]
    episode = first["episodes"][0]
    assert episode["turns"][0][0] == "agent_1"
    assert "guessed" in episode["turns"][0][2]
    assert episode["credit"][0][0] == "agent_1"
    assert "It was a guess." in episode["credit"][0][1]
    assert train("run", "--rows", "2", command=("view",))[1].count("2 episodes") == 1
    status, out, _ = train("run", command=("plot",))
    assert status == 0
    assert "train/reward" in out


def test_what_models_wrote_cannot_become_markup(train, tmp_path):
    assert train("folder=run", "num_iterations=1", "trajectories_per_iteration=1")[0] == 0
    run = tmp_path / "run/runs/qa_central_credit"
    file = run / "trajectories/iter_0/episode_000.json"
    episode = json.loads(file.read_text())
    episode["transitions"][0]["action"] = "\n".join(HOSTILE)
    file.write_text(json.dumps(episode))
    assert train("run", command=("view",))[0] == 0
    page = (run / "view.html").read_text(encoding="utf-8")
    assert "pwned" not in page
    shown = unpacked(page)[0]["language"]["iterations"][0]["episodes"][0]["turns"][0][2]
    assert "<script>window.pwned=1</script>" in shown
    assert "\u202e" not in shown
    file.write_text("{")
    status, _, err = train("run", command=("view",))
    assert status == 1
    assert "episode_000.json cannot be read" in err

"""Self-play: two policies in one run, resumed bit for bit; who plays whom; what is refused."""

import sys
from pathlib import Path

import pytest
import torch
from recipes.script import read_metrics, run_main
from safetensors.torch import load_file

from torchrl_llm.collectors import AgentShares
from torchrl_llm.envs.layers import transforms_of
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.builders import make_train_env

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "self-play" / "self-play.py"
SMALL = [
    "agents.imitate_steps=0",
    "train.prompts_per_batch=1",
    "env.repeats=8",
    "env=own",
    "env.dataset=recipes.pennies:PenniesEnv",
    "eval.num_prompts=4",
    "logging.progress=false",
    "optimizer.scheduler=constant",
    "optimizer.warmup_steps=0",
]


def run(monkeypatch, folder, *overrides):
    """Run the page, small; the rows of metrics.csv without what a clock says."""
    run_main(monkeypatch, SCRIPT, folder, *SMALL, *overrides)
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(folder)
    ]


def weights(folder, step, name):
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / name / "model.safetensors")


def test_two_policies_that_are_stopped_and_resumed_are_those_that_were_not(tmp_path, monkeypatch):
    whole = run(monkeypatch, tmp_path / "whole", "train.max_steps=3")
    run(monkeypatch, tmp_path / "parts", "train.max_steps=2", "eval.before_train=true")
    parts = run(monkeypatch, tmp_path / "parts", "train.max_steps=3", "checkpoint.resume=auto")
    # The first part was evaluated at its end; what was trained is the same to the last digit.
    own = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in parts]
    assert own[:-1] == [{k: row[k] for k in own[0]} for row in whole[:-1]]
    assert parts[-1] == whole[-1]
    models = {}
    for name in ("A", "B"):
        ours, theirs = (weights(tmp_path / each, 3, name) for each in ("parts", "whole"))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        models[name] = theirs
        generated = [int(row[f"train/{name}/tokens_generated"]) for row in whole[1:]]
        trained = [int(row[f"train/{name}/tokens_trained"]) for row in whole[1:]]
        assert 0 < sum(trained) <= sum(generated)
    # They began alike, and each has learned from rows of its own.
    assert any(not torch.equal(models["A"][key], models["B"][key]) for key in models["A"])
    assert {"eval/A/won", "eval/B/legal", "train/A/reward"} <= set(whole[-1])


@pytest.mark.parametrize("opponent", ["self", "checkpoint"])
def test_one_policy_learns_all_seats(tmp_path, monkeypatch, opponent):
    options = ["agents.shared=true", f"agents.opponent={opponent}", "train.max_steps=3"]
    if opponent == "checkpoint":
        options.append("agents.opponent_interval=2")
    table = run(monkeypatch, tmp_path, *options)
    assert all(float(row["train/player/reward"]) <= 1 for row in table[1:])
    # What is trained on was sampled by the trained policy, and not by an earlier one.
    assert all(abs(float(row["train/player/kl_to_inference"])) < 1e-6 for row in table[1:])
    if opponent == "checkpoint":
        parts = tmp_path / "parts"
        run(monkeypatch, parts, *options, "train.max_steps=2")
        assert run(monkeypatch, parts, *options, "checkpoint.resume=auto")[-1] == table[-1]
        now, then = (weights(tmp_path, 3, name) for name in ("player", "opponent"))
        assert any(not torch.equal(now[key], then[key]) for key in now)
    # A checkpoint of one policy, loaded for two.
    with pytest.raises(ConfigError, match=r"agents\.shared: True -> False"):
        run(monkeypatch, tmp_path, "train.max_steps=4", "checkpoint.resume=auto")


def made(tmp_path, **settings):
    """The page's parts, of a small run: its configuration, policies and the learner of X."""
    page = launch.load_page("self-play/self-play.py")
    env = {"dataset": "tic_tac_toe_for_two", "repeats": 8, "options": {"actions": "bare"}}
    small = {"agents": {"imitate_steps": 0}, "eval": {"num_prompts": 4}}
    train = {"prompts_per_batch": 4, **settings.pop("train", {})}
    env |= settings.pop("env", {})
    config = page.load_config({**small, "env": env, "train": train, **settings})
    policies = page.make_policies(config, tmp_path)
    players = config.players_of(policies)
    learners = page.make_learners(config, policies, AgentShares([], players), players)
    return page, config, policies, learners["X"]


def test_players_are_evaluated_in_the_environment_that_they_are_trained_in(tmp_path):
    agent = {"type": "tool", "tools": ["calculator"]}
    page, config, policies, _ = made(tmp_path, agent=agent, env={"max_steps": 2})
    evaluation = page.PlayersEvaluation(config, policies, config.players_of(policies))
    envs = [
        make_train_env(config, policies["X"].tokenizer, seed=0),
        evaluation._seats["X"][1],
    ]
    kinds = [[type(each).__name__ for each in transforms_of(env)] for env in envs]
    assert kinds[0] == kinds[1]
    assert "ToolTransform" in kinds[0]
    limits = [[t.max_steps for t in transforms_of(e) if isinstance(t, StepCounter)] for e in envs]
    assert limits == [[2], [2]]


def test_a_learner_has_what_its_settings_ask_for(tmp_path):
    *_, learner = made(tmp_path, reward={"overlong_cache": 2})
    assert [type(each).__name__ for each in learner.algorithm.transforms] == ["OverlongPenalty"]
    *_, learner = made(tmp_path, correction={"type": "tis"}, train={"epochs": 2})
    assert [type(each).__name__ for each in learner.algorithm.scorers] == ["RetrieveLogProb"]


def test_the_learning_rate_ends_where_the_updates_of_a_policy_end(tmp_path):
    train = {"optim_batch_size": 16, "max_steps": 4}
    optimizer = {"scheduler": "linear", "warmup_steps": 0, "lr": 1e-3}
    _, config, _, learner = made(tmp_path, train=train, optimizer=optimizer)
    assert (config.rows_per_policy, config.num_updates) == (16, 4)
    for _ in range(4):
        learner.optimizer.step()
        learner.scheduler.step()
    assert learner.scheduler.get_last_lr() == [0.0]


def test_a_price_of_cut_answers_that_no_game_asks_for_is_refused(tmp_path):
    _, config, policies, _ = made(tmp_path, reward={"cut_penalty": 0.5})
    with pytest.raises(ConfigError, match=r"cut_penalty has no effect.*invalid_reward"):
        make_train_env(config, policies["X"].tokenizer, seed=0)


IMITATED = ["agents.imitate_steps=1", "train.max_steps=1", "eval.num_prompts=0"]


def kept_players(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_player_is_imitated_once_and_later_runs_begin_from_it(tmp_path, monkeypatch, capsys):
    shelf = tmp_path / "players"
    options = [*IMITATED, f"agents.players_folder={shelf}"]
    run(monkeypatch, tmp_path / "first", *options)
    assert (tmp_path / "first" / "imitated" / "checkpoints" / "step_000001").is_dir()
    [player] = shelf.iterdir()
    half = player.with_name(f".{player.name}.0123abcd")  # of a run that was killed
    half.mkdir()
    (half / "config.json").write_text("{")
    before = load_file(player / "model.safetensors")
    run(monkeypatch, tmp_path / "second", *options)
    assert not (tmp_path / "second" / "imitated").exists()
    told = f"begins from the player of an earlier run, {player}; delete it to imitate anew"
    assert told in (tmp_path / "second" / "run.log").read_text() + capsys.readouterr().err
    after = load_file(player / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    run(monkeypatch, tmp_path / "other", *options, "seed=1")
    assert len(kept_players(shelf)) == 3  # the second seed has a player of its own


def test_without_a_folder_for_players_each_run_imitates(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path, *IMITATED, "agents.players_folder=null")
    made = tmp_path / "imitated" / "checkpoints" / "step_000001"
    before = made.stat().st_mtime_ns
    run(monkeypatch, tmp_path, IMITATED[0], "agents.players_folder=null", "train.max_steps=2",
        "checkpoint.resume=auto", "eval.num_prompts=0")  # fmt: skip
    assert made.stat().st_mtime_ns == before


def test_of_two_runs_that_keep_a_player_at_once_one_wins_and_nothing_else_is_left(tmp_path):
    page = launch.load_page("self-play/self-play.py")
    keep = vars(sys.modules[page.make_policies.__module__])["_keep_player"]
    kept = tmp_path / "players" / "imitated_1"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
        assert keep(tmp_path / name, kept) == kept
    assert kept_players(kept.parent) == ["imitated_1"]
    assert (kept / "model.safetensors").read_text() == "one"
    with pytest.raises(OSError, match="no_model"):
        keep(tmp_path / "no_model", tmp_path / "players" / "imitated_2")
    assert kept_players(kept.parent) == ["imitated_1"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("shared", ["false", "true"])
def test_engines_sample_with_the_weights_of_each_step(tmp_path, monkeypatch, shared):
    pytest.importorskip("vllm")
    options = ["inference_model.backend=vllm", "inference_model.max_model_len=256"]
    options += [f"agents.shared={shared}"]
    options += ["agents.opponent=checkpoint"] if shared == "true" else []
    table = run(monkeypatch, tmp_path, *options, "train.max_steps=2")
    table += run(monkeypatch, tmp_path, *options, "train.max_steps=3", "checkpoint.resume=auto")[
        -1:
    ]
    assert [row["train/step"] for row in table] == ["0", "1", "2", "3"]
    for name in ["player"] if shared == "true" else ["A", "B"]:
        for row in table[1:]:
            assert int(row[f"train/{name}/tokens_trained"]) > 0
            assert abs(float(row[f"train/{name}/kl_to_inference"])) < 1e-6
            assert float(row[f"train/{name}/canary_rounding"]) < 10
    assert "eval/B/legal" in table[-1]

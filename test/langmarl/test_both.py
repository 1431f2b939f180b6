"""The page both.py: which of text and weights changes, on which rollouts, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from recipes.glossary import unknown
from safetensors.torch import load_file

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.environment import BaseCritic, Trajectory
from torchrl_llm.langmarl.language_policy import LanguagePolicy
from torchrl_llm.recipes import launch

SMALL = {
    "prompts": 1,
    "repeats": 4,
    "steps": 2,
    "language_interval": 1,
    "validation": 4,
    "games": 4,
    "imitate_steps": 2,
}
BOARD = "O takes 9.\n{}\nYou are X. Your move."


@pytest.fixture(scope="module")
def page():
    return launch.load_page("langmarl/both.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all runs, which share the imitated player."""
    return tmp_path_factory.mktemp("both")


class Harsh(BaseCritic):
    """Says the same of every game, and keeps the games."""

    def __init__(self):
        self.episodes = []

    def evaluate(self, trajectory, policies):
        self.episodes.append(trajectory)
        return {"raw_response": "", "per_agent": dict.fromkeys(policies, "An edge is bad.")}


def helps(text, policy, num_games, **options):
    """In place of the games: they are all won with advice, and lost without."""
    conversations = {"conversations": (), "metrics": dict}
    return lambda: SimpleNamespace(
        accuracy=float(bool(text.feedback)), num_prompts=num_games, **conversations
    )


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(folder, run):
    """Whether the weights of a run's checkpoint differ from those of the imitated player."""
    before = weights(folder / "player-seed0-2")
    after = weights(run / "checkpoints" / "step_000002")
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("mode", ["text", "weights", "both"])
def test_a_mode_changes_what_it_is_called_after(page, folder, mode, monkeypatch):
    critic = Harsh()
    monkeypatch.setattr(page, "Critic", lambda: critic)
    monkeypatch.setattr(page, "won_games", helps)
    config = page.BothConfig(**SMALL, mode=mode, folder=str(folder))
    *_, run = page.train(config)
    assert changed(folder, run.folder) == (mode != "text")
    told = [episode.steps[0]["policy"] for episode in critic.episodes]
    assert len(told) == 8
    assert set(told[:4]) == {page.BASE}
    # What the language step of the first rollouts has written is what the second are played with.
    advised = set(told[4:]) != {page.BASE}
    assert advised == (mode != "weights")
    assert run.metrics.get("train/language_won") == (None if mode == "weights" else 1.0)
    assert not unknown(name for name in run.metrics if "/" in name)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(page, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "Critic", Harsh)
    monkeypatch.setattr(page, "won_games", helps)
    whole, parts = (page.BothConfig(**SMALL, folder=str(tmp_path / name)) for name in "ab")
    *_, expected = page.train(whole)
    steps = page.train(parts)
    next(steps)
    next(steps).save()
    steps.close()
    *_, found = page.train(parts)
    both = [weights(run.folder / "checkpoints" / "step_000002") for run in (expected, found)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    told = [
        {name: value for name, value in run.metrics.items() if name.startswith("train/")}
        for run in (expected, found)
    ]
    assert told[0] == pytest.approx(told[1], nan_ok=True)
    assert told[0]["train/tokens_trained"] > 0
    assert told[1]["train/language_won"] == 1  # with the text of the checkpoint


@pytest.mark.full
def test_the_advice_that_helps_is_found_and_wins_games(page, tmp_path):
    changes = {"language_interval": 1, "gradients": 1, "games": 4, "imitate_steps": 400}
    config = page.BothConfig(mode="text", **changes, folder=str(tmp_path))
    won = []
    for run in page.train(config):
        log = (config.run_folder / "run.log").read_text()
        if "train/language_won" in run.metrics:
            won.append(run.metrics["train/language_won"])
        if re.search(r"; now '(Middle, then|Take) corners\.'", log):
            won.append(run.metrics["train/language_changed_won"])
            break
    assert won[-1] > won[0] + 0.08, log


@pytest.mark.parametrize(("share", "stays"), [(0.50, True), (0.27, False), (0.25, False)])
def test_a_change_stays_only_if_clearly_more_games_are_won_with_it(page, share, stays):
    text = LanguagePolicy("Play.", "Take edges.")
    shares = iter([0.25, share])
    optimizer = SimpleNamespace(
        generate_gradient=lambda policy, evaluation, context: f"Mind: {evaluation}",
        aggregate_gradients=" ".join,
        apply_gradient=lambda policy, gradient: gradient,
    )

    def validate():
        return SimpleNamespace(accuracy=next(shares), num_prompts=256)

    assert page.language_step(text, optimizer, ["a", "b"], validate) == (0.25, share)
    before = "Play.\n\n[CASE-SPECIFIC FEEDBACK]\nTake edges."
    assert text.text == ("Mind: a Mind: b" if stays else before)


def test_a_step_in_which_the_critic_says_nothing_changes_nothing(page):
    text = LanguagePolicy("Play.")
    result = SimpleNamespace(accuracy=0.5, num_prompts=4)
    assert page.language_step(text, None, [], lambda: result) == (0.5, 0.5)
    assert text.text == "Play."


def test_the_critic_says_which_better_cell_was_free(page):
    steps = [
        {"observation": BOARD.format("1 2 3\n4 5 6\n7 8 O"), "action": "2"},
        {"observation": BOARD.format("1 X 3\n4 O 6\n7 8 O"), "action": "3"},
        {"observation": BOARD.format("1 X X\n4 O 6\nO 8 O"), "action": "4"},
        {"observation": BOARD.format("X X X\n4 O 6\nO 8 O"), "action": "8"},
    ]
    lost = page.Critic().evaluate(Trajectory({}, steps, -1.0), {"agent": ""})
    assert lost["per_agent"]["agent"] == (
        "You took 2, an edge, while a middle and a corner was free. "
        "You took 4, an edge, while a corner was free."
    )
    won = page.Critic().evaluate(Trajectory({}, steps, 1.0), {"agent": ""})
    assert won["per_agent"]["agent"] == ""


def test_the_optimizer_advises_on_what_the_critic_spoke_of(page):
    optimizer = page.Optimizer()
    said = "You took 4, an edge, while a corner was free."
    found = {optimizer.generate_gradient("", said, "") for _ in range(100)}
    assert found == {"Middle, then corners.", "Take corners.", "Take edges."}
    policy = "Play.\n\n[CASE-SPECIFIC FEEDBACK]\nTake corners."
    found = {optimizer.generate_gradient(policy, said, "") for _ in range(100)}
    assert found == {"Middle, then corners.", "Take edges."}
    assert optimizer.aggregate_gradients(["Wait.", "Go.", "Go."]) == "Go."


def test_who_is_imitated_follows_the_advice(page):
    utils = launch.load_page("langmarl/both_utils.py")
    env = utils.TicTacToeEnv(actions="bare", system_prompt=page.BASE, num_envs=1)
    games = [utils.demonstration(env, 0, game)["messages"] for game in range(300)]
    first = {}
    for policy, board, answer, *_ in games:
        if "5" in board["content"] and board["content"].startswith("1 2 3"):
            first.setdefault(policy["content"].splitlines()[-1], []).append(answer["content"])

    def share(advice, cells):
        return sum(answer in cells for answer in first[advice]) / len(first[advice])

    assert set(first) == {page.BASE, *utils.ADVICE}
    assert share("Middle, then corners.", "5") > 0.85
    assert share("Take edges.", "2468") > 0.85
    assert share(page.BASE, "5") < 0.5
    again = [utils.demonstration(env, 0, game)["messages"] for game in reversed(range(20))]
    assert again == games[19::-1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["mod=text"], "unknown key 'mod'; did you mean 'mode'?"),
        (["mode=words"], "mode must be one of"),
        (["steps=many"], "steps"),
        (["repeats=1"], "repeats must be at least 2, got 1"),
        (["steps=0"], "steps must be at least 1, got 0"),
        (["text"], "a setting is given as key=value, got 'text'"),
    ],
)
def test_impossible_settings_are_refused(page, words, problem, monkeypatch):
    monkeypatch.setenv(launch.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        page.main(words)

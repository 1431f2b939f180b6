"""What fails in a reward or a world of the user is shown: its kind once, its place, its count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rewards import scorers

from torchrl_llm.data import failures
from torchrl_llm.envs import DatasetChatEnv, TicTacToeEnv
from torchrl_llm.rewards import Component, CompositeReward, RewardParser

MOVE = "<move>5</move>"


class Reads(RewardParser):
    """A reward that trusts the model, and fails in a library."""

    def score(self, response, answer):
        return json.loads(response)


class Fancy(RewardParser):
    """Each failure is a type of its own."""

    def score(self, response, answer):
        raise type(f"Error{response}", (Exception,), {})(response)


class Silent(RewardParser):
    def score(self, response, answer):
        return None


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(failures, "_said", set())
    monkeypatch.setattr(failures.logger, "warning", lines.append)
    return lines


def answer(td, responses):
    chats = zip(td["history"].prompt.chats, responses, strict=True)
    chats = [chat + [{"role": "assistant", "content": text}] for chat, text in chats]
    td["history"].full = type(td["history"].prompt).of(chats)


def stepped(reward, responses):
    rows = [{"query": "?", "answer": "!"}] * len(responses)
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows)).append_transform(reward)
    td = env.reset()
    answer(td, responses)
    return env.step(td)["next"]


def place(text, name="score", file=__file__):
    """Where a text stands in a file."""
    lines = Path(file).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"{file}:{number}, in {name}"


@pytest.mark.parametrize("num_threads", [0, 3])
def test_an_exception_is_shown_once_with_its_count_and_where_the_user_wrote_it(said, num_threads):
    where = place("json.loads(")
    out = stepped(Reads(num_threads=num_threads), ["1", "no", "neither"])
    assert list(out["error", "place"]) == ["", where, where]
    assert len(said) == 1
    assert said[0].startswith("2 of 3 rows failed: JSONDecodeError: Expecting value")
    assert f" at {where}. " in said[0]
    stepped(Reads(num_threads=num_threads), ["no"])
    assert len(said) == 1


@pytest.mark.parametrize("run", ["inline", "threads", "processes"])
def test_a_component_is_named_wherever_it_runs_and_also_where_it_is_optional(said, run):
    # Whether it is optional is nothing to the processes, which take seconds to start.
    for optional in (False, True)[: 1 if run == "processes" else 2]:
        failures._said.clear()
        failing = Component(scorers.Scripted(), run=run, num_workers=1, optional=optional)
        parts = {"first": Component(scorers.Constant(1.0)), "share": failing}
        out = stepped(CompositeReward(parts), ["raise", "1"])
        where = place("raise ZeroDivisionError", file=scorers.__file__)
        assert out["reward_valid"].tolist() == [optional, True]
        assert list(out["error", "place"]) == ["" if optional else where, ""]
        [line] = said
        assert "1 of 2 rows failed: ZeroDivisionError: component 'share': by zero at " in line
        assert where in line
        said.clear()


def test_what_a_reward_returned_has_no_place_and_endless_kinds_do_not_fill_the_log(said):
    out = stepped(Silent(), ["a"])
    assert list(out["error", "place"]) == [""]
    assert "RewardError: a reward must be one number, got None. Rows" in said[0]
    stepped(Fancy(), [str(number) for number in range(300)])
    assert len(said) == 100


def test_a_world_that_fails_is_shown(said, monkeypatch):
    env = TicTacToeEnv(num_envs=2, player="X")

    def bug(state, action):
        raise KeyError("board")

    monkeypatch.setattr(env.game, "step", bug)
    td = env.reset()
    answer(td, [MOVE] * 2)
    assert list(env.step(td)["next", "error", "place"]) == [place("raise KeyError", "bug")] * 2
    assert said[0].startswith("2 of 2 rows failed: KeyError: 'board' at ")

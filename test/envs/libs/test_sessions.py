"""Worlds elsewhere that misbehave: whatever one shows, only its own row is in error."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.data import History
from torchrl_llm.envs import Observed, Session, SessionEnv


class Shows(Session):
    """Shows what it was told to, at the reset or at the step."""

    def __init__(self, first=Observed("Begin."), then=Observed("Good.", 0.5)):  # noqa: B008
        self.first, self.then = first, then

    def reset(self, options):
        return self.first if options["odd"] else Observed("Begin.")

    def step(self, action):
        return self.then


def answered(td):
    answer = [{"role": "assistant", "content": "go"}]
    td["history"].full = History.of([chat + answer for chat in td["history"].prompt.chats])
    return td


def after_a_step(odd, well=None):
    """Rewards, validity and errors of two rows, of which the first is odd, and what they read."""
    sessions = iter([odd, Shows() if well is None else well])
    env = SessionEnv(
        lambda: next(sessions),
        dataset=[{"odd": True}, {"odd": False}],
        num_envs=2,
        shuffle=False,
        max_concurrency=1,
    )
    # One after the other, so that the first row gets the odd session.
    env.transform[0]._at_once = lambda work, items: [work(item) for item in items]
    row = env.step(answered(env.reset()))["next"]
    rewards, valid = row["reward"].flatten().tolist(), row["reward_valid"].flatten().tolist()
    read = [chat[-1]["content"] for chat in row["history"].prompt.chats]
    return rewards, valid, list(row["error", "type"]), read


@pytest.mark.parametrize(
    "then",
    [
        Observed(None, 1.0),
        Observed({"board": 1}, 1.0),
        Observed([{"role": "user", "content": "only a reset may"}], 1.0),
        Observed("fine", "much"),
        Observed("fine", None),
        Observed("fine", float("nan")),
        Observed("fine", float("-inf")),
        ("fine", 1.0),
        None,
    ],
)
def test_a_step_that_shows_nonsense_is_an_error_of_its_row(then):
    rewards, valid, errors, read = after_a_step(Shows(then=then))
    assert math.isnan(rewards[0])
    assert rewards[1] == 0.5
    assert valid == [False, True]
    assert errors[0] in ("BackendError", "RewardError")
    assert errors[1] == ""
    assert all(isinstance(text, str) for text in read)


@pytest.mark.parametrize(
    "first", [Observed(None), Observed([]), Observed(["Hi"]), Observed({"role": "user"}), None]
)
def test_a_reset_that_shows_nonsense_is_an_error_of_its_row(first):
    rewards, valid, errors, read = after_a_step(Shows(first=first))
    assert (math.isnan(rewards[0]), rewards[1]) == (True, 0.5)
    assert (valid, errors) == ([False, True], ["BackendError", ""])
    assert read[1] == "Good."


def test_rewards_may_be_any_kind_of_number():
    import numpy

    for number in (1, True, numpy.float64(1), torch.tensor(1.0)):
        rewards, valid, *_ = after_a_step(Shows(then=Observed("fine", number)))
        assert (rewards, valid) == ([1.0, 0.5], [True, True])

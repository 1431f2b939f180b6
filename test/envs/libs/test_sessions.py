"""Sessions as environments; one that misbehaves is an error of its own row only."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.data import History
from torchrl_llm.envs import ActionError, Observed, Session, SessionEnv
from torchrl_llm.errors import ConfigError


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


class Nim(Session):
    """Nim as a user writes it: no constructor, and a reset that returns a text."""

    instructions = "Take sticks."
    action_help = "1, 2 or 3"

    def reset(self, options):
        self.sticks = 3 + options.get("seed", 0) % 2
        return f"{self.sticks} sticks."

    def step(self, action):
        if action not in ("1", "2", "3"):
            raise ActionError("Take 1, 2 or 3.")
        self.sticks -= int(action)
        if self.sticks < 1:
            return Observed("You win.", reward=1.0, terminated=True, success=True)
        return f"{self.sticks} sticks."


def said(env, td, texts):
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    chats = td["history"].prompt.chats
    td["history"].full = History.of([c + a for c, a in zip(chats, answers, strict=True)])
    return env.step(td)["next"]


def test_a_class_with_reset_and_step_is_an_environment():
    env = SessionEnv(Nim, num_envs=2, shuffle=False)
    td = env.reset()
    first = [[m["content"] for m in chat] for chat in td["history"].prompt.chats]
    told = "Take sticks. Answer with 1, 2 or 3 and nothing else."
    assert first == [[told, "3 sticks."], [told, "4 sticks."]]
    td = said(env, td, ["3", "3"])
    assert td["reward"].flatten().tolist() == [1.0, 0.0]
    assert td["terminated"].flatten().tolist() == [True, False]
    assert td["success"].flatten().tolist() == [True, False]
    assert td["history"].prompt.chats[1][-1]["content"] == "1 sticks."


def test_a_class_with_a_tag_reads_the_tag_and_the_class_is_the_task_of_a_recipe():
    env_class = SessionEnv.of(Nim)
    assert (env_class.__name__, env_class.WORLD, env_class.max_turns()) == ("Nim", Nim, 32)
    env = env_class(actions="tag", num_envs=1, shuffle=False)
    td = env.reset()
    assert td["history"].prompt.chats[0][0]["content"].endswith("between <action> and </action>.")
    td = said(env, td, ["I take all: <action>3</action>"])
    assert td["reward"].item() == 1.0


def test_an_action_that_is_never_read_costs_each_turn_until_the_limit():
    env = SessionEnv(Nim, num_envs=1, shuffle=False, max_steps=3)
    td, rewards = env.reset(), []
    for _ in range(3):
        td = said(env, td, ["seven"])
        rewards.append(round(td["reward"].item(), 6))
    assert rewards == [-0.1] * 3
    last = td["history"].prompt.chats[0][-1]["content"]
    assert last == "Take 1, 2 or 3. Answer with 1, 2 or 3 and nothing else."
    assert (td["truncated"].item(), td["terminated"].item()) == (True, False)
    assert td["reward_valid"].item()


class BadReset(Nim):
    def reset(self, options):
        raise ZeroDivisionError("no sticks")


class BadStep(Nim):
    def step(self, action):
        raise KeyError("sticks")


class BadFlag(Nim):
    def step(self, action):
        return Observed("fine", terminated="yes")


@pytest.mark.parametrize(
    ("session", "error"),
    [(BadReset, "ZeroDivisionError"), (BadStep, "KeyError"), (BadFlag, "RewardError")],
)
def test_a_session_that_raises_is_an_error_of_its_row(session, error):
    rewards, valid, errors, _ = after_a_step(session(), Shows())
    assert (math.isnan(rewards[0]), rewards[1]) == (True, 0.5)
    assert (valid, errors) == ([False, True], [error, ""])


def test_the_error_of_a_step_says_what_it_must_return():
    env = SessionEnv(lambda: Shows(then=("fine", 1.0)), num_envs=1, dataset=[{"odd": False}])
    row = said(env, env.reset(), ["go"])
    assert row["error", "message"][0] == (
        "step of a session must return a text, or an Observed with a text and a number as reward; "
        "got ('fine', 1.0)"
    )


class Half(Session):
    def reset(self, options):
        return "Begin."


class Needy(Nim):
    def __init__(self, sticks):
        self.sticks = sticks


@pytest.mark.parametrize(
    ("opens", "told"),
    [
        (Nim(), r"got <.*Nim object .*: .*is not a callable object"),
        (Half, "got <class '.*Half'>: it does not define step"),
        (Needy, r"functools\.partial binds some.*missing a required argument: 'sticks'"),
        (None, "must be a Session class or a function.*got None"),
    ],
)
def test_what_opens_no_session_is_refused_before_the_first_row(opens, told):
    with pytest.raises(ConfigError, match=told):
        SessionEnv(opens)

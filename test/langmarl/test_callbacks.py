"""Callbacks: hooks that are told, failures that end nothing, and the plateau that ends training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_llm.langmarl import callbacks
from torchrl_llm.langmarl.callbacks import (
    Callback,
    CheckpointCallback,
    EarlyStoppingCallback,
    LoggingCallback,
    fire,
)

HOOKS = {
    "on_iteration_start": (3, "trainer"),
    "on_iteration_end": (3, {"avg_reward": 0.5}, "trainer"),
    "on_episode_complete": ("trajectory", "trainer"),
    "on_policy_update": ("agent_1", "old", "new"),
}


class Noting(Callback):
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def on_iteration_start(self, iteration, trainer):
        self.told.append(("on_iteration_start", iteration, trainer))

    def on_iteration_end(self, iteration, stats, trainer):
        self.told.append(("on_iteration_end", iteration, stats, trainer))

    def on_episode_complete(self, trajectory, trainer):
        self.told.append(("on_episode_complete", trajectory, trainer))

    def on_policy_update(self, agent_id, old_policy, new_policy):
        self.told.append(("on_policy_update", agent_id, old_policy, new_policy))


class Failing(Callback):
    """Raises at each hook."""

    def on_iteration_start(self, iteration, trainer):
        raise ZeroDivisionError("start")

    on_iteration_end = on_episode_complete = on_policy_update = on_iteration_start


class Interrupting(Callback):
    """As Ctrl-C in a callback."""

    def on_iteration_start(self, iteration, trainer):
        raise KeyboardInterrupt


def stopped_after(rewards, **arguments):
    """The iteration after which training ends, ``None`` if it goes on."""
    for last in range(1, len(rewards) + 1):
        history = [{"avg_reward": reward, "rewards": [reward]} for reward in rewards[:last]]
        trainer = SimpleNamespace(history=history, should_stop=False, ended_by="")
        callback = EarlyStoppingCallback(**arguments)  # a new one each time, as after a resume
        callback.on_iteration_end(last - 1, history[-1], trainer)
        if trainer.should_stop:
            return last - 1
    return None


def test_each_hook_is_told_with_its_arguments_and_does_nothing_by_itself():
    noting = Noting()
    for hook, arguments in HOOKS.items():
        fire([Callback(), noting], hook, *arguments)
        assert noting.told[-1] == (hook, *arguments)
        assert getattr(Callback(), hook)(*arguments) is None
    assert len(noting.told) == len(HOOKS)


def test_a_callback_that_raises_is_logged_and_the_others_are_told(monkeypatch):
    logged, noting = [], Noting()
    monkeypatch.setattr(callbacks.logger, "warning", logged.append)
    for hook, arguments in HOOKS.items():
        fire([Failing(), noting], hook, *arguments)
    assert [told[0] for told in noting.told] == list(HOOKS)
    assert logged[0] == "Failing.on_iteration_start failed: ZeroDivisionError: start"
    assert len(logged) == len(HOOKS)


def test_an_interrupt_in_a_callback_ends_the_training():
    with pytest.raises(KeyboardInterrupt):
        fire([Interrupting()], "on_iteration_start", 0, None)


def test_begin_and_end_of_an_iteration_are_logged():
    logged = []
    trainer = SimpleNamespace(logger=SimpleNamespace(info=logged.append))
    LoggingCallback().on_iteration_start(3, trainer)
    LoggingCallback().on_iteration_end(3, {"avg_reward": 0.51234}, trainer)
    assert logged == ["iteration 3 begins", "iteration 3 ends: avg_reward 0.512"]


def test_policies_are_written_as_files_after_each_iteration():
    written = []
    trainer = SimpleNamespace(save_policy_files=lambda: written.append("now"))
    callback = CheckpointCallback()
    callback.on_iteration_start(0, trainer)
    assert written == []
    callback.on_iteration_end(0, {}, trainer)
    assert written == ["now"]


@pytest.mark.parametrize(
    ("rewards", "arguments", "last"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], {}, 3),  # the first sets the best, then three without a rise
        ([0.1, 0.2, 0.3, 0.4, 0.5], {}, None),
        ([0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0], {}, 6),  # a rise begins the wait again
        ([0.5, 0.505, 0.51, 0.515, 0.9], {}, None),  # small rises add up
        ([0.5, 0.505, 0.508, 0.509, 0.9], {}, 3),  # each too small to be a rise over the best
        ([0.9, 0.1, 0.2, 0.3], {}, 3),  # rises below the best do not count
        ([0.5, 0.4], {"patience": 1}, 1),
        ([0.5, 0.6, 0.7], {"patience": 2, "min_delta": 0.2}, 2),
        ([0.5, 0.50001, 0.50002], {"patience": 1, "min_delta": 0.0}, None),
        ([-3.0, -2.0, -2.0, -2.0, -2.0], {}, 4),
    ],
)
def test_training_ends_where_the_mean_reward_does_not_rise(rewards, arguments, last):
    assert stopped_after(rewards, **arguments) == last


def test_training_that_had_ended_ends_at_once_after_a_resume():
    trainer = SimpleNamespace(
        history=[{"avg_reward": 0.5, "rewards": [0.5]}] * 4, should_stop=False, ended_by=""
    )
    EarlyStoppingCallback(patience=4).on_resume(trainer)
    assert not trainer.should_stop
    EarlyStoppingCallback(patience=3).on_resume(trainer)
    assert trainer.should_stop
    assert trainer.ended_by == "the mean reward does not rise any more"
    empty = SimpleNamespace(history=[], should_stop=False)
    EarlyStoppingCallback(patience=1).on_resume(empty)
    assert not empty.should_stop


def test_the_defaults_are_those_of_the_reference():
    callback = EarlyStoppingCallback()
    assert (callback.patience, callback.min_delta) == (3, 0.01)
